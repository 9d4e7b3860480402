"""The rows of several senders as one sequence, in the order in which requests were scheduled."""

import mmap
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import msgspec
import numpy as np

from tailrace.errors import ConfigError
from tailrace.measure.record import Outcome
from tailrace.measure.table import Ints


class _Scheduled(msgspec.Struct):
    scheduled_ns: int


class _Ended(msgspec.Struct):
    scheduled_ns: int
    outcome: Outcome
    will_cancel: bool = False


def merged_lines(rows_paths: Sequence[str]) -> Iterator[bytes]:
    """Lines without their ends. Only places are kept in memory, whatever the rows hold. Raises ConfigError."""
    try:
        with ExitStack() as stack:
            maps = [_mapped(stack, path) for path in rows_paths]
            scheduled, files, starts, ends = _index(maps)
            for row in np.argsort(scheduled, kind="stable"):
                yield maps[files[row]][starts[row] : ends[row]]
    except OSError as error:
        raise ConfigError(f"the rows of a sender cannot be read: {error.strerror or error}") from error


def first_unfinished_ns(rows_paths: Sequence[str]) -> int | None:
    """Scheduled instant of the first request that was cancelled against the workload's plan: by a stop of the run."""
    decode = msgspec.json.Decoder(_Ended).decode
    ended = (decode(line) for line in merged_lines(rows_paths))
    return next((e.scheduled_ns for e in ended if e.outcome is Outcome.CANCELLED and not e.will_cancel), None)


def _mapped(stack: ExitStack, path: str) -> mmap.mmap | bytes:
    with open(path, "rb") as file:
        if not file.seek(0, 2):
            return b""  # nothing can be mapped of an empty file
        return stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _index(maps: Sequence[mmap.mmap | bytes]) -> tuple[Ints, Ints, Ints, Ints]:
    """Of each line: scheduled instant, file, start, end."""
    decode = msgspec.json.Decoder(_Scheduled).decode
    scheduled, files, starts, ends = [], [], [], []
    for number, content in enumerate(maps):
        start = 0
        while start < len(content):
            end = content.find(b"\n", start)
            if end < 0:
                break  # a line that was not finished: its sender was killed
            scheduled.append(decode(content[start:end]).scheduled_ns)
            files.append(number)
            starts.append(start)
            ends.append(end)
            start = end + 1
    return _ints(scheduled), _ints(files), _ints(starts), _ints(ends)


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)
