"""Records as columns: a million requests with their chunks in a few arrays, from which `measure.metrics` computes.

Rows keep the order of the records; nothing that is computed from a table depends on that order.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import chain, islice, repeat
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.errors import InvalidRequest
from tailrace.measure.record import Outcome, RequestRecord, TokenCount

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

TIMES = ("scheduled", "issued", "connected", "sent", "headers", "first", "first_answer", "last", "ended")
"""Instants of a request; `first` and `last` are those of its first and last chunk."""
COUNTS = (
    "num_prompt_tokens",
    "num_prompt_tokens_asked",
    "num_cached_tokens",
    "num_shared_tokens",
    "num_output_tokens",
    "num_output_tokens_client",
    "num_output_tokens_asked",
    "turn",
)
OUTCOMES = tuple(Outcome)
TOKEN_COUNTS = tuple(TokenCount)

TIME_NS_MAX = 1 << 62
GAP_NS_MAX = 1 << 46
"""19 hours between two chunks."""
COUNT_MAX = (1 << 31) - 1
MESSAGES_MAX = 1_000
"""Different failure messages that are kept apart."""
MESSAGE_CHARS_MAX = 200
_OTHER = "other messages"
_MISSING = np.iinfo(np.int64).min
_PIECE_ROWS = 8_192
_STORED_TIMES = tuple(name for name in TIMES if name not in ("first", "last"))


class BadRecord(Exception):
    """Internal: the record at `index` of a piece cannot be; `reason` says why."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index
        self.reason = reason


class RecordTable:
    """Columns of n records. Built by `from_records` or `measure.rows.read_rows`; never changed."""

    def __init__(self, columns: dict[str, Ints], chunks: "Chunks", messages: list[str]) -> None:
        self._columns = columns
        self.chunks = chunks
        self.outcome_codes = columns["outcome"]
        """[n] index into OUTCOMES. A record that says `ok` and has no chunk is `empty` here: nothing was answered."""
        self.token_count_codes = columns["token_count"]
        """[n] index into TOKEN_COUNTS."""
        self.message_codes = columns["message"]
        """[n] index into `messages`; 0 is no message."""
        self.messages = messages
        self.request_hashes = columns["request_id"]
        """[n] hash of each request id, for finding repeats; differs from process to process."""
        self.ok: Bools = columns["outcome"] == OUTCOMES.index(Outcome.OK)
        """[n] ended well, with at least one token."""
        self.will_cancel: Bools = columns["will_cancel"] == 1
        """[n] the workload planned that this caller leaves early."""

    @classmethod
    def from_records(cls, records: Iterable[RequestRecord]) -> "RecordTable":
        """Raises InvalidRequest that names the first record which cannot be."""
        builder, done = TableBuilder(), 0
        remaining = iter(records)
        while piece := list(islice(remaining, _PIECE_ROWS)):
            try:
                builder.add(piece)
            except BadRecord as bad:
                raise InvalidRequest(f"record {done + bad.index + 1}: {bad.reason}") from None
            done += len(piece)
        return builder.table()

    def __len__(self) -> int:
        return len(self.ok)

    def time_ns(self, name: str) -> Ints:
        """[n] one of TIMES. Meaningless where `known(name)` is false."""
        return self._columns[name]

    def count(self, name: str) -> Ints:
        """[n] one of COUNTS. Meaningless where `known(name)` is false."""
        return self._columns[name]

    def known(self, name: str) -> Bools:
        """[n] whether the record has this instant or count."""
        found: Bools = self._columns[name] != _MISSING
        return found

    def elapsed_ms(self, start: str, end: str) -> Floats:
        """[n] from one of TIMES to another; NaN where either did not happen."""
        known = self.known(start) & self.known(end)
        elapsed = np.full(len(self), np.nan)
        elapsed[known] = (self.time_ns(end)[known] - self.time_ns(start)[known]) / 1e6
        return elapsed


