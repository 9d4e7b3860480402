"""One life of the engine process, seen from the app: spawn, frames, what it said on stderr, kill, reap.

The child is a fresh interpreter (`python -m`, no fork of a threaded app) in a session of its own, so a Ctrl-C in the
terminal reaches the app alone, which may drain first. It holds one end of a socket pair; when the other end closes it
leaves by itself. Whatever ends the child closes its socket, so `lost` is the one event that means "gone".

The process is a plain `Popen`, not the event loop's: their watchers (threads, SIGCHLD) differ by loop and race with a
kill for the exit status, and after `lost` there is nothing left to watch for.
"""

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import cast

from tailrace.clock import monotonic_ns
from tailrace.worker.channel import FrameParser, FromEngine, ToEngine, encode_frame, from_engine_decoder

STDERR_TAIL_BYTES = 4_096
_REAP_S = 3.0
"""A child whose socket is closed has this long to end; then it is killed."""
_POLL_S = 0.01


class EngineChild(asyncio.Protocol):
    """Frames in order both ways; `on_message` is called in the event loop. Use `spawn`."""

    def __init__(self, on_message: Callable[[FromEngine], None]) -> None:
        self._on_message = on_message
        self._parser = FrameParser()
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr_task: asyncio.Task[None] | None = None
        self._stderr_tail = b""
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.last_message_ns = monotonic_ns()
        self.fault: str | None = None
        """Why the app itself ended this child."""

    @classmethod
    async def spawn(
        cls, on_message: Callable[[FromEngine], None], argv: tuple[str, ...] | None = None
    ) -> "EngineChild":
        """Starts the process (some milliseconds) and connects. `argv` replaces the command; it gets `--fd N` too.

        Raises OSError when the machine has no process or descriptor left.
        """
        ours, theirs = socket.socketpair()
        child = cls(on_message)
        try:
            ours.setblocking(False)
            command = argv or (sys.executable, "-P", "-m", "tailrace.worker.engine_process")
            child._process = subprocess.Popen(
                [*command, "--fd", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        child._stderr_task = asyncio.create_task(child._read_stderr(), name="engine-stderr")
        await asyncio.get_running_loop().create_unix_connection(lambda: child, sock=ours)
        return child

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Negative: the signal that ended it. None while it runs."""
        return None if self._process is None else self._process.poll()

    @property
    def stderr_tail(self) -> str:
        return self._stderr_tail.decode(errors="replace").strip()

    @property
    def unsent_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def send(self, message: ToEngine) -> None:
        """Queues a frame behind those before it; dropped when the child is gone. Never blocks."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(message))

    def kill(self, fault: str | None = None) -> None:
        """SIGKILL, which also ends a stopped process. The first `fault` given is kept as the cause."""
        self.fault = self.fault or fault
        if self._process is not None:
            self._process.kill()

    async def reap(self) -> None:
        """Waits for the end of a child whose socket is closed; kills it when that takes too long."""
        assert self._process is not None
        assert self._stderr_task is not None
        if self._transport is not None:
            self._transport.abort()
        try:
            await asyncio.wait_for(self._ended(), _REAP_S)
        except TimeoutError:
            self.kill()
            await self._ended()
        await asyncio.wait([self._stderr_task], timeout=_REAP_S)
        self._stderr_task.cancel()

    async def _ended(self) -> None:
        while self.exit_code is None:
            await asyncio.sleep(_POLL_S)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface but not the base class.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.last_message_ns = monotonic_ns()
        try:
            for body in self._parser.feed(data):
                self._on_message(from_engine_decoder.decode(body))
        except ValueError as error:
            self.kill(f"the engine sent a malformed frame: {error}")
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if not self.lost.done():
            self.lost.set_result(None)

    async def _read_stderr(self) -> None:
        """Passes it on and keeps the tail."""
        assert self._process is not None
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._process.stderr
        )
        with contextlib.closing(transport):
            while chunk := await reader.read(STDERR_TAIL_BYTES):
                self._stderr_tail = (self._stderr_tail + chunk)[-STDERR_TAIL_BYTES:]
                sys.stderr.write(chunk.decode(errors="replace"))
