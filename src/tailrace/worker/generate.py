"""The two generating routes, hops 1, 2 and 12 of the worker: a body comes in, a JSON object or a stream goes out.

The answer's status is sent with its first text, so that a request the engine refuses (overloaded, too large for the KV
pool, deadline passed in the queue) still gets its own status. A stream that fails later ends with an error event and
without `[DONE]`.
"""

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from tailrace.clock import monotonic_ns
from tailrace.errors import Cancelled, TailraceError
from tailrace.request import Request
from tailrace.wire.openai import RequestContext, parse_timeout_ms, to_chat_request, to_completion_request
from tailrace.wire.responses import (
    ChatChunks,
    ChunkEncoder,
    CompletionChunks,
    Usage,
    chat_answer,
    completion_answer,
    error_event,
)
from tailrace.wire.sse import DONE
from tailrace.worker.call import Call, Delta
from tailrace.worker.http import error_response, json_response, read_body
from tailrace.worker.service import Service

TIMEOUT_HEADER = "x-request-timeout-ms"
ABORT_KEY = "tailrace.abort"
"""In the scope: cuts the connection without waiting for unsent bytes (`worker/serve.py` puts it there)."""
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class GenerateRoute:
    """An ASGI application for one path; use `chat_route` or `completion_route`."""

    def __init__(
        self, service: Service, id_prefix: str, parse: Callable[[bytes, RequestContext], Request], *, is_chat: bool
    ) -> None:
        self._service = service
        self._id_prefix = id_prefix
        self._parse = parse
        self._chunks = ChatChunks if is_chat else CompletionChunks
        self._answer = chat_answer if is_chat else completion_answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = _Stream(send)
        try:
            with self._service.call(self._id_prefix) as call:
                call.disconnect = scope.get(ABORT_KEY)
                await self._run(call, stream, scope, receive, send)
        except TailraceError as error:
            if stream.has_started:
                await stream.finish(error_event(error))
            else:
                await error_response(error)(scope, receive, send)

    async def _run(self, call: Call, stream: "_Stream", scope: Scope, receive: Receive, send: Send) -> None:
        request = await self._read_request(call, scope, receive)
        watcher = asyncio.create_task(_watch(call, receive))
        try:
            await self._service.start(call, request)
            head = self._service.head(request)
            if request.stream:
                await self._stream(call, stream, self._chunks(head, include_usage=request.include_usage))
            else:
                response = json_response(self._answer(head, await call.answer(), call.usage()))
                call.sending_since_ns = monotonic_ns()
                await response(scope, receive, send)
            call.check_taken()
        finally:
            watcher.cancel()

    async def _read_request(self, call: Call, scope: Scope, receive: Receive) -> Request:
        settings = self._service.settings
        timeout = Headers(scope=scope).get(TIMEOUT_HEADER)
        context = self._service.context(call, None if timeout is None else parse_timeout_ms(timeout))
        body = await read_body(scope, receive, bytes_max=settings.body_bytes_max, timeout_s=settings.body_timeout_s)
        return await self._service.off_loop(len(body), lambda: self._parse(body, context))

    async def _stream(self, call: Call, stream: "_Stream", encoder: ChunkEncoder) -> None:
        async with aclosing(call.deltas()) as arrivals:
            async for deltas in arrivals:
                payload = b"".join([_encode(encoder, delta) for delta in deltas])
                if payload:
                    call.sending_since_ns = monotonic_ns()
                    await stream.write(payload)
                    call.sending_since_ns = None
        usage = encoder.usage(call.usage()) if call.request.include_usage else b""
        call.sending_since_ns = monotonic_ns()
        await stream.finish(usage + DONE)


def chat_route(service: Service) -> GenerateRoute:
    return GenerateRoute(service, "chatcmpl", to_chat_request, is_chat=True)


def completion_route(service: Service) -> GenerateRoute:
    return GenerateRoute(service, "cmpl", to_completion_request, is_chat=False)


class _Stream:
    """A response that starts with its first bytes."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_started = False

    async def write(self, payload: bytes) -> None:
        await self._start()
        await self._send({"type": "http.response.body", "body": payload, "more_body": True})

    async def finish(self, payload: bytes) -> None:
        await self._start()
        await self._send({"type": "http.response.body", "body": payload, "more_body": False})

    async def _start(self) -> None:
        if not self.has_started:
            self.has_started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)})


def _encode(encoder: ChunkEncoder, delta: Delta) -> bytes:
    """The events of one delta: start, text, finish, each only if there is something to say."""
    used = delta.used
    payload = encoder.start(delta.index, _before_any_token(used)) if delta.starts else b""
    if delta.piece.text or delta.piece.tokens:
        payload += encoder.piece(delta.index, delta.piece, used)
    if delta.finish_reason is not None:
        payload += encoder.finish(delta.index, delta.finish_reason, used)
    return payload


def _before_any_token(used: Usage | None) -> Usage | None:
    return None if used is None else msgspec.structs.replace(used, completion_tokens=0)


async def _watch(call: Call, receive: Receive) -> None:
    """The client may leave at any moment; its request must not go on without it."""
    while (await receive())["type"] != "http.disconnect":
        pass
    call.abandon(Cancelled("the client left"))
