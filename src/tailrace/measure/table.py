"""Records as columns: a million requests with their chunks in a few arrays, from which `measure.metrics` computes.

Rows keep the order of the records; nothing that is computed from a table depends on that order.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from operator import attrgetter
from typing import Any

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

    def __init__(self, columns: dict[str, Ints], chunks: "Chunks", cohorts: list[str], messages: list[str]) -> None:
        self._columns = columns
        self.chunks = chunks
        self.outcome_codes = columns["outcome"]
        """[n] index into OUTCOMES. A record that says `ok` and has no chunk is `empty` here: nothing was answered."""
        self.token_count_codes = columns["token_count"]
        """[n] index into TOKEN_COUNTS."""
        self.cohort_codes = columns["cohort"]
        """[n] index into `cohorts`."""
        self.cohorts = cohorts
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
        self._cohorts: dict[str, int] = {}
        self._messages: dict[str, int] = {"": 0}
        self.num_rows = 0
        self.num_chunks = 0

    def add(self, records: list[RequestRecord]) -> None:
        """Raises BadRecord; the builder is then of no further use."""
        counts = _column(records, lambda r: len(r.chunk_gaps_ns))
        gaps = _chain([r.chunk_gaps_ns for r in records], int(counts.sum()), "chunk_gaps_ns")
        tokens = _chunk_tokens(records, len(gaps))
        starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
        _check_chunks(gaps, tokens, starts)
        columns = self._stored_columns(records)
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
        pieces, self._pieces = self._pieces or [self._stored_columns([])], []
        names = {*pieces[0], "first", "last", "num_chunks"}
        columns = {name: _join([piece.pop(name, np.zeros(0, np.int64)) for piece in pieces]) for name in names}
        starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(columns.pop("num_chunks"))))
        gaps = _join(self._gaps_ns)
        self._gaps_ns = []
        tokens: NDArray[np.int32] = np.concatenate([np.zeros(0, np.int32), *self._tokens])
        self._tokens = []
        return RecordTable(columns, Chunks(starts, gaps, tokens), list(self._cohorts), list(self._messages))

    def _stored_columns(self, records: list[RequestRecord]) -> dict[str, Ints]:
        columns = {name: _optional(records, f"{name}_ns", TIME_NS_MAX) for name in _STORED_TIMES}
        columns |= {name: _optional(records, name, COUNT_MAX) for name in COUNTS}
        columns["outcome"] = _column(records, lambda r: _OUTCOME_CODES[r.outcome])
        columns["token_count"] = _column(records, lambda r: _TOKEN_CODES[r.token_count])
        columns["will_cancel"] = _column(records, lambda r: int(r.will_cancel))
        columns["request_id"] = _column(records, lambda r: hash(r.request_id))
        columns["cohort"] = _column(records, lambda r: self._cohorts.setdefault(r.cohort, len(self._cohorts)))
        columns["message"] = _column(records, lambda r: self._message_code(r.message))
        return columns

    def _message_code(self, message: str) -> int:
        cut = message[:MESSAGE_CHARS_MAX]
        code = self._messages.get(cut)
        if code is None:
            kept = cut if len(self._messages) < MESSAGES_MAX else _OTHER
            code = self._messages.setdefault(kept, len(self._messages))
        return code


_OUTCOME_CODES = {outcome: code for code, outcome in enumerate(OUTCOMES)}
_TOKEN_CODES = {count: code for code, count in enumerate(TOKEN_COUNTS)}
_OK, _EMPTY = _OUTCOME_CODES[Outcome.OK], _OUTCOME_CODES[Outcome.EMPTY]


def _column(records: list[RequestRecord], value: Callable[[RequestRecord], int]) -> Ints:
    return np.fromiter(map(value, records), np.int64, len(records))


def _optional(records: list[RequestRecord], field: str, largest: int) -> Ints:
    values = map(attrgetter(field), records)
    try:
        column = np.fromiter(values, np.int64, len(records))
    except (TypeError, OverflowError):  # one of them is None, or larger than it can be
        values = map(attrgetter(field), records)
        kept = (_MISSING if v is None else v if abs(v) <= TIME_NS_MAX else -1 for v in values)
        column = np.fromiter(kept, np.int64, len(records))
    bad = (column != _MISSING) & ((column < 0) | (column > largest))
    if bad.any():
        raise BadRecord(int(bad.argmax()), f"{field} is negative or too large")
    return column


def _chain(lists: list[list[int]], num: int, field: str) -> Ints:
    try:
        return np.fromiter(chain.from_iterable(lists), np.int64, num)
    except OverflowError:
        index = next(i for i, each in enumerate(lists) if any(abs(value) >= TIME_NS_MAX for value in each))
        raise BadRecord(index, f"{field} has a number that is too large") from None


def _chunk_tokens(records: list[RequestRecord], num: int) -> NDArray[np.int32]:
    if all(record.chunk_tokens is None for record in records):
        return np.ones(num, np.int32)
    for index, record in enumerate(records):
        if record.chunk_tokens is not None and len(record.chunk_tokens) != len(record.chunk_gaps_ns):
            raise BadRecord(index, "chunk_tokens and chunk_gaps_ns differ in length")
    lists = [[1] * len(r.chunk_gaps_ns) if r.chunk_tokens is None else r.chunk_tokens for r in records]
    tokens = _chain(lists, num, "chunk_tokens")
    bad = (tokens < 1) | (tokens > COUNT_MAX)
    if bad.any():
        ends = np.cumsum([len(each) for each in lists])
        raise BadRecord(int(np.searchsorted(ends, bad.argmax(), side="right")), "a chunk has less than one token")
    return tokens.astype(np.int32)


def _check_chunks(gaps: Ints, tokens: NDArray[np.int32], starts: Ints) -> None:
    bad = (gaps < 0) | (gaps > GAP_NS_MAX)
    if bad.any():
        index = int(np.searchsorted(starts, bad.argmax(), side="right")) - 1
        raise BadRecord(index, "chunk_gaps_ns has a gap that is negative or longer than 19 hours")
    # As floats: whole numbers could wrap round before they are compared.
    for what, values, largest in (("gaps", gaps, TIME_NS_MAX), ("tokens", tokens, COUNT_MAX)):
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
