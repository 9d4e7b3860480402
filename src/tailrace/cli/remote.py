"""A conversation with any OpenAI-compatible address, over HTTP and server-sent events.

What comes over the wire is hostile until parsed: statuses, JSON and events are checked, sizes and silences bounded.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any, TypeVar

import aiohttp
import msgspec

from tailrace.cli.backend import AskOptions, Turn, TurnTimer
from tailrace.errors import ClientFailed
from tailrace.request import Message
from tailrace.wire.chunks import Chunk, Model, Models, Usage, error_message, error_text
from tailrace.wire.sse import SseParser
from tailrace.workload.run.endpoint import base_url

ANSWER_BYTES_MAX = 16 * 1024 * 1024
"""Of an answer that is not a stream; lists of models and token counts are far smaller."""
_CONNECT_S = 10.0
_SILENCE_S = 300.0
"""Between two reads of a stream: a queued request on a busy server may wait minutes for its first token."""


_T = TypeVar("_T")


class _Count(msgspec.Struct):
    count: int


class RemoteBackend:
    """Use `connect`."""

    def __init__(self, session: aiohttp.ClientSession, base: str, model: Model) -> None:
        self._session = session
        self._base = base
        self.name = model.id
        self.context_tokens_max = model.max_model_len

    @classmethod
    async def connect(cls, url: str, *, model: str | None, api_key: str | None) -> "RemoteBackend":
        """Asks for the list of models. Raises ClientFailed when the address does not answer or lacks the model."""
        base = base_url(url)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = aiohttp.ClientTimeout(total=None, connect=_CONNECT_S, sock_read=_SILENCE_S)
        # A person types for minutes between turns: a kept connection would often be dead by then.
        connector = aiohttp.TCPConnector(force_close=True)
        session = aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector)
        try:
            async with _answer(session, "GET", f"{base}/v1/models") as response:
                listed = _decode(await _body(response), Models, f"{base}/v1/models")
            return cls(session, base, _pick(listed.data, model, base))
        except BaseException:
            await session.close()
            raise

    async def ask(self, messages: Sequence[Message], options: AskOptions, on_text: Callable[[str], None]) -> Turn:
        body: dict[str, Any] = {
            "model": self.name,
            "messages": [{"role": m.role, "content": m.content} for m in messages],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        given = msgspec.structs.asdict(options)
        body |= {name: value for name, value in given.items() if value is not None}
        timer = TurnTimer(on_text)
        reason: str | None = None
        usage = Usage()
        async with _answer(self._session, "POST", f"{self._base}/v1/chat/completions", body) as response:
            async for chunk in _chunks(response):
                for choice in chunk.choices or ():
                    timer.text((choice.delta and choice.delta.content) or "")
                    reason = choice.finish_reason or reason
                usage = chunk.usage or usage
        details = usage.prompt_tokens_details
        return timer.turn(
            reason,
            num_prompt_tokens=usage.prompt_tokens,
            num_cached_tokens=None if details is None else details.cached_tokens,
            num_output_tokens=usage.completion_tokens,
        )

    async def count(self, messages: Sequence[Message]) -> list[int] | None:
        """Asks `/tokenize` (tailrace, vLLM) for each beginning of the conversation."""
        totals = [0]
        for end in range(1, len(messages) + 1):
            body = {
                "model": self.name,
                "messages": [{"role": m.role, "content": m.content} for m in messages[:end]],
                "add_generation_prompt": False,
            }
            try:
                async with _answer(self._session, "POST", f"{self._base}/tokenize", body) as response:
                    totals.append(_decode(await _body(response), _Count, "/tokenize").count)
            except ClientFailed:
                return None
        return [later - earlier for earlier, later in pairwise(totals)]

    async def close(self) -> None:
        await self._session.close()


def _pick(models: list[Model], wanted: str | None, base: str) -> Model:
    for model in models:
        if wanted is None or model.id == wanted:
            return model
    names = ", ".join(model.id for model in models) or "none"
    raise ClientFailed(f"{base} does not serve {wanted or 'any model'}; it serves: {names}")


@asynccontextmanager
async def _answer(
    session: aiohttp.ClientSession, method: str, url: str, body: dict[str, Any] | None = None
) -> AsyncIterator[aiohttp.ClientResponse]:
    """The response of a request that succeeded; every failure, also while it is read, becomes ClientFailed."""
    try:
        async with session.request(method, url, json=body) as response:
            if response.status != 200:
                text = (await response.content.read(2_000)).decode("utf-8", "replace")
                raise ClientFailed(f"{url} answered {response.status}: {error_text(text)}")
            yield response
    except TimeoutError as error:
        raise ClientFailed(f"{url} did not answer in time; is it overloaded?") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise ClientFailed(f"{url} cannot be used: {str(error) or type(error).__name__}") from error


async def _body(response: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for part in response.content.iter_chunked(65_536):
        content += part
        if len(content) > ANSWER_BYTES_MAX:
            raise ClientFailed(f"{response.url} answered with more than {ANSWER_BYTES_MAX} bytes")
    return bytes(content)


async def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[Chunk]:
    """The chunks of a stream up to `[DONE]`. Raises ClientFailed for an error frame or a stream that was cut."""
    parser = SseParser()
    async for part in response.content.iter_any():
        for event in parser.feed(part):
            if event.is_done:
                return
            chunk = _decode(event.data.encode(), Chunk, "the stream")
            if chunk.error is not None:
                raise ClientFailed(f"the stream ended with an error: {error_message(chunk.error)}")
            yield chunk
    raise ClientFailed("the stream was cut before its end")


def _decode(content: bytes, kind: type[_T], where: str) -> _T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ClientFailed(f"{where} did not answer as an OpenAI-compatible service: {error}") from error
