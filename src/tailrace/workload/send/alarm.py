"""Callbacks at absolute instants of the monotonic clock, to some tens of microseconds.

The event loop's own timers are whole milliseconds; that quantum would be the largest part of the send lag. One
timerfd of the kernel, armed for the earliest instant of a heap, is exact. Linux, as the package.
"""

import asyncio
import ctypes
import heapq
import os
import time
from collections.abc import Callable
from itertools import count

_CLOCK_MONOTONIC = 1
_NONBLOCK_CLOEXEC = 0o4000 | 0o2000000
_ABSOLUTE = 1
_NS_PER_S = 1_000_000_000
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Alarm:
    """A heap of (instant, callback). Callbacks of one instant run in the order in which they were set."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Raises OSError when the kernel grants no timer."""
        self._loop = loop
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()
        self._armed_ns: int | None = None
        self._spec = _TimerSpec()
        self._fd = _libc.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
        if self._fd < 0:
            error = ctypes.get_errno()
            raise OSError(error, f"timerfd_create: {os.strerror(error)}")
        loop.add_reader(self._fd, self._fire)

    def at(self, at_ns: int, callback: Callable[[], None]) -> None:
        """Once, at or after `at_ns`; an instant in the past means the next turn of the loop."""
        heapq.heappush(self._heap, (at_ns, next(self._order), callback))
        if self._armed_ns is None or at_ns < self._armed_ns:
            self._arm(at_ns)

    @property
    def next_ns(self) -> int | None:
        return self._heap[0][0] if self._heap else None

    def close(self) -> None:
        """Nothing that was set fires any more."""
        self._heap.clear()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _arm(self, at_ns: int) -> None:
        self._armed_ns = at_ns
        # Zero would disarm; an instant long past fires at once.
        self._spec.value.tv_sec, self._spec.value.tv_nsec = divmod(max(at_ns, 1), _NS_PER_S)
        _libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(self._spec), None)

    def _fire(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        self._armed_ns = None
        now_ns = time.monotonic_ns()
        # Set while these run and due already: next turn, so that input is read in between.
        while self._heap and self._heap[0][0] <= now_ns:
            heapq.heappop(self._heap)[2]()
        if self._heap and self._fd >= 0 and (self._armed_ns is None or self._heap[0][0] < self._armed_ns):
            self._arm(self._heap[0][0])
