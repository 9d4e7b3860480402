"""Hop 8, engine side: the reader thread and the queue between it and the main thread.

The reader blocks on the socket, decodes and queues; the main thread takes everything at once between two steps, or
sleeps until something comes. The reader also does the one thing that cannot wait for the end of a step: it tells the
cutter of a cancel. It decides nothing and touches no scheduler.
"""

import os
import socket
import threading
from collections import deque
from collections.abc import Callable

from tailrace.request import RequestId
from tailrace.worker.channel import Cancel, FrameParser, Stop, ToEngine, to_engine_decoder

COMMANDS_MAX = 65_536
"""Above it the reader stops reading, and the app's own bound on unsent bytes takes over."""
_RECEIVE_BYTES = 256 * 1024
_LEAVE_S = 1.0
"""The app waits two seconds at close; a main thread stuck in a kernel longer than this is left behind."""


class Inbox:
    """Commands in the order they came. Closed once, for good: by `Stop`, by the app's end, by a malformed frame."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._commands: deque[ToEngine] = deque()
        self._closed = False
        self.fault: str | None = None
        """What the app sent wrongly; None when it left in good order."""

    @property
    def closed(self) -> bool:
        return self._closed

    def put(self, command: ToEngine) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._commands) < COMMANDS_MAX or self._closed)
            self._commands.append(command)
            self._changed.notify_all()

    def close(self, fault: str | None = None) -> None:
        with self._changed:
            self._closed = True
            self.fault = self.fault or fault
            self._changed.notify_all()

    def take(self, timeout_s: float | None) -> list[ToEngine]:
        """All that waits; sleeps for the first one up to `timeout_s` (0: not at all, None: for ever) or the close."""
        if timeout_s == 0 and not self._commands:
            return []
        with self._changed:
            self._changed.wait_for(lambda: self._commands or self._closed, timeout_s)
            commands = list(self._commands)
            self._commands.clear()
            self._changed.notify_all()
        return commands


def read_commands(
    connection: socket.socket, inbox: Inbox, on_cancel: Callable[[RequestId], None], on_close: Callable[[], None]
) -> None:
    """The reader thread. Never returns: it ends the process when the app is gone and the main thread does not leave."""
    parser = FrameParser()
    fault = None
    try:
        while not inbox.closed and (data := connection.recv(_RECEIVE_BYTES)):
            for body in parser.feed(data):
                command = to_engine_decoder.decode(body)
                if isinstance(command, Stop):
                    inbox.close()
                    break
                inbox.put(command)
                if isinstance(command, Cancel):
                    on_cancel(command.request_id)
    except ValueError as error:
        fault = f"the app sent a malformed frame: {error}"
    except ConnectionError:
        pass  # the app is gone and left messages of ours unread: an end like any other
    except OSError as error:
        fault = f"the app's socket failed: {error}"
    inbox.close(fault)
    on_close()
    threading.Event().wait(_LEAVE_S)
    os._exit(1)
