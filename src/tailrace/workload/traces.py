"""Reads recorded arrivals: Mooncake JSONL, BurstGPT CSV, Azure CSV and our own JSONL, told apart by their content.

In: a path. Out: sessions in order of arrival, times from the first one. A file is hostile until parsed: one line names
what is wrong and where; rows, bytes and lengths are bounded.
"""

import csv
import functools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TextIO

import msgspec

from tailrace.clock import NS_PER_S
from tailrace.errors import ConfigError
from tailrace.workload.trace_rows import (
    AZURE_COLUMNS,
    BURSTGPT_COLUMNS,
    MOONCAKE_FIELDS,
    TIME_S_MAX,
    BadRow,
    TraceRow,
    azure_row,
    burstgpt_row,
    csv_parser,
    mooncake_row,
    own_parser,
    with_shares,
)

ROWS_MAX = 1_000_000
"""Read from one file; what comes after is left out, and a note says so."""
BLOCKS_MAX = 10_000_000
LINE_CHARS_MAX = 1_000_000


class TraceFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file as read: sessions by their first row's time, each with its rows as turns."""

    layout: str
    """`mooncake`, `burstgpt`, `azure` or `tailrace`."""
    sessions: tuple[tuple[TraceRow, ...], ...]
    notes: tuple[str, ...]

    @property
    def declares_sharing(self) -> bool:
        return any(len(rows) > 1 or row.shared_tokens > 0 for rows in self.sessions for row in rows)


def read_trace(path: str) -> TraceFile:
    """Raises ConfigError (one line, with the line's number) when the file cannot be read or a row is wrong.

    The last file is kept while it does not change: one command draws its plan several times."""
    try:
        if not Path(path).is_file():
            raise ConfigError(f"there is no trace file {path!r}", param="arrivals")
        state = Path(path).stat()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the trace {path!r}: {error}", param="arrivals") from error
    return _read_once(path, state.st_mtime_ns, state.st_size, state.st_ino)


@functools.lru_cache(maxsize=1)
def _read_once(path: str, mtime_ns: int, size: int, inode: int) -> TraceFile:  # noqa: ARG001
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            return _read(path, file)
    except (OSError, ValueError) as error:
        why = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", None)
        raise ConfigError(f"cannot read the trace {path!r}: {why or error}", param="arrivals") from error


def _read(path: str, file: TextIO) -> TraceFile:
    lines = _lines(path, file)
    first = next(lines, None)
    if first is None:
        raise ConfigError(f"the trace {path!r} has no rows", param="arrivals")
    layout, rows = _rows(path, first, lines)
    kept: list[TraceRow] = []
    num_empty = num_blocks = 0
    notes = []
    for row in rows:
        if len(kept) >= ROWS_MAX:
            notes.append(f"trace: only the first {ROWS_MAX:,} rows are replayed")
            break
        if row.prompt_tokens < 1 or row.output_tokens < 1:
            num_empty += 1
        else:
            kept.append(row)
            num_blocks += len(row.blocks)
            if num_blocks > BLOCKS_MAX:
                raise ConfigError(f"the trace {path!r} has more than {BLOCKS_MAX:,} hash_ids", param="arrivals")
    if num_empty:
        notes.append(f"trace: {num_empty:,} rows without prompt or output (failed requests) are left out")
    if not kept:
        raise ConfigError(f"the trace {path!r} has no row with a prompt and an output", param="arrivals")
    sessions = _sessions(with_shares(kept) if layout == "mooncake" else kept)
    if sessions[-1][0].at_ns > TIME_S_MAX * NS_PER_S:
        raise ConfigError(f"the trace {path!r} spans more than {TIME_S_MAX:g} s", param="arrivals")
    return TraceFile(layout=layout, sessions=sessions, notes=tuple(notes))


def _lines(path: str, file: TextIO) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers from 1."""
    for number in range(1, 20 * ROWS_MAX):
        line = file.readline(LINE_CHARS_MAX + 1)
        if not line:
            return
        if len(line) > LINE_CHARS_MAX:
            raise _at(path, number, f"the line is longer than {LINE_CHARS_MAX:,} characters")
        if line.strip():
            yield number, line


def _rows(path: str, first: tuple[int, str], rest: Iterator[tuple[int, str]]) -> tuple[str, Iterator[TraceRow]]:
    """Name of the layout, and its rows. The first line tells."""
    number, line = first
    if line.lstrip().startswith("{"):
        keys = _json_keys(path, number, line)
        if "timestamp" in keys and "input_length" in keys:
            return "mooncake", _parsed(path, _chain(first, rest), mooncake_row)
        if "at_s" in keys or "prompt_tokens" in keys:
            return "tailrace", _parsed(path, _chain(first, rest), own_parser())
        raise _at(path, number, f"its keys ({', '.join(sorted(keys)[:8])}) are of no layout known here: {_LAYOUTS}")
    try:
        header = next(csv.reader([line]))
    except csv.Error as error:
        raise _at(path, number, str(error)) from error
    columns = {name.strip(): position for position, name in enumerate(header)}
    for layout, wanted, parse in (("azure", AZURE_COLUMNS, azure_row), ("burstgpt", BURSTGPT_COLUMNS, burstgpt_row)):
        if all(name in columns for name in wanted):
            return layout, _parsed(path, rest, csv_parser([columns[name] for name in wanted], parse))
    raise _at(path, number, f"{line.strip()[:80]!r} begins no layout known here: {_LAYOUTS}")


_LAYOUTS = (
    f"JSON lines with {', '.join(MOONCAKE_FIELDS)} (Mooncake) or at_s, prompt_tokens, output_tokens (ours), or CSV "
    f"with {', '.join(BURSTGPT_COLUMNS)} (BurstGPT) or {', '.join(AZURE_COLUMNS)} (Azure)"
)


def _chain(first: tuple[int, str], rest: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield first
    yield from rest


def _parsed(path: str, lines: Iterable[tuple[int, str]], parse: Callable[[str], TraceRow]) -> Iterator[TraceRow]:
    for number, line in lines:
        try:
            yield parse(line)
        except (BadRow, msgspec.DecodeError, csv.Error, RecursionError) as error:
            raise _at(path, number, str(error)) from error


def _json_keys(path: str, number: int, line: str) -> set[str]:
    try:
        first = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _at(path, number, f"not JSON ({error})") from error
    return set(first)


def _sessions(rows: list[TraceRow]) -> tuple[tuple[TraceRow, ...], ...]:
    """Rows without a session stand alone. Sorted by arrival (public traces are not always), the first at zero."""
    by_name: dict[str, list[TraceRow]] = {}
    sessions: list[list[TraceRow]] = []
    for row in rows:
        turns = by_name.get(row.session) if row.session else None
        if turns is not None:
            turns.append(row)
            continue
        sessions.append([row])
        if row.session:
            by_name[row.session] = sessions[-1]
    sessions.sort(key=lambda turns: turns[0].at_ns)
    zero_ns = sessions[0][0].at_ns
    return tuple((msgspec.structs.replace(turns[0], at_ns=turns[0].at_ns - zero_ns), *turns[1:]) for turns in sessions)


def _at(path: str, number: int, why: str) -> ConfigError:
    one_line = " ".join(why.split())
    return ConfigError(f"the trace {path!r}, line {number}: {one_line[:400]}", param="arrivals")
