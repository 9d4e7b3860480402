"""One request on a connection of its own, for a server that is just starting: is it ready, when is its first token?

In: where and what to ask. Out: the answer, or `CallFailed` with a readable line. The caller bounds the time
(`asyncio.timeout_at`); sizes are bounded here.
"""

import asyncio

import msgspec

from tailrace.wire.chunks import Chunk, Models, decode_chunk, error_message, error_text
from tailrace.wire.sse import SseParser
from tailrace.workload.send.connection import Connection
from tailrace.workload.send.pool import Target

ANSWER_BYTES_MAX = 1024 * 1024


class CallFailed(Exception):
    """The message says what came instead of an answer."""


class Answer(msgspec.Struct, frozen=True):
    status: int
    body: bytes


class FirstToken(msgspec.Struct, frozen=True):
    """Monotonic ns."""

    first_token_ns: int
    answered_ns: int


async def get(target: Target, path: str) -> Answer:
    """Raises CallFailed."""
    call = _Call()
    await _exchange(target, target.request("GET", path), call)
    return Answer(call.status, bytes(call.content))


async def first_model(target: Target) -> str:
    """Raises CallFailed."""
    answer = await get(target, "/v1/models")
    if answer.status != 200:
        raise CallFailed(f"GET /v1/models answered {answer.status}: {error_text(answer.body)}")
    try:
        models = msgspec.json.decode(answer.body, type=Models).data
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CallFailed(f"GET /v1/models did not answer with a list of models: {error}") from error
    if not models:
        raise CallFailed("GET /v1/models lists no model")
    return models[0].id


async def stream_first_token(target: Target, path: str, body: bytes) -> FirstToken:
    """Of a streamed request, read to its end. Raises CallFailed when it failed or carried no token."""
    call = _StreamCall()
    await _exchange(target, target.request("POST", path, body), call)
    if call.status != 200:
        raise CallFailed(f"POST {path} answered {call.status}: {error_text(bytes(call.content))}")
    if call.problem:
        raise CallFailed(call.problem)
    if call.first_token_ns is None:
        raise CallFailed(f"POST {path} answered {call.content_type or 'no content type'} without a token")
    return FirstToken(call.first_token_ns, call.ended_ns)


class _Call:
    """An `Exchange` that keeps the body."""

    def __init__(self) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status = 0
        self.content_type = ""
        self.content = bytearray()
        self.ended_ns = 0

    def sent(self, t_ns: int) -> None:
        pass

    def headers(self, t_ns: int, status: int, content_type: str) -> None:  # noqa: ARG002
        self.status, self.content_type = status, content_type

    def body(self, t_ns: int, data: bytes) -> None:  # noqa: ARG002
        self.content += data
        if len(self.content) > ANSWER_BYTES_MAX:
            self.fail(f"the answer has more than {ANSWER_BYTES_MAX} bytes")

    def ended(self, t_ns: int) -> None:
        self.ended_ns = t_ns
        if not self.over.done():
            self.over.set_result(None)

    def lost(self, t_ns: int, message: str, had_answer: bool) -> None:  # noqa: ARG002
        self.fail(message)

    def fail(self, message: str) -> None:
        if not self.over.done():
            self.over.set_exception(CallFailed(message))


class _StreamCall(_Call):
    """An `Exchange` that looks for the first token of an event stream."""

    def __init__(self) -> None:
        super().__init__()
        self.first_token_ns: int | None = None
        self.problem = ""
        self._parser = SseParser()

    def body(self, t_ns: int, data: bytes) -> None:
        if self.status != 200 or self.content_type != "text/event-stream":
            super().body(t_ns, data)
            return
        try:
            for event in self._parser.feed(data):
                if not event.is_done:
                    self._chunk(t_ns, decode_chunk(event.data))
        except (msgspec.DecodeError, ValueError) as error:
            self.fail(f"the stream is not one of completions: {error}")

    def _chunk(self, t_ns: int, chunk: Chunk) -> None:
        if chunk.error is not None:
            self.problem = f"the stream ended with an error: {error_message(chunk.error)}"
        elif self.first_token_ns is None and has_token(chunk):
            self.first_token_ns = t_ns


def has_token(chunk: Chunk) -> bool:
    """Content, reasoning or a tool call; a role alone and an empty text are none."""
    for choice in chunk.choices or ():
        delta = choice.delta
        if choice.text:
            return True
        if delta and (delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls):
            return True
    return False


async def _exchange(target: Target, request: bytes, call: _Call) -> None:
    def ignore(_: Connection) -> None:
        pass

    try:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(ignore, ignore), target.host, target.port
        )
    except OSError as error:
        raise CallFailed(f"no connection: {error.strerror or error}") from error
    try:
        if not connection.is_idle:
            raise CallFailed("the connection closed at once")
        connection.send(request, call)
        await call.over
    finally:
        connection.close()
