"""A service that costs nothing: what a client measures against it is the client's own.

`python -m tailrace.workload.run.null_server [--port 0] [--pace-ms 10]`: an own process, one line on stdout with its
address. Each request is answered at once with `max_tokens` chunks of one token, the first at once and each other one
pace later. A chunk carries in `written_ns` the monotonic instant at which it was written. It ends with its stdin, and
then prints what it served as one JSON object.
"""

import argparse
import asyncio
import os
import stat
import sys
import time
from collections import deque
from typing import Any, cast

import httptools
import msgspec
import uvloop

from tailrace.wire.sse import DONE
from tailrace.workload.send.alarm import Alarm
from tailrace.workload.send.file_limit import raise_file_limit

MODEL = "null-model"
"""Tools that read YAML take a bare `null` for nothing."""
TOKENS_MAX = 1_000_000
_BODY_BYTES_MAX = 64 * 1024 * 1024
_NS_PER_MS = 1_000_000

_HEADERS = ("Content-Type: text/event-stream", "Cache-Control: no-cache", "Transfer-Encoding: chunked")
_HEAD = "\r\n".join(("HTTP/1.1 200 OK", *_HEADERS, "", "")).encode()
_COMMON = '"id":"null","created":1700000000,"model":"null-model"'
_CHAT = (
    f'data: {{{_COMMON},"object":"chat.completion.chunk","written_ns":%d,'
    '"choices":[{"index":0,"delta":{"content":"word "},"finish_reason":null}]}\n\n'
)
_COMPLETION = (
    f'data: {{{_COMMON},"object":"text_completion","written_ns":%d,'
    '"choices":[{"index":0,"text":"word ","finish_reason":null}]}\n\n'
)
_CHAT_END = (
    f'data: {{{_COMMON},"object":"chat.completion.chunk",'
    '"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'
)
_COMPLETION_END = (
    f'data: {{{_COMMON},"object":"text_completion","choices":[{{"index":0,"text":"","finish_reason":"length"}}]}}\n\n'
)
_USAGE = (
    f'data: {{{_COMMON},"object":"chat.completion.chunk","choices":[],'
    '"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\n'
)


class _Body(msgspec.Struct):
    """The part of a request that matters here."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False

    @property
    def num_tokens(self) -> int:
        return min(max(self.max_completion_tokens or self.max_tokens or 16, 1), TOKENS_MAX)


class Pacer:
    """Streams under way. All have the same pace, so the order in which they are due is the order of a queue."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pace_ns: int) -> None:
        self._alarm = Alarm(loop)
        self._pace_ns = pace_ns
        self._due: deque[tuple[int, _Stream]] = deque()
        self.num_streams = 0
        self.num_chunks = 0

    def start(self, stream: "_Stream") -> None:
        now_ns = time.monotonic_ns()
        self.num_streams += 1
        self.num_chunks += 1
        if stream.write_chunk():
            self._queue(now_ns + self._pace_ns, stream)

    def _queue(self, due_ns: int, stream: "_Stream") -> None:
        self._due.append((due_ns, stream))
        if len(self._due) == 1:
            self._alarm.at(due_ns, self._tick)

    def _tick(self) -> None:
        now_ns = time.monotonic_ns()
        while self._due and self._due[0][0] <= now_ns:
            due_ns, stream = self._due.popleft()
            self.num_chunks += 1
            if stream.write_chunk():
                # From the instant it was due: a late server does not slow the pace down.
                self._due.append((due_ns + self._pace_ns, stream))
        if self._due:
            self._alarm.at(self._due[0][0], self._tick)


class _Stream:
    """One answer."""

    def __init__(self, transport: asyncio.Transport, num_tokens: int, num_prompt_tokens: int, is_chat: bool) -> None:
        self._transport = transport
        self._num_tokens = num_tokens
        self._left = num_tokens
        self._num_prompt_tokens = num_prompt_tokens
        self._chunk = _CHAT if is_chat else _COMPLETION
        self._last = _CHAT_END if is_chat else _COMPLETION_END
        self._head = _HEAD

    def write_chunk(self) -> bool:
        """Whether more are to come."""
        if self._transport.is_closing():
            return False
        self._left -= 1
        data = self._chunk % time.monotonic_ns()
        head, self._head = self._head, b""
        if self._left > 0:
            self._transport.write(head + _http_chunk(data.encode()))
            return True
        total = self._num_prompt_tokens + self._num_tokens
        usage = _USAGE % (self._num_prompt_tokens, self._num_tokens, total)
        end = (data + self._last + usage).encode() + DONE
        self._transport.write(head + _http_chunk(end) + b"0\r\n\r\n")
        return False


class NullProtocol(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if self._transport is not None:
                self._transport.abort()

    def on_message_begin(self) -> None:
        self._url = b""
        self._body.clear()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > _BODY_BYTES_MAX and self._transport is not None:
            self._transport.abort()

    def on_message_complete(self) -> None:
        if self._transport is None:
            return
        if self._parser.get_method() != b"POST":
            self._answer(200, {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "tailrace"}]})
            return
        try:
            body = msgspec.json.decode(self._body, type=_Body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._answer(400, {"error": {"message": str(error), "type": "invalid_request_error"}})
            return
        num_prompt_tokens = len(self._body) // 5
        is_chat = b"chat" in self._url
        if body.stream:
            self._pacer.start(_Stream(self._transport, body.num_tokens, num_prompt_tokens, is_chat))
        else:
            self._answer(200, _whole(body.num_tokens, num_prompt_tokens, is_chat))

    def _answer(self, status: int, value: Any) -> None:
        content = msgspec.json.encode(value)
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        if self._transport is not None:
            self._transport.write(head.encode() + content)


async def serve(port: int, pace_ms: float) -> int:
    """Serves until stdin ends; where that is no pipe, until the process is ended."""
    raise_file_limit()
    loop = asyncio.get_running_loop()
    pacer = Pacer(loop, round(pace_ms * _NS_PER_MS))
    server = await loop.create_server(lambda: NullProtocol(pacer), "127.0.0.1", port, backlog=4_096)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    over = asyncio.Event()
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        await loop.connect_read_pipe(lambda: _UntilEnd(over), os.fdopen(os.dup(0), "rb"))
    await over.wait()
    server.close()
    print(msgspec.json.encode({"num_streams": pacer.num_streams, "num_chunks": pacer.num_chunks}).decode(), flush=True)
    return 0


class _UntilEnd(asyncio.Protocol):
    def __init__(self, over: asyncio.Event) -> None:
        self._over = over

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._over.set()


def _whole(num_tokens: int, num_prompt_tokens: int, is_chat: bool) -> dict[str, Any]:
    text = "word " * num_tokens
    choice = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_tokens}
    return {
        "id": "null",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": 1_700_000_000,
        "model": MODEL,
        "choices": [{"index": 0, **choice, "finish_reason": "length"}],
        "usage": usage | {"total_tokens": num_prompt_tokens + num_tokens},
    }


def _http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def main() -> int:
    parser = argparse.ArgumentParser(description="A service that answers at once, at a fixed pace.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--pace-ms", type=float, default=10.0)
    arguments = parser.parse_args()
    return uvloop.run(serve(arguments.port, arguments.pace_ms))


if __name__ == "__main__":
    sys.exit(main())