class Chunks:
    """Chunks with tokens of all requests, one after another: those of request i are `starts[i]:starts[i + 1]`."""

    def __init__(self, starts: Ints, gaps_ns: Ints, tokens: NDArray[np.int32]) -> None:
        self.starts = starts
        """[n + 1]"""
        self.gaps_ns = gaps_ns
        """[num_chunks] the first of a request counts from its scheduled arrival, each other from the one before."""
        self.tokens = tokens
        """[num_chunks] at least 1; 1 too where the tokens of chunks are not known (TokenCount.UNKNOWN)."""

    @property
    def counts(self) -> Ints:
        """[n] chunks of each request."""
        return np.diff(self.starts)

    def token_sums(self) -> Ints:
        """[n] tokens of each request, by its chunks."""
        return _segment_sums(self.tokens, self.starts).astype(np.int64)

    def first_tokens(self) -> Ints:
        """[n] tokens of the first chunk; 0 without one."""
        first = np.zeros(len(self.starts) - 1, np.int64)
        some = self.counts > 0
        first[some] = self.tokens[self.starts[:-1][some]]
        return first

    def stalls_ns(self) -> Ints:
        """[n] longest gap after the first chunk; meaningless (0) with fewer than two chunks."""
        stalls = np.zeros(len(self.starts) - 1, np.int64)
        several = self.counts > 1
        bounds = np.stack((self.starts[:-1][several] + 1, self.starts[1:][several]), axis=1).ravel()
        if len(bounds):
            # Segments and what lies between them take turns; the last end is the array's own.
            stalls[several] = np.maximum.reduceat(
                self.gaps_ns, bounds[:-1] if bounds[-1] == len(self.gaps_ns) else bounds
            )[::2]
        return stalls

    def after_first(self, rows: Bools) -> Bools:
        """[num_chunks] chunks of the `rows` given that are not the first of their request."""
        chosen = np.repeat(rows, self.counts)
        chosen[self.starts[:-1][self.counts > 0]] = False
        return chosen

    def instants(self, scheduled_ns: Ints) -> Iterator[tuple[Ints, NDArray[np.int32]]]:
        """Receipt and tokens of every chunk, in pieces of bounded size."""
        for a in range(0, len(scheduled_ns), _PIECE_ROWS):
            starts = self.starts[a : a + _PIECE_ROWS + 1]
            gaps = self.gaps_ns[starts[0] : starts[-1]]
            running = np.concatenate((np.zeros(1, np.int64), np.cumsum(gaps)))
            base = scheduled_ns[a : a + _PIECE_ROWS] - running[starts[:-1] - starts[0]]
            yield running[1:] + np.repeat(base, np.diff(starts)), self.tokens[starts[0] : starts[-1]]


class TableBuilder:
    """Takes records piece by piece and keeps only columns of them."""

    def __init__(self) -> None:
        self._pieces: list[dict[str, Ints]] = []
        self._gaps_ns: list[Ints] = []
        self._tokens: list[NDArray[np.int32]] = []
        self._messages: dict[str, int] = {"": 0}
        self.num_rows = 0
        self.num_chunks = 0

    def add(self, records: list[RequestRecord]) -> None:
        """Raises BadRecord; the builder is then of no further use."""
        fields = _by_field(records)
        gap_lists = fields["chunk_gaps_ns"]
        counts = np.fromiter(map(len, gap_lists), np.int64, len(records))
        gaps = _chain(gap_lists, int(counts.sum()), "chunk_gaps_ns")
        tokens = _chunk_tokens(fields["chunk_tokens"], counts)
        starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
        _check_chunks(gaps, tokens, starts)
        columns = self._stored_columns(fields)
        columns["num_chunks"] = counts
        some = counts > 0
        for name in ("first", "last"):
            columns[name] = np.full(len(records), _MISSING)
        scheduled = columns["scheduled"]
        columns["first"][some] = scheduled[some] + gaps[starts[:-1][some]]
        columns["last"][some] = scheduled[some] + _segment_sums(gaps, starts)[some]
        columns["outcome"][~some & (columns["outcome"] == _OK)] = _EMPTY
        self._pieces.append(columns)
        self._gaps_ns.append(gaps)
        self._tokens.append(tokens)
        self.num_rows += len(records)
        self.num_chunks += len(gaps)

    def table(self) -> RecordTable:
        """Everything added so far. Once only: the pieces are given up while the columns are joined."""
        pieces, self._pieces = self._pieces or [self._stored_columns(_by_field([]))], []
        names = {*pieces[0], "first", "last", "num_chunks"}
        columns = {name: _join([piece.pop(name, np.zeros(0, np.int64)) for piece in pieces]) for name in names}
        starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(columns.pop("num_chunks"))))
        gaps = _join(self._gaps_ns)
        self._gaps_ns = []
        tokens: NDArray[np.int32] = np.concatenate([np.zeros(0, np.int32), *self._tokens])
        self._tokens = []
        return RecordTable(columns, Chunks(starts, gaps, tokens), list(self._messages))

    def _stored_columns(self, fields: dict[str, tuple[Any, ...]]) -> dict[str, Ints]:
        columns = {name: _optional(fields, f"{name}_ns", TIME_NS_MAX) for name in _STORED_TIMES}
        columns |= {name: _optional(fields, name, COUNT_MAX) for name in COUNTS}
        columns["outcome"] = _codes(fields["outcome"], OUTCOMES)
        columns["token_count"] = _codes(fields["token_count"], TOKEN_COUNTS)
        columns["will_cancel"] = _column(fields["will_cancel"])
        columns["request_id"] = _column(list(map(hash, fields["request_id"])))
        columns["message"] = _column([self._message_code(text) if text else 0 for text in fields["message"]])
        return columns

    def _message_code(self, message: str) -> int:
        cut = message[:MESSAGE_CHARS_MAX]
        code = self._messages.get(cut)
        if code is None:
            kept = cut if len(self._messages) < MESSAGES_MAX else _OTHER
            code = self._messages.setdefault(kept, len(self._messages))
        return code


