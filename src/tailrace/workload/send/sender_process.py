"""One sender as a process: `python -m tailrace.workload.send.sender_process`, messages over stdin and stdout.

In: a SendJob, Start, WindowEnds, Stop. Out: Ready, Progress twice a second, WindowDone, Finished; or Broken. The end
of stdin means that the parent is gone: the run is stopped, the rows are kept, the process ends. SIGINT and SIGTERM do
the same.
"""

import asyncio
import os
import signal
import sys
import traceback
from typing import Any, cast

import msgspec
import uvloop

from tailrace.errors import TailraceError
from tailrace.workload.body import BodyWriter
from tailrace.workload.draw import draw_plan
from tailrace.workload.job import (
    Broken,
    ChildMessage,
    ParentMessage,
    Progress,
    Ready,
    SendJob,
    Start,
    WindowDone,
    WindowEnds,
)
from tailrace.workload.send.file_limit import raise_file_limit
from tailrace.workload.send.frames import FrameReader, encode_frame
from tailrace.workload.send.sender import Sender

PROGRESS_S = 0.5
_UNREAD_BYTES_MAX = 1024 * 1024
"""A parent that does not read gets no progress; the run does not wait for it."""


class _Parent:
    """The two pipes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.WriteTransport) -> None:
        self.reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls) -> "_Parent":
        loop = asyncio.get_running_loop()
        # Whatever prints, prints to stderr: stdout carries messages only.
        out_fd = os.dup(1)
        os.dup2(2, 1)
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(0), "rb"))
        writer, _ = await loop.connect_write_pipe(asyncio.Protocol, os.fdopen(out_fd, "wb"))
        return cls(reader, writer)

    def tell(self, message: ChildMessage) -> None:
        if not self._writer.is_closing():
            self._writer.write(encode_frame(message))

    def tell_if_read(self, message: Progress) -> None:
        if self._writer.get_write_buffer_size() < _UNREAD_BYTES_MAX:
            self.tell(message)

    async def flush(self) -> None:
        """What is written has left this process, or nobody reads any more."""
        for _ in range(2_000):  # Ten seconds, for a parent that lives and does not read.
            if self._writer.get_write_buffer_size() == 0 or self._writer.is_closing():
                break
            await asyncio.sleep(0.005)
        self._writer.close()


async def main() -> int:
    raise_file_limit()
    parent = await _Parent.connect()
    try:
        return await _serve(parent)
    except TailraceError as error:
        parent.tell(Broken(message=error.message))
    except OSError as error:
        parent.tell(Broken(message=f"the sender cannot go on: {error}"))
    except Exception as error:
        traceback.print_exc()
        parent.tell(Broken(message=f"the sender failed, a fault of tailrace: {type(error).__name__}: {error}"))
    finally:
        await parent.flush()
    return 1


async def _serve(parent: _Parent) -> int:
    job = await FrameReader(parent.reader, SendJob).read()
    if job is None:
        return 1
    plan = draw_plan(job.source)
    bodies = BodyWriter(job.endpoint, job.realisation, job.options)
    sender = Sender(job, plan, bodies, lambda end_ns: parent.tell(WindowDone(end_ns=end_ns)))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, sender.stop)
    loop.set_exception_handler(lambda _, context: _fail(sender, context))
    await sender.prepare()
    parent.tell(Ready())
    # A union is a type to msgspec, if not to the type checker.
    messages: FrameReader[ParentMessage] = FrameReader(parent.reader, cast(Any, ParentMessage))
    start = await messages.read()
    if not isinstance(start, Start):
        return 1
    listening = asyncio.create_task(_listen(messages, sender))
    reporting = asyncio.create_task(_report(parent, sender))
    try:
        finished = await sender.run(start.origin_ns)
    finally:
        for task in (listening, reporting):
            task.cancel()
    parent.tell_if_read(sender.progress())
    parent.tell(finished)
    return 0


async def _listen(messages: FrameReader[ParentMessage], sender: Sender) -> None:
    """Until Stop, the end of the pipe or nonsense: each ends the run."""
    try:
        while isinstance(message := await messages.read(), WindowEnds):
            sender.extend_window(message.end_ns)
    except msgspec.DecodeError as error:
        print(f"a message that is none: {error}", file=sys.stderr)
    sender.stop()


async def _report(parent: _Parent, sender: Sender) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        parent.tell_if_read(sender.progress())


def _fail(sender: Sender, context: dict[str, Any]) -> None:
    """A callback raised: a fault of ours, and a run whose records cannot be trusted."""
    error = context.get("exception")
    if error is not None:
        traceback.print_exception(error)
    sender.fail(error or RuntimeError(str(context.get("message"))))


if __name__ == "__main__":
    sys.exit(uvloop.run(main()))
