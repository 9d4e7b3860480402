"""The worker as a server: binds, serves, drains on a signal. Prints nothing.

SIGTERM or SIGINT once: refuse new requests, finish what runs, return. Twice: return at once. The caller's event loop is
used; `uvloop` is the one to take (`asyncio.Runner(loop_factory=uvloop.new_event_loop)`).
"""

import asyncio
import contextlib
import enum
import errno
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tailrace.errors import Draining, StartFailed
from tailrace.worker.generate import ABORT_KEY
from tailrace.worker.service import Service
from tailrace.worker.settings import WorkerSettings

_BACKLOG = 1024
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
HEAD_BYTES_MAX = 65_536
"""Request line and headers, or trailers, beside the first read (256 KiB at most). The parser has no bound of its own,
and what it does with one long header grows with the square of its length."""
_GRACE_S = 2.0
"""After the drain: time for the last bytes to reach slow clients."""


class ServerEnd(enum.StrEnum):
    DRAINED = "drained"
    """Every request ended by itself."""
    DRAIN_TIMEOUT = "drain_timeout"
    """What still ran was ended with the label `draining`."""
    STOPPED = "stopped"
    """At once, by a second signal."""


class Phase(enum.StrEnum):
    LISTENING = "listening"
    DRAINING = "draining"
    STOPPING = "stopping"


OnPhase = Callable[[Phase, str], None]
"""Told of each phase, with the address."""


def bind(settings: WorkerSettings) -> socket.socket:
    """A listening socket, taken before the model is loaded. Raises StartFailed saying what to do."""
    host, port = settings.host, settings.port
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise StartFailed(f"cannot listen on {host!r}: {error.strerror}; choose an address with --host") from error
    except UnicodeError as error:
        raise StartFailed(f"{host!r} is no name of a host; choose an address with --host") from error
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise StartFailed(_bind_message(error, host, port)) from error
    return listener


def _bind_message(error: OSError, host: str, port: int) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {port} on {host} is in use; stop what listens there or choose another with --port"
        case errno.EACCES:
            return f"port {port} on {host} is not allowed for this user; choose one above 1023 with --port"
        case errno.EADDRNOTAVAIL:
            return f"{host} is no address of this machine; choose one with --host"
    return f"cannot listen on {host} port {port}: {error.strerror}"


def address_of(listener: socket.socket) -> str:
    """The URL that the listener answers at."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Protocol(HttpToolsProtocol):
    """Bounds the bytes and seconds of a head; lets the application cut a connection whose client takes nothing.

    One request at a time: behind one that runs, the next one's sender could leave without the first being told (the
    base class tells only the last), so a connection that sends it is cut. Clients of this interface do not.
    """

    _bytes_outside_body = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # The first byte, like those after it, takes this timer away again.
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._bytes_outside_body += len(data)
        super().data_received(data)
        is_idle = self.cycle is None or self.cycle.response_complete
        if self.transport.is_closing():
            return
        if self._bytes_outside_body > HEAD_BYTES_MAX:
            # In the middle of an answer there is no place for another one.
            self.send_400_response("The request's headers are too large.") if is_idle else self._cut()
        elif is_idle and self._head_timer is None:
            self._head_timer = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._bytes_outside_body = 0
        scope = cast("dict[str, Any]", self.scope)
        scope[ABORT_KEY] = self._cut

    def on_headers_complete(self) -> None:
        self._end_head()
        if self.cycle is not None and not self.cycle.response_complete:
            self._cut()
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._bytes_outside_body = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._bytes_outside_body = 0
        super().on_message_complete()

    def _cut(self) -> None:
        """At once. The transport tells of its end only later, and writing to it until then would raise."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.abort()

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _Server(uvicorn.Server):
    """Signals are handled here, not by uvicorn, which re-raises them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run_server(
    app: Starlette,
    service: Service,
    listener: socket.socket,
    *,
    on_phase: OnPhase | None = None,
    stop: "StopSignals | None" = None,
) -> ServerEnd:
    """Serves until told to stop. The listener is closed on return; the engine is the caller's to close."""
    stop = stop or StopSignals()
    say = on_phase or (lambda _phase, _address: None)
    address = address_of(listener)
    server = _Server(_config(app, service.settings))
    async with service.running():
        with stop.installed():
            task = asyncio.create_task(server.serve(sockets=[listener]), name="http-server")
            try:
                await _started(server, task)
                say(Phase.LISTENING, address)
                if await _first_done(task, stop.first):
                    raise StartFailed("the HTTP server ended by itself") from _exception(task)
                say(Phase.DRAINING, address)
                end = await _drain(service, stop)
                say(Phase.STOPPING, address)
                server.should_exit = True
                is_closed = end is not ServerEnd.STOPPED and await _first_done(task, stop.second)
                return end if is_closed else ServerEnd.STOPPED
            finally:
                await _end(server, task)
                listener.close()


class StopSignals:
    """`first` and `second` are set by signals, or by hand."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def press(self) -> None:
        """What one signal does."""
        (self.second if self.first.is_set() else self.first).set()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handles SIGTERM and SIGINT inside; does nothing outside the main thread."""
        loop = asyncio.get_running_loop()
        installed = []
        for number in _SIGNALS:
            with contextlib.suppress(ValueError, RuntimeError):
                loop.add_signal_handler(number, self.press)
                installed.append(number)
        try:
            yield
        finally:
            for number in installed:
                loop.remove_signal_handler(number)


def _config(app: Starlette, settings: WorkerSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=int(_GRACE_S),
    )


async def _started(server: uvicorn.Server, task: "asyncio.Task[None]") -> None:
    """uvicorn tells of its start by a flag alone."""
    while not server.started:
        if task.done():
            raise StartFailed("the HTTP server ended while it started") from _exception(task)
        await asyncio.sleep(0.005)


async def _drain(service: Service, stop: StopSignals) -> ServerEnd:
    service.begin_drain()
    drained = asyncio.create_task(service.drained())
    try:
        async with asyncio.timeout(service.settings.drain_timeout_s):
            is_drained = await _first_done(drained, stop.second)
            return ServerEnd.DRAINED if is_drained else ServerEnd.STOPPED
    except TimeoutError:
        service.abandon_all(
            Draining("this service is shutting down and the request did not end in time; send it again")
        )
        return ServerEnd.DRAIN_TIMEOUT
    finally:
        drained.cancel()


async def _first_done(task: "asyncio.Task[None]", event: asyncio.Event) -> bool:
    """Waits for either; True when the task is done."""
    waiter = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
    return task.done()


async def _end(server: uvicorn.Server, task: "asyncio.Task[None]") -> None:
    """Leaves no connection and no task behind, however it ends."""
    task.cancel()
    await asyncio.wait({task})
    for listening in server.servers if server.started else ():
        listening.close()
    for connection in list(server.server_state.connections):
        transport = getattr(connection, "transport", None)
        if transport is not None:
            transport.abort()
    # A request whose connection is gone ends by itself; cancelling it first would only make a traceback.
    requests = set(server.server_state.tasks)
    if requests:
        _, requests = await asyncio.wait(requests, timeout=_GRACE_S)
    for request in requests:
        request.cancel()


def _exception(task: "asyncio.Task[None]") -> BaseException | None:
    return None if task.cancelled() else task.exception()
