"""Connections of one sender to one endpoint: kept alive, used again newest first, opened when none is idle.

Nothing waits here and nothing is capped: how many requests are in flight is the sender's decision, made before.
"""

import asyncio
import errno
import socket
import ssl
from importlib.metadata import version
from typing import Any, Protocol
from urllib.parse import urlsplit

from tailrace.clock import monotonic_ns
from tailrace.errors import ClientFailed
from tailrace.wire.chunks import printable
from tailrace.workload.job import Endpoint
from tailrace.workload.send.connection import Connection, Exchange

_OWN_HEADERS = frozenset({"host", "content-length", "content-type", "transfer-encoding", "connection", "expect"})
CONNECT_S = 10.0
_OWN_LIMITS = {
    errno.EMFILE: "raise `ulimit -n`",
    errno.ENFILE: "the whole machine has too many files open",
    errno.EADDRNOTAVAIL: "no port is free, or this host cannot reach such an address",
}


class Target:
    """Where an endpoint is, and the unchanging part of its requests."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Raises ClientFailed for headers that would break a request."""
        parts = urlsplit(endpoint.base_url)
        assert parts.hostname is not None, "Endpoint.base_url was checked by `endpoint.base_url`"
        self.base_url = endpoint.base_url
        self.host = parts.hostname
        self.is_tls = parts.scheme == "https"
        self.port = parts.port or (443 if self.is_tls else 80)
        self._path = parts.path
        self._common = "".join(f"{k}: {v}\r\n" for k, v in self._headers(endpoint, parts.netloc).items())

    def request(self, method: str, path: str, body: bytes = b"", request_id: str = "") -> bytes:
        """All bytes of a request; `path` comes after the endpoint's own."""
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._common}"
        if body or method == "POST":
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        if request_id:
            head += f"X-Request-Id: {request_id}\r\n"
        return head.encode("latin-1", "replace") + b"\r\n" + body

    @staticmethod
    def _headers(endpoint: Endpoint, netloc: str) -> dict[str, str]:
        headers = {
            "Host": netloc.rpartition("@")[2],
            "User-Agent": f"tailrace/{version('tailrace')}",
            "Accept": "text/event-stream, application/json",
        }
        if endpoint.api_key:
            headers["Authorization"] = f"Bearer {endpoint.api_key}"
        headers |= endpoint.headers
        for name in endpoint.headers:
            if name.lower() in _OWN_HEADERS:
                raise ClientFailed(f"the header {name} is set by the client; leave it out")
        for name, value in headers.items():
            if not (name + value).isprintable() or not (name + value).isascii() or " " in name or ":" in name:
                raise ClientFailed(f"the header {printable(name)} has a character that a header cannot carry")
        return headers


class Pool:
    def __init__(self, target: Target) -> None:
        self._target = target
        self._ssl = ssl.create_default_context() if target.is_tls else None
        self._addresses: list[str] = []
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self.num_opened = 0
        self.num_reused = 0
        self.num_stale = 0
        """Kept connections that the server closed as a request was being sent on them."""
        self.num_own_limit = 0
        """Requests without a connection because this host allows no more."""

    async def resolve(self) -> None:
        """Looks the host's name up, once: a look-up within the run would be counted as latency. Raises ClientFailed."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._target.host, self._target.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise ClientFailed(
                f"{self._target.base_url}: the name {self._target.host} is not known: {error}"
            ) from error
        self._addresses = list(dict.fromkeys(str(each[4][0]) for each in found))

    def send(self, request: bytes, exchange: "PooledExchange", *, fresh: bool = False) -> None:
        """On an idle connection at once, otherwise on a new one when it stands."""
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.is_idle:
                self.num_reused += 1
                exchange.connected(monotonic_ns(), connection, True)
                connection.send(request, exchange)
                return
        task = asyncio.get_running_loop().create_task(self._send_on_new(request, exchange))
        self._opening.add(task)
        task.add_done_callback(self._opened)

    async def close(self) -> None:
        """Closes everything; no exchange hears of it."""
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        for connection in list(self._open):
            connection.close()
        self._idle.clear()

    async def _send_on_new(self, request: bytes, exchange: "PooledExchange") -> None:
        try:
            connection = await asyncio.wait_for(self._connect(), CONNECT_S)
        except TimeoutError:
            exchange.lost(monotonic_ns(), f"no connection within {CONNECT_S:g} s", False)
            return
        except (OSError, ClientFailed) as error:
            self.num_own_limit += _own_limit(error) is not None
            exchange.lost(monotonic_ns(), _why(error), False)
            return
        if exchange.is_over:  # It timed out, or its caller left, meanwhile.
            self._idle.append(connection)
            return
        exchange.connected(monotonic_ns(), connection, False)
        if connection.is_idle:
            connection.send(request, exchange)
        else:
            exchange.lost(monotonic_ns(), "the server closed the connection at once", False)

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        if not self._addresses:
            await self.resolve()
        first_error: OSError | None = None
        for address in list(self._addresses):
            options: dict[str, Any] = {"ssl": self._ssl, "server_hostname": self._target.host} if self._ssl else {}
            try:
                _, connection = await loop.create_connection(self._make, address, self._target.port, **options)
            except OSError as error:
                first_error = first_error or error
                continue
            if address != self._addresses[0]:  # The next ones begin with what works.
                self._addresses.remove(address)
                self._addresses.insert(0, address)
            self.num_opened += 1
            if connection.is_open:
                self._open.add(connection)  # Not before: one that never stands is never said to be closed.
            return connection
        raise first_error or OSError("the name has no address")

    def _make(self) -> Connection:
        return Connection(self._idle.append, self._closed)

    def _closed(self, connection: Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        if not task.cancelled():
            task.result()  # A fault of ours is not swallowed: the loop's handler hears of it.


def _why(error: Exception) -> str:
    """Where the client's own machine is at its limit, that is said: the service is not to blame."""
    text = printable(str(error) or type(error).__name__)
    hint = _own_limit(error)
    return text if hint is None else f"this client is at a limit of its own machine: {text}; {hint}"


def _own_limit(error: Exception) -> str | None:
    return _OWN_LIMITS.get(error.errno or 0) if isinstance(error, OSError) else None


class PooledExchange(Exchange, Protocol):
    """What a pool needs to know of an exchange besides what its connection tells it."""

    is_over: bool

    def connected(self, t_ns: int, connection: Connection, is_reused: bool) -> None: ...
