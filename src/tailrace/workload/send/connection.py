"""Hop 1 of a load generator: one HTTP/1.1 connection. A request's bytes go out; instants and body bytes come back.

The clock is read first thing when bytes arrive. No task, no stream object, no copy between the socket and the reader:
per streamed chunk this is one call of the loop, one of the parser and one of the exchange.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from tailrace.clock import monotonic_ns
from tailrace.wire.chunks import printable

QUIET_BYTES_MAX = 256 * 1024
"""Bytes in a row that are no body (headers, trailers, chunk extensions): beyond this it is not an answer."""


class Exchange(Protocol):
    """One request on the wire. Each call carries the instant on the monotonic clock; `ended` or `lost` comes last."""

    def sent(self, t_ns: int) -> None:
        """The last byte of the request is with the kernel."""

    def headers(self, t_ns: int, status: int, content_type: str) -> None: ...

    def body(self, t_ns: int, data: bytes) -> None: ...

    def ended(self, t_ns: int) -> None:
        """The answer is complete, and the connection free or closed."""

    def lost(self, t_ns: int, message: str, had_answer: bool) -> None:
        """The connection ended first; `had_answer`: after at least one byte of an answer."""


class Connection(asyncio.Protocol):
    """Made by `Pool`. Serves one exchange at a time; between them it is idle."""

    def __init__(self, on_idle: Callable[["Connection"], None], on_closed: Callable[["Connection"], None]) -> None:
        self._on_idle = on_idle
        self._on_closed = on_closed
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._answered: Exchange | None = None
        """Its answer is complete; it hears so when the bytes at hand are parsed."""
        self._now_ns = 0
        self._quiet_bytes = 0
        self._status = 0
        self._content_type = ""
        self._has_length = False
        self._has_answer = False
        self._is_in_body = False
        self._is_writing = False
        self._is_paused = False
        self.is_open = False
        self.is_broken = False
        """What came was not HTTP, or had no bound."""

    @property
    def is_idle(self) -> bool:
        return self.is_open and self._exchange is None and self._answered is None

    def send(self, request: bytes, exchange: Exchange) -> None:
        """Writes a whole request. The connection must be idle."""
        assert self.is_idle, "a connection serves one exchange at a time"
        assert self._transport is not None, "an open connection has its transport"
        self._exchange = exchange
        self._quiet_bytes = 0
        self._has_answer = False
        self._is_writing = True
        self._transport.write(request)
        # With a high-water mark of 0 the transport calls `pause_writing` at once for what the kernel did not take.
        if self._is_writing and not self._is_paused:
            self._all_sent()

    def close(self) -> None:
        """Closes at once; the exchange, if there is one, hears nothing more."""
        self._exchange = None
        self._drop()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._transport.set_write_buffer_limits(high=0)
        self.is_open = True

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        if self._is_writing:
            self._all_sent()

    def data_received(self, data: bytes) -> None:
        self._now_ns = monotonic_ns()
        self._has_answer = True
        self._quiet_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._break("the server changed to another protocol")
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(error, httptools.HttpParserCallbackError) and cause is not None:
                raise cause from None  # Ours, not the server's: never hidden in a record.
            self._break(f"not an HTTP answer: {error}")
        if self._quiet_bytes > QUIET_BYTES_MAX:
            self._break(f"more than {QUIET_BYTES_MAX} bytes of headers")
        if self._answered is not None:
            self._finish()

    def eof_received(self) -> None:
        """The transport closes itself: a client has nothing to say on a half-closed connection."""

    def connection_lost(self, exc: Exception | None) -> None:
        t_ns = monotonic_ns()
        self.is_open = False
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            if self._is_in_body and not self._has_length and exc is None:
                exchange.ended(t_ns)  # RFC 9112 6.3: without a length the end of the connection ends the body.
            else:
                exchange.lost(t_ns, printable(str(exc or "the server closed the connection")), self._has_answer)
        self._on_closed(self)

    # httptools

    def on_message_begin(self) -> None:
        self._content_type = ""
        self._has_length = False
        if self._exchange is None:
            self._drop()  # An answer to no question.

    def on_header(self, name: bytes, value: bytes) -> None:
        match name.lower():
            case b"content-type":
                self._content_type = value.decode("latin-1").partition(";")[0].strip().lower()
            case b"content-length" | b"transfer-encoding":
                self._has_length = True

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        if self._status >= 200 and self._exchange is not None:
            self._is_in_body = True
            self._exchange.headers(self._now_ns, self._status, self._content_type)

    def on_body(self, data: bytes) -> None:
        self._quiet_bytes = 0
        if self._exchange is not None:
            self._exchange.body(self._now_ns, data)

    def on_message_complete(self) -> None:
        if self._status < 200 or self._exchange is None:
            return  # RFC 9110 15.2: interim, the answer is still to come; or an answer to no question.
        self._is_in_body = False
        self._answered, self._exchange = self._exchange, None
        # An answer that came before the whole request was taken leaves the rest of it in the way of the next one.
        if self._is_writing or not self._parser.should_keep_alive():
            self._drop()

    def _finish(self) -> None:
        exchange, self._answered = self._answered, None
        if self.is_open:
            self._on_idle(self)
        if exchange is not None:
            exchange.ended(self._now_ns)

    def _all_sent(self) -> None:
        self._is_writing = False
        if self._exchange is not None:
            self._exchange.sent(monotonic_ns())

    def _break(self, message: str) -> None:
        exchange, self._exchange = self._exchange, None
        self.is_broken = True
        self._drop()
        if exchange is not None:
            exchange.lost(self._now_ns, printable(message), True)

    def _drop(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()
