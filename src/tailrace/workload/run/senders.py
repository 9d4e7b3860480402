"""All sender processes of one run, from their parent's side: started together, stopped together, none left over.

Load is kept up by every sender until the windows of all of them have ended. A sender that dies or breaks ends the
run for the others: what is missing would be missing from the load, too.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import IO, Any, cast

import msgspec

from tailrace.clock import NS_PER_MS, monotonic_ns
from tailrace.errors import SenderFailed
from tailrace.wire.chunks import printable
from tailrace.workload.job import (
    Broken,
    ChildMessage,
    Finished,
    Progress,
    Ready,
    SendJob,
    Start,
    Stop,
    WindowDone,
    WindowEnds,
)
from tailrace.workload.send.frames import FrameReader, encode_frame

START_AHEAD_NS = 200 * NS_PER_MS
"""The origin lies so far ahead: every sender has heard of it by then."""
_READY_S = 120.0
"""Drawing a long plan and making long prompts takes seconds, not minutes."""
_STOP_S = 30.0
_PIPE_BYTES = 1024 * 1024

OnProgress = Callable[[int, Progress], None]


class SendResult(msgspec.Struct, frozen=True, kw_only=True):
    origin_ns: int
    finished: list[Finished]
    """One a job, in their order."""
    rows_paths: list[str]
    was_stopped: bool
    """Before every request of the window had ended: the rows are no whole run."""

    @property
    def window_end_ns(self) -> int:
        """From the origin: of the sender that saw it last."""
        return max(each.window_end_ns for each in self.finished)


async def run_senders(
    jobs: Sequence[SendJob],
    on_progress: OnProgress = lambda _shard, _progress: None,
    stop: asyncio.Event | None = None,
) -> SendResult:
    """Runs all jobs to their end, each in a process of its own.

    `on_progress` hears of each shard about twice a second: running totals, and samples since the last time. `stop`,
    once set, ends the run early; rows are kept. Raises SenderFailed when a process could not be started, broke or
    died; no process is left in any case.
    """
    assert jobs, "a run has at least one sender"
    senders: list[_Sender] = []
    try:
        for job in jobs:
            senders.append(await _Sender.start(job))
        run = _Run(senders, on_progress)
        return await run.to_end(stop or asyncio.Event())
    finally:
        await asyncio.gather(*(sender.end() for sender in senders))


class _Run:
    def __init__(self, senders: "list[_Sender]", on_progress: OnProgress) -> None:
        self._senders = senders
        self._on_progress = on_progress
        self._ends_ns: list[int] = []
        """Of the windows that are done."""
        self._is_window_over = False
        self._was_stopped = False

    async def to_end(self, stop: asyncio.Event) -> SendResult:
        try:
            async with asyncio.timeout(_READY_S):
                await asyncio.gather(*(sender.ready() for sender in self._senders))
        except TimeoutError as error:
            raise SenderFailed(f"a sender was not ready within {_READY_S:g} s; is the machine overloaded?") from error
        origin_ns = monotonic_ns() + START_AHEAD_NS
        for sender in self._senders:
            sender.tell(Start(origin_ns=origin_ns))
        stopping = asyncio.create_task(self._stop_when(stop))
        hearing = [asyncio.create_task(self._hear(number)) for number in range(len(self._senders))]
        try:
            finished = await asyncio.gather(*hearing)
        finally:
            for task in (stopping, *hearing):
                task.cancel()
        return SendResult(
            origin_ns=origin_ns,
            finished=finished,
            rows_paths=[sender.job.rows_path for sender in self._senders],
            was_stopped=self._was_stopped or any(each.was_stopped for each in finished),
        )

    async def _hear(self, number: int) -> Finished:
        sender = self._senders[number]
        while True:
            match await sender.read():
                case Progress() as progress:
                    self._on_progress(number, progress)
                case WindowDone() as done:
                    self._window_done(done.end_ns)
                case Finished() as finished:
                    if finished.was_stopped:
                        self._was_stopped = True
                        self._stop()  # One that was stopped by a signal ends the others: their load is not the plan's.
                    return finished
                case _:
                    raise SenderFailed("a sender spoke out of turn, a fault of tailrace")

    def _window_done(self, end_ns: int) -> None:
        """Senders of a closed loop by number end theirs apart. What one sent before the last of these ends belongs to
        the run's window, so that it must not be cut off: all are told of it, and say once more when it is done."""
        self._ends_ns.append(end_ns)
        if len(self._ends_ns) < len(self._senders):
            return
        ends_ns, self._ends_ns = self._ends_ns, []
        if min(ends_ns) == max(ends_ns):
            self._is_window_over = True
            self._stop()
            return
        for sender in self._senders:
            sender.tell(WindowEnds(end_ns=max(ends_ns)))

    async def _stop_when(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._was_stopped = not self._is_window_over
        self._stop()
        await asyncio.sleep(_STOP_S)
        for sender in self._senders:
            sender.kill()  # `_hear` then says that it died.

    def _stop(self) -> None:
        for sender in self._senders:
            sender.tell(Stop())


class _Sender:
    """One process."""

    def __init__(self, job: SendJob, process: "subprocess.Popen[bytes]", errors: IO[bytes]) -> None:
        self.job = job
        self._process = process
        self._errors = errors
        self._messages: FrameReader[ChildMessage] | None = None
        self._transport: asyncio.ReadTransport | None = None

    @classmethod
    async def start(cls, job: SendJob) -> "_Sender":
        """Raises SenderFailed."""
        errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `end`)
        command = [sys.executable, "-m", "tailrace.workload.send.sender_process"]
        try:
            # In a group of its own: Ctrl-C is for the parent, which tells every sender when to end.
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, process_group=0
            )
        except OSError as error:
            errors.close()
            raise SenderFailed(f"a sender process cannot be started: {error}") from error
        sender = cls(job, process, errors)
        loop = asyncio.get_running_loop()
        stream = asyncio.StreamReader(limit=_PIPE_BYTES)
        sender._transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), process.stdout
        )
        sender._messages = FrameReader(stream, cast(Any, ChildMessage))
        # A job may be larger than the pipe takes before the child reads.
        await asyncio.to_thread(sender.tell, job)
        return sender

    async def ready(self) -> None:
        message = await self.read()
        if not isinstance(message, Ready):
            raise SenderFailed("a sender spoke out of turn, a fault of tailrace")

    async def read(self) -> ChildMessage:
        """The next message that is none of failure. Raises SenderFailed."""
        assert self._messages is not None, "started"
        try:
            message = await self._messages.read()
        except msgspec.DecodeError as error:
            raise SenderFailed(f"a sender sent a message that is none: {error}") from error
        if isinstance(message, Broken):
            raise SenderFailed(message.message)
        if message is None:
            raise SenderFailed(await self._death())
        return message

    def tell(self, message: object) -> None:
        """A process that is gone hears nothing; its end is seen where its messages are read."""
        assert self._process.stdin is not None, "a pipe was asked for"
        try:
            self._process.stdin.write(encode_frame(message))
            self._process.stdin.flush()
        except (OSError, ValueError):
            return

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()

    async def end(self) -> None:
        """Closes its stdin, which it takes as the end; killed when that does not help."""
        assert self._process.stdin is not None, "a pipe was asked for"
        with contextlib.suppress(OSError):  # It is gone already.
            self._process.stdin.close()
        try:
            await asyncio.to_thread(self._process.wait, 5.0)
        except subprocess.TimeoutExpired:
            self.kill()
            await asyncio.to_thread(self._process.wait)
        if self._transport is not None:
            self._transport.close()
        self._errors.close()

    async def _death(self) -> str:
        try:
            code = await asyncio.to_thread(self._process.wait, 5.0)
        except subprocess.TimeoutExpired:
            return "a sender process closed its pipe and did not end"
        cause = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(size - 2_000, 0))
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return f"a sender process ended {cause} before its run did" + (f": {printable(lines[-1])}" if lines else "")
