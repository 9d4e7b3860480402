"""What every route shares: bodies read within bounds, errors in OpenAI's shape, request ids, the API key.

The middlewares are plain ASGI: with 64 streams open, every layer around `send` is paid for in every chunk.
"""

import asyncio
import hmac
import re
import secrets
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tailrace.errors import BodyTooLarge, Cancelled, InvalidRequest, TailraceError, Unauthorized
from tailrace.wire.responses import error_body

JSON = "application/json"
RETRY_AFTER_S = 1
PUBLIC_PATHS = frozenset({"/health", "/ready", "/version", "/metrics"})
"""Served without a key: probes and scrapers rarely have one, and none of them shows a caller's text."""
REQUEST_ID_HEADER = "x-request-id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


async def read_body(scope: Scope, receive: Receive, *, bytes_max: int, timeout_s: float) -> bytes:
    """The whole body. Raises BodyTooLarge as soon as that is known, InvalidRequest when it does not arrive in time,
    Cancelled when the client leaves."""
    declared = Headers(scope=scope).get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > bytes_max:
        raise _too_large(bytes_max)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read_chunks(receive, bytes_max)
    except TimeoutError:
        raise InvalidRequest(f"the body did not arrive within {timeout_s} s") from None


async def _read_chunks(receive: Receive, bytes_max: int) -> bytes:
    chunks: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client left while its request was read")
        chunk = message.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes > bytes_max:
            raise _too_large(bytes_max)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large(bytes_max: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body is larger than {bytes_max} bytes")


def json_response(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status_code=status, headers=headers, media_type=JSON)


def error_response(error: TailraceError) -> Response:
    """`Retry-After` where trying again makes sense."""
    row = error.row
    headers = {"retry-after": str(RETRY_AFTER_S)} if row.retryable else {}
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return json_response(error_body(error), row.http_status, headers)


async def on_error(request: HttpRequest, error: Exception) -> Response:  # noqa: ARG001
    assert isinstance(error, TailraceError)
    return error_response(error)


class RequestIds:
    """Gives every answer an `x-request-id`: the caller's, when it is a plain short one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class ApiKey:
    """Lets through who shows the key, in constant time. Public paths need none."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PUBLIC_PATHS or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        error = Unauthorized("a valid API key is wanted: `Authorization: Bearer KEY`")
        await error_response(error)(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        # Headers are read as latin-1, so this gives back the bytes that came; a plain `strip` would take the last byte
        # of an "à" for a space.
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip(" \t").encode("latin-1"), self._key)