_OK, _EMPTY = OUTCOMES.index(Outcome.OK), OUTCOMES.index(Outcome.EMPTY)


def _by_field(records: list[RequestRecord]) -> dict[str, tuple[Any, ...]]:
    """[n] values of each field. Each record is touched once: a fetch a field and record takes three times as long."""
    columns = zip(*map(msgspec.structs.astuple, records), strict=True) if records else repeat(())
    return dict(zip(RequestRecord.__struct_fields__, columns, strict=False))


def _column(values: Sequence[int]) -> Ints:
    return np.fromiter(values, np.int64, len(values))


def _codes(values: Sequence[StrEnum], members: Sequence[StrEnum]) -> Ints:
    """Indices into `members`: by identity, because an enum computes its hash in Python, anew each time."""
    codes = {id(member): code for code, member in enumerate(members)}
    return _column([codes[id(value)] for value in values])


def _optional(fields: dict[str, tuple[Any, ...]], field: str, largest: int) -> Ints:
    values: Sequence[Any] = fields[field]
    missing: list[int] = []
    if None in values:
        missing = [index for index, value in enumerate(values) if value is None]
        values = [0 if value is None else value for value in values]
    try:
        column = _column(values)
    except OverflowError:
        column = _column([value if abs(value) <= TIME_NS_MAX else -1 for value in values])
    bad = (column < 0) | (column > largest)
    if bad.any():
        raise BadRecord(int(bad.argmax()), f"{field} is negative or too large")
    column[missing] = _MISSING
    return column


def _chain(lists: Sequence[list[int]], num: int, field: str) -> Ints:
    try:
        return np.fromiter(chain.from_iterable(lists), np.int64, num)
    except OverflowError:
        index = next(i for i, each in enumerate(lists) if any(abs(value) >= TIME_NS_MAX for value in each))
        raise BadRecord(index, f"{field} has a number that is too large") from None


def _chunk_tokens(lists: Sequence[list[int] | None], counts: Ints) -> NDArray[np.int32]:
    """[num_chunks] of records that have `counts` chunks; None: one token a chunk."""
    num = int(counts.sum())
    if lists.count(None) == len(lists):
        return np.ones(num, np.int32)
    full = [[1] * num if each is None else each for num, each in zip(counts.tolist(), lists, strict=True)]
    differs = np.fromiter(map(len, full), np.int64, len(full)) != counts
    if differs.any():
        raise BadRecord(int(differs.argmax()), "chunk_tokens and chunk_gaps_ns differ in length")
    try:
        tokens = np.frombuffer(b"".join(map(bytes, full)), np.uint8).astype(np.int64)  # the quick way for small numbers
    except ValueError:
        tokens = _chain(full, num, "chunk_tokens")
    bad = (tokens < 1) | (tokens > COUNT_MAX)
    if bad.any():
        index = int(np.searchsorted(np.cumsum(counts), bad.argmax(), side="right"))
        raise BadRecord(index, "a chunk has less than one token, or too many")
    return tokens.astype(np.int32)


def _check_chunks(gaps: Ints, tokens: NDArray[np.int32], starts: Ints) -> None:
    bad = (gaps < 0) | (gaps > GAP_NS_MAX)
    if bad.any():
        index = int(np.searchsorted(starts, bad.argmax(), side="right")) - 1
        raise BadRecord(index, "chunk_gaps_ns has a gap that is negative or longer than 19 hours")
    _check_sums("gaps", gaps, starts, TIME_NS_MAX)
    _check_sums("tokens", tokens, starts, COUNT_MAX)


def _check_sums(what: str, values: NDArray[np.integer[Any]], starts: Ints, largest: int) -> None:
    if int(values.max(initial=0)) * int(np.diff(starts).max(initial=0)) < largest:
        return
    # As floats: whole numbers could wrap round before they are compared.
    long = _segment_sums(values.astype(np.float64), starts) >= largest
    if long.any():
        raise BadRecord(int(long.argmax()), f"the {what} of its chunks add up to too much")


def _segment_sums(values: NDArray[Any], starts: Ints) -> NDArray[Any]:
    """[n] sum of each segment; 0 of an empty one."""
    sums = np.zeros(len(starts) - 1, values.dtype)
    some = np.diff(starts) > 0
    if some.any():
        sums[some] = np.add.reduceat(values, starts[:-1][some])
    return sums


def _join(parts: list[Ints]) -> Ints:
    return np.concatenate([np.zeros(0, np.int64), *parts])
