"""Reads recorded arrivals: Mooncake JSONL, BurstGPT CSV, Azure CSV and our own JSONL, told apart by their content.

In: a path. Out: sessions in order of arrival, times from the first one. A file is hostile until parsed: one line names
what is wrong and where; rows, bytes and lengths are bounded.
"""

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TextIO

import msgspec

from tailrace.clock import NS_PER_MS, NS_PER_S
from tailrace.config import nearest
from tailrace.errors import ConfigError

ROWS_MAX = 1_000_000
"""Read from one file; what comes after is left out, and a note says so."""
BLOCKS_MAX = 10_000_000
LINE_CHARS_MAX = 1_000_000
TOKENS_MAX = 10_000_000
TIME_S_MAX = 1e9
MOONCAKE_BLOCK_TOKENS = 512
"""One hash id stands for that many tokens (Mooncake, arXiv 2407.00079, section 4)."""

MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length")
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request of a trace."""

    at_ns: int
    prompt_tokens: int
    """All new tokens of the request, those of a shared start among them."""
    output_tokens: int
    blocks: tuple[tuple[int, int], ...] = ()
    """(hash id, tokens) from the prompt's start: equal ids are equal text."""
    group: str = ""
    shared_tokens: int = 0
    """Of the prompt's start: common to the group, or seen in blocks of earlier rows."""
    session: str = ""
    think_ns: int = 0
    cancel_after_tokens: int | None = None
    tenant: str = ""
    cohort: str = ""


class TraceFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file as read: sessions by their first row's time, each with its rows as turns."""

    layout: str
    """`mooncake`, `burstgpt`, `azure` or `tailrace`."""
    sessions: tuple[tuple[TraceRow, ...], ...]
    notes: tuple[str, ...]

    @property
    def declares_sharing(self) -> bool:
        return any(len(rows) > 1 or row.shared_tokens > 0 for rows in self.sessions for row in rows)


Name = Annotated[str, msgspec.Meta(max_length=128)]
HashId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class OwnRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of our own layout."""

    prompt_tokens: int
    output_tokens: int
    at_s: float | None = None
    """From any zero. Rows of one `session` but the first need none."""
    group: Name = ""
    shared_tokens: int = 0
    """The first so many of `prompt_tokens` are common to the rows of the `group`."""
    session: Name = ""
    """Rows of one session are the turns of a conversation, in the file's order."""
    think_s: float = 0.0
    """From the end of the turn before; of later turns."""
    cancel_after_tokens: int | None = None
    tenant: Name = ""
    cohort: Name = ""


