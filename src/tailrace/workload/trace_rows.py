"""Lines of traces to rows, one parser a layout. A wrong line raises `BadRow`; `workload.traces` knows its number."""

import csv
import math
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Annotated

import msgspec

from tailrace.clock import NS_PER_MS, NS_PER_S
from tailrace.config import nearest

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


class BadRow(Exception):
    """What is wrong with a row; the reader adds file and line."""


def own_parser() -> Callable[[str], TraceRow]:
    """Of our own layout. Knows which sessions have begun."""
    begun: set[str] = set()

    def parse(line: str) -> TraceRow:
        try:
            row = _OWN_DECODER.decode(line)
        except msgspec.ValidationError as error:
            raise BadRow(_explain(str(error))) from error
        if row.at_s is None and row.session not in begun:
            raise BadRow("at_s is missing: only later turns of a session go without")
        if row.session in begun and row.shared_tokens:
            raise BadRow("shared_tokens of a later turn: its history is shared as it is")
        if row.session:
            begun.add(row.session)
        return _own_row(row)

    return parse


def _own_row(row: OwnRow) -> TraceRow:
    if row.prompt_tokens < 1 or row.output_tokens < 1:
        raise BadRow("prompt_tokens and output_tokens must be at least 1")
    if not 0 <= row.shared_tokens <= row.prompt_tokens:
        raise BadRow(f"shared_tokens {row.shared_tokens} must lie in 0 to prompt_tokens ({row.prompt_tokens})")
    if row.shared_tokens and not row.group:
        raise BadRow("shared_tokens needs a group")
    if row.cancel_after_tokens is not None and not 0 <= row.cancel_after_tokens < row.output_tokens:
        raise BadRow(f"cancel_after_tokens {row.cancel_after_tokens} must lie in 0 to output_tokens - 1")
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


def mooncake_row(line: str) -> TraceRow:
    """Of Mooncake's layout; how much of it was sent before is told by `with_shares`."""
    row = _MOONCAKE_DECODER.decode(line)
    num_tokens = _tokens(row.input_length, "input_length")
    if len(row.hash_ids) > math.ceil(num_tokens / MOONCAKE_BLOCK_TOKENS):
        raise BadRow(f"{len(row.hash_ids)} hash_ids are more than input_length {num_tokens} has blocks of 512")
    blocks, left = [], num_tokens
    for hash_id in row.hash_ids:
        blocks.append((hash_id, min(left, MOONCAKE_BLOCK_TOKENS)))
        left -= MOONCAKE_BLOCK_TOKENS
    return TraceRow(
        at_ns=_time_ns(row.timestamp, NS_PER_MS, "timestamp"),
        prompt_tokens=num_tokens,
        output_tokens=_tokens(row.output_length, "output_length"),
        blocks=tuple(blocks),
    )


def with_shares(rows: Iterable[TraceRow]) -> list[TraceRow]:
    """Rows by arrival, each with the tokens from its start that rows before it had too. Keeps the longest text seen of
    each block."""
    seen: dict[int, int] = {}
    found = []
    for row in sorted(rows, key=lambda row: row.at_ns):
        found.append(msgspec.structs.replace(row, shared_tokens=_seen_tokens(row.blocks, seen)))
        for hash_id, length in row.blocks:
            seen[hash_id] = max(length, seen.get(hash_id, 0))
    return found


def _seen_tokens(blocks: Iterable[tuple[int, int]], seen: dict[int, int]) -> int:
    """Tokens from the start that earlier rows had too."""
    shared = 0
    for hash_id, length in blocks:
        common = min(length, seen.get(hash_id, 0))
        shared += common
        if common < length:
            break
    return shared


def csv_parser(positions: list[int], parse: Callable[[list[str]], TraceRow]) -> Callable[[str], TraceRow]:
    def parse_line(line: str) -> TraceRow:
        cells = next(csv.reader([line], strict=True))
        if len(cells) <= max(positions):
            raise BadRow(f"{len(cells)} columns, fewer than the header has")
        return parse([cells[position].strip() for position in positions])

    return parse_line


def azure_row(cells: list[str]) -> TraceRow:
    when, prompt_tokens, output_tokens = cells
    return TraceRow(
        at_ns=_timestamp_ns(when),
        prompt_tokens=_whole(prompt_tokens, "ContextTokens"),
        output_tokens=_whole(output_tokens, "GeneratedTokens"),
    )


def burstgpt_row(cells: list[str]) -> TraceRow:
    seconds, prompt_tokens, output_tokens = cells
    try:
        at_s = float(seconds)
    except ValueError:
        raise BadRow(f"Timestamp {seconds[:40]!r} is not a number of seconds") from None
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
        raise BadRow(f"TIMESTAMP {text[:40]!r} is not a date and time") from None
    return whole_s * NS_PER_S + int(fraction[:digits].ljust(9, "0")[:9])


def _time_ns(value: float, unit_ns: int, name: str) -> int:
    if not (math.isfinite(value) and 0 <= value * unit_ns <= TIME_S_MAX * NS_PER_S):
        raise BadRow(f"{name} {value:g} must lie in 0 to {TIME_S_MAX * NS_PER_S / unit_ns:g}")
    return round(value * unit_ns)


def _whole(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise BadRow(f"{name} {text[:40]!r} is not a whole number")
    return _tokens(int(text), name)


def _tokens(value: int, name: str) -> int:
    if not 0 <= value <= TOKENS_MAX:
        raise BadRow(f"{name} {value} must lie in 0 to {TOKENS_MAX:,}")
    return value


def _explain(message: str) -> str:
    prefix = "Object contains unknown field `"
    if message.startswith(prefix):
        key = message[len(prefix) :].partition("`")[0]
        return f"unknown key {key[:64]!r}; the nearest is {nearest(key, OwnRow.__struct_fields__)!r}"
    return message.replace("Object missing required field", "missing key")


_OWN_DECODER = msgspec.json.Decoder(OwnRow)
_MOONCAKE_DECODER = msgspec.json.Decoder(_MooncakeRow)
