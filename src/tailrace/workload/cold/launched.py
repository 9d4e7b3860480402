"""A command run as a process group of its own, whose last output is kept and which leaves nothing behind.

In: a command line. Out: whether it ended, how, and what it said last. A process that leaves its group (`setsid`) is
out of reach; servers do not.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence

from tailrace.errors import StartFailed

LOG_BYTES_MAX = 64 * 1024
"""The end of the output is what says why a server did not start."""


class Launched:
    """Use as an asynchronous context: the group is ended on the way out, whatever the reason."""

    def __init__(self, command: Sequence[str], *, grace_s: float) -> None:
        self._command = list(command)
        self._grace_s = grace_s
        self._log = bytearray()
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd: int | None = None
        self._reader: asyncio.Task[None] | None = None
        self.ended = asyncio.Event()
        """Set when the process itself has ended; others of its group may go on."""

    async def __aenter__(self) -> "Launched":
        """Raises StartFailed when the command cannot be run."""
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise StartFailed(f"{self._command[0]!r} cannot be run: {reason}; is it installed and on PATH?") from error
        # A pidfd tells of the end without reaping: until `wait` the process's id, and its group's, is no one else's.
        self._pidfd = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_end)
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), self._grace_s)
        finally:
            self._end_now()

    @property
    def exit_text(self) -> str:
        """How it ended, for a message. Only after `ended`."""
        assert self._process is not None
        info = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        if info is None or info.si_code == os.CLD_EXITED:
            return f"exit code {info.si_status if info else 0}"
        return f"signal {signal.Signals(info.si_status).name}"

    async def output(self) -> str:
        """What was written so far, the end of it; all of it once the process has ended and nobody holds its pipe."""
        if self.ended.is_set() and self._reader is not None:
            await asyncio.wait([self._reader], timeout=0.5)
        return self._log.decode("utf-8", "replace").strip()

    def _on_end(self) -> None:
        assert self._pidfd is not None
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self.ended.set()

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._process.stdout)
        try:
            while data := await reader.read(65_536):
                self._log += data
                del self._log[:-LOG_BYTES_MAX]
        finally:
            transport.close()

    def _signal(self, number: signal.Signals) -> None:
        """To the whole group, which exists while its leader is not reaped."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _end_now(self) -> None:
        """Never waits for anything but the kernel, so that a second Ctrl-C does not find it half done."""
        assert self._process is not None
        self._signal(signal.SIGKILL)
        self._process.wait()
        if self._reader is not None:
            self._reader.cancel()
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