class _MooncakeRow(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[HashId] = []


class _BadRow(Exception):
    """What is wrong with a row; the reader adds file and line."""


def read_trace(path: str) -> TraceFile:
    """Raises ConfigError (one line, with the line's number) when the file cannot be read or a row is wrong."""
    try:
        if not Path(path).is_file():
            raise ConfigError(f"there is no trace file {path!r}", param="arrivals")
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
    sessions = _sessions(kept)
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
            return "mooncake", _parsed(path, _chain(first, rest), _mooncake_parser())
        if "at_s" in keys or "prompt_tokens" in keys:
            return "tailrace", _parsed(path, _chain(first, rest), _own_parser())
        raise _at(path, number, f"its keys ({', '.join(sorted(keys)[:8])}) are of no layout known here: {_LAYOUTS}")
    try:
        header = next(csv.reader([line]))
    except csv.Error as error:
        raise _at(path, number, str(error)) from error
    columns = {name.strip(): position for position, name in enumerate(header)}
    for layout, wanted, parse in (("azure", AZURE_COLUMNS, _azure_row), ("burstgpt", BURSTGPT_COLUMNS, _burstgpt_row)):
        if all(name in columns for name in wanted):
            return layout, _parsed(path, rest, _csv_parser([columns[name] for name in wanted], parse))
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
        except (_BadRow, msgspec.DecodeError, csv.Error, RecursionError) as error:
            raise _at(path, number, str(error)) from error


def _json_keys(path: str, number: int, line: str) -> set[str]:
    try:
        first = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _at(path, number, f"not JSON ({error})") from error
    return set(first)


def _own_parser() -> Callable[[str], TraceRow]:
    """Knows which sessions have begun."""
    begun: set[str] = set()

    def parse(line: str) -> TraceRow:
        try:
            row = _OWN_DECODER.decode(line)
        except msgspec.ValidationError as error:
            raise _BadRow(_explain(str(error))) from error
        if row.at_s is None and row.session not in begun:
            raise _BadRow("at_s is missing: only later turns of a session go without")
        if row.session in begun and row.shared_tokens:
            raise _BadRow("shared_tokens of a later turn: its history is shared as it is")
        if row.session:
            begun.add(row.session)
        return _own_row(row)

    return parse


def _own_row(row: OwnRow) -> TraceRow:
    if not 0 <= row.shared_tokens <= row.prompt_tokens:
        raise _BadRow(f"shared_tokens {row.shared_tokens} must lie in 0 to prompt_tokens ({row.prompt_tokens})")
    if row.shared_tokens and not row.group:
        raise _BadRow("shared_tokens needs a group")
    if row.cancel_after_tokens is not None and not 0 <= row.cancel_after_tokens < row.output_tokens:
        raise _BadRow(f"cancel_after_tokens {row.cancel_after_tokens} must lie in 0 to output_tokens - 1")
    return TraceRow(
        at_ns=0 if row.at_s is None else _time_ns(row.at_s, NS_PER_S, "at_s"),
        prompt_tokens=_tokens(row.prompt_tokens, "prompt_tokens"),
        output_tokens=_tokens(row.output_tokens, "output_tokens"),
        group=row.group,
        shared_tokens=row.shared_tokens,
        session=row.session,
        think_ns=_time_ns(row.think_s, NS_PER_S, "think_s"),
        cancel_after_tokens=row.cancel_after_tokens,
        tenant=row.tenant,
        cohort=row.cohort,
    )


def _mooncake_parser() -> Callable[[str], TraceRow]:
    """Keeps the longest text seen of each block, to tell how much of a row was sent before it."""
    seen: dict[int, int] = {}

    def parse(line: str) -> TraceRow:
        row = _MOONCAKE_DECODER.decode(line)
        num_tokens = _tokens(row.input_length, "input_length")
        if len(row.hash_ids) > math.ceil(num_tokens / MOONCAKE_BLOCK_TOKENS):
            raise _BadRow(f"{len(row.hash_ids)} hash_ids are more than input_length {num_tokens} has blocks of 512")
        blocks, left = [], num_tokens
        for hash_id in row.hash_ids:
            blocks.append((hash_id, min(left, MOONCAKE_BLOCK_TOKENS)))
            left -= MOONCAKE_BLOCK_TOKENS
        shared = _seen_tokens(blocks, seen)
        for hash_id, length in blocks:
            seen[hash_id] = max(length, seen.get(hash_id, 0))
        return TraceRow(
            at_ns=_time_ns(row.timestamp, NS_PER_MS, "timestamp"),
            prompt_tokens=num_tokens,
            output_tokens=_tokens(row.output_length, "output_length"),
            blocks=tuple(blocks),
            shared_tokens=shared,
        )

    return parse


def _seen_tokens(blocks: list[tuple[int, int]], seen: dict[int, int]) -> int:
    """Tokens from the start that earlier rows had too."""
    shared = 0
    for hash_id, length in blocks:
        common = min(length, seen.get(hash_id, 0))
        shared += common
        if common < length:
            break
    return shared


def _csv_parser(positions: list[int], parse: Callable[[list[str]], TraceRow]) -> Callable[[str], TraceRow]:
    def parse_line(line: str) -> TraceRow:
        cells = next(csv.reader([line], strict=True))
        if len(cells) <= max(positions):
            raise _BadRow(f"{len(cells)} columns, fewer than the header has")
        return parse([cells[position].strip() for position in positions])

    return parse_line


def _azure_row(cells: list[str]) -> TraceRow:
    when, prompt_tokens, output_tokens = cells
    return TraceRow(
        at_ns=_timestamp_ns(when),
        prompt_tokens=_whole(prompt_tokens, "ContextTokens"),
        output_tokens=_whole(output_tokens, "GeneratedTokens"),
    )


def _burstgpt_row(cells: list[str]) -> TraceRow:
    seconds, prompt_tokens, output_tokens = cells
    try:
        at_s = float(seconds)
    except ValueError:
        raise _BadRow(f"Timestamp {seconds[:40]!r} is not a number of seconds") from None
    return TraceRow(
        at_ns=_time_ns(at_s, NS_PER_S, "Timestamp"),
        prompt_tokens=_whole(prompt_tokens, "Request tokens"),
        output_tokens=_whole(output_tokens, "Response tokens"),
    )


def _timestamp_ns(text: str) -> int:
    """An instant such as `2023-11-16 18:17:03.9799600`: seven digits of a second, more than a datetime keeps."""
    whole, _, fraction = text.partition(".")
    digits = len(fraction) - len(fraction.lstrip("0123456789"))
    try:
        instant = datetime.fromisoformat(whole + fraction[digits:])
        if instant.tzinfo is None:
            instant = instant.replace(tzinfo=UTC)
        whole_s = int(instant.timestamp())
    except (ValueError, OverflowError):
        raise _BadRow(f"TIMESTAMP {text[:40]!r} is not a date and time") from None
    return whole_s * NS_PER_S + int(fraction[:digits].ljust(9, "0")[:9])


def _time_ns(value: float, unit_ns: int, name: str) -> int:
    if not (math.isfinite(value) and 0 <= value * unit_ns <= TIME_S_MAX * NS_PER_S):
        raise _BadRow(f"{name} {value:g} must lie in 0 to {TIME_S_MAX * NS_PER_S / unit_ns:g}")
    return round(value * unit_ns)


def _whole(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise _BadRow(f"{name} {text[:40]!r} is not a whole number")
    return _tokens(int(text), name)


def _tokens(value: int, name: str) -> int:
    if not 0 <= value <= TOKENS_MAX:
        raise _BadRow(f"{name} {value} must lie in 0 to {TOKENS_MAX:,}")
    return value


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


def _explain(message: str) -> str:
    prefix = "Object contains unknown field `"
    if message.startswith(prefix):
        key = message[len(prefix) :].partition("`")[0]
        return f"unknown key {key[:64]!r}; the nearest is {nearest(key, OwnRow.__struct_fields__)!r}"
    return message.replace("Object missing required field", "missing key")


def _at(path: str, number: int, why: str) -> ConfigError:
    one_line = " ".join(why.split())
    return ConfigError(f"the trace {path!r}, line {number}: {one_line[:400]}", param="arrivals")


_OWN_DECODER = msgspec.json.Decoder(OwnRow)
_MOONCAKE_DECODER = msgspec.json.Decoder(_MooncakeRow)
