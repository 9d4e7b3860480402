"""What each request of a table measured: one array a metric, and pools of chunk gaps and tokens.

Three states are kept apart everywhere: a finite value; +inf, the request did not end well; NaN, the metric has no
meaning for this request (TPOT of an answer that came in one chunk). Definitions: docs/measurement.md.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.measure.record import TokenCount
from tailrace.measure.statistics import nearest_rank_index
from tailrace.measure.table import TOKEN_COUNTS, Bools, Floats, RecordTable

CLIENT_METRICS = {"send_lag_ms": ("scheduled", "issued"), "connect_ms": ("issued", "connected")}
"""The client's own doing: a value wherever both instants are known, however the request ended."""
ANSWER_METRICS = {
    "ttft_ms": ("scheduled", "first"),
    "ttft_service_ms": ("sent", "first"),
    "ttfo_ms": ("scheduled", "first_answer"),
    "e2e_ms": ("scheduled", "last"),
    "tail_ms": ("last", "ended"),
}
"""From one instant to another; +inf for every request that did not end well, even if it got that far."""


def request_metrics(table: RecordTable) -> dict[str, Floats]:
    """By metric: [n] ms."""
    metrics = {}
    for name, (start, end) in CLIENT_METRICS.items():
        elapsed = table.elapsed_ms(start, end)
        metrics[name] = np.where(np.isnan(elapsed) & ~table.ok, np.inf, elapsed)
    for name, (start, end) in ANSWER_METRICS.items():
        metrics[name] = np.where(table.ok, table.elapsed_ms(start, end), np.inf)
    metrics["tpot_ms"] = np.where(table.ok, _tpot_ms(table), np.inf)
    stalls_ms = np.where(table.chunks.counts > 1, table.chunks.stalls_ns() / 1e6, np.nan)
    metrics["stall_ms"] = np.where(table.ok, stalls_ms, np.inf)
    return metrics


def tokens_are(table: RecordTable, how: TokenCount) -> Bools:
    """[n] whether the tokens of the chunks are known in this way."""
    found: Bools = table.token_count_codes == TOKEN_COUNTS.index(how)
    return found


def output_tokens(table: RecordTable) -> Floats:
    """[n] N: as the server counts, else by chunks; NaN where neither is known."""
    unknown = tokens_are(table, TokenCount.UNKNOWN)
    by_chunks = np.where(unknown, np.nan, table.chunks.token_sums())
    return np.where(table.known("num_output_tokens"), table.count("num_output_tokens"), by_chunks)


def tokens_after_first(table: RecordTable) -> Floats:
    """[n] N - k_1: tokens that came after the first chunk, the divisor of TPOT; NaN where it is not known."""
    after = output_tokens(table) - table.chunks.first_tokens()
    return np.where(tokens_are(table, TokenCount.UNKNOWN), np.nan, after)


def _tpot_ms(table: RecordTable) -> Floats:
    after = tokens_after_first(table)
    some = (after > 0) & (table.chunks.counts > 1)  # tokens that came with the first have no time of their own
    tpot = np.full(len(table), np.nan)
    tpot[some] = table.elapsed_ms("first", "last")[some] / after[some]
    return tpot


class Pool:
    """Samples of several requests, each with a whole weight, never written out once a unit of weight.

    Those of weight 1, nearly all, are only sorted; the others carry the weight reached up to each.
    """

    def __init__(self, values: Floats, weights: NDArray[np.integer[Any]] | None = None) -> None:
        """`values` [m] finite, in any order, the pool's own from now on; `weights` [m] at least 1, None: 1 each."""
        several = np.zeros(len(values), np.bool_) if weights is None else weights > 1
        self._single = values if weights is None else values[~several]
        self._single.sort()  # in place: there may be tens of millions
        self._several = values[several]
        order = np.argsort(self._several)
        self._several = self._several[order]
        heavy = np.zeros(0, np.int64) if weights is None else weights[several][order].astype(np.int64)
        self._reached = np.concatenate((np.zeros(1, np.int64), np.cumsum(heavy)))
        self.num = len(self._single) + int(self._reached[-1])
        """Samples, by weight."""
        self.total = float(self._single.sum() + (self._several * heavy).sum())
        """Sum of the samples, by weight."""

    def num_at_most(self, value: float) -> int:
        """Samples at or below a value, by weight."""
        single = np.searchsorted(self._single, value, side="right")
        return int(single + self._reached[np.searchsorted(self._several, value, side="right")])

    def values(self) -> Iterator[Floats]:
        """Every value, in ascending runs."""
        yield from (each for each in (self._single, self._several) if len(each))


def pooled_quantile(pools: Sequence[Pool], num_inf: int, ratio: float) -> float | None:
    """Nearest rank over all samples of the pools and `num_inf` more at +inf; None without any sample."""
    total = sum(pool.num for pool in pools) + num_inf
    if total == 0:
        return None
    rank = nearest_rank_index(total, ratio) + 1
    if rank > total - num_inf:
        return float("inf")
    reaching = (_first_reaching(run, pools, rank) for pool in pools for run in pool.values())
    return min(value for value in reaching if value is not None)


def _first_reaching(run: Floats, pools: Sequence[Pool], rank: int) -> float | None:
    """The smallest of ascending values at or below which `rank` samples of all pools lie."""
    low, high = 0, len(run)
    while low < high:
        middle = (low + high) // 2
        if sum(pool.num_at_most(float(run[middle])) for pool in pools) >= rank:
            high = middle
        else:
            low = middle + 1
    return float(run[low]) if low < len(run) else None


def chunk_gap_pool(table: RecordTable, rows: Bools) -> Pool:
    """ms: one sample a chunk after the first of its request, of the rows given."""
    return Pool(table.chunks.gaps_ns[table.chunks.after_first(rows)] / 1e6)


def itl_pool(table: RecordTable, rows: Bools) -> tuple[Pool, int]:
    """ms: a chunk of k tokens after the first gives k samples of gap / k. Also how many samples share a gap."""
    chosen = table.chunks.after_first(rows)
    gaps_ms = table.chunks.gaps_ns[chosen] / 1e6
    tokens = table.chunks.tokens[chosen]
    if not (tokens > 1).any():
        return Pool(gaps_ms), 0
    gaps_ms /= tokens
    return Pool(gaps_ms, tokens), int(tokens[tokens > 1].sum())
