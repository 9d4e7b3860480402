"""Curves over time and of distributions from a table of records: a bounded number of points, whatever the run's length.

Times are seconds from the schedule's zero (`_s`) or milliseconds (`_ms`). Undefined is None, out of reach is "inf".
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tailrace.measure.distribution import to_quantile
from tailrace.measure.metrics import output_tokens
from tailrace.measure.rates import attained
from tailrace.measure.report import Quantile
from tailrace.measure.run_info import RunInfo
from tailrace.measure.statistics import nearest_rank
from tailrace.measure.table import OUTCOMES, Bools, Floats, Ints, RecordTable
from tailrace.measure.window import Window, window_of

INTERVALS_MAX = 120
"""Of a curve that gathers requests: enough to see a trend, wide enough to hold some requests each."""
INTERVALS_MIN = 10
POINTS_MAX = 600
"""Of a curve that is looked up at instants: about the pixels of a plot."""
CDF_POINTS_MAX = 500
CDF_SAMPLES_MAX = 2_000_000
"""More samples than this are thinned evenly; at these numbers the curve does not change visibly."""
SLOWEST = 25
CHUNKS_SHOWN_MAX = 200
_NS_PER_S = 1e9
_NS_PER_MS = 1e6


class Cdf(msgspec.Struct, frozen=True, kw_only=True):
    """Share of samples at or below each time; what never came keeps the last share below 1."""

    ms: list[float]
    """Rising."""
    ratio: list[float]
    num: int
    """Samples, failures included."""
    failed_ratio: float


class PercentileSeries(msgspec.Struct, frozen=True, kw_only=True):
    """By the interval in which a request was scheduled."""

    t_s: list[float]
    """Middle of each interval."""
    p50: list[Quantile]
    p99: list[Quantile]
    num: list[int]


class FlightSeries(msgspec.Struct, frozen=True, kw_only=True):
    """At instants: what the callers are waiting for."""

    t_s: list[float]
    num_in_flight: list[int]
    """Scheduled, not ended."""
    num_awaiting_first: list[int]
    """Of these, without a token."""
    oldest_age_s: list[float | None]
    """How long the oldest of those without a token has waited; None: nobody waits."""


class RateSeries(msgspec.Struct, frozen=True, kw_only=True):
    t_s: list[float]
    interval_s: float
    arrivals_per_s: list[float]
    completed_per_s: list[float]
    """Ended well, by the instant of the end."""
    output_tokens_per_s: list[float]
    """By the instant of receipt; a chunk counts one where its tokens are not known."""
    attained_per_s: list[float] | None
    """Met the SLO, by scheduled arrival; None without an SLO."""
    outcomes: dict[str, list[int]]
    """Requests by outcome, by scheduled arrival; labels that occur."""


class WaterfallRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request, ms from its scheduled arrival."""

    row: int
    """Its number in the file of rows, from 1."""
    outcome: str
    num_prompt_tokens: int | None
    num_output_tokens: int | None
    phases: list[tuple[str, float, float]]
    """(name, start, end), in order; only those that happened."""
    chunks_ms: list[float]
    """Instants of chunks, thinned evenly."""


class RunSeries(msgspec.Struct, frozen=True, kw_only=True):
    """All curves of one run."""

    window_start_s: float
    window_end_s: float
    cdfs: dict[str, Cdf]
    ttft: PercentileSeries
    tpot: PercentileSeries
    flight: FlightSeries
    rates: RateSeries
    slowest: list[WaterfallRow]


def run_series(info: RunInfo, table: RecordTable) -> RunSeries:
    """Every curve of a run. Distributions are of the window's requests without planned cancellations; curves over time
    show all that was sent."""
    window = window_of(info, table)
    metrics = window.metrics
    scheduled_s, ended_s = (_seconds(table.time_ns(name), info) for name in ("scheduled", "ended"))
    edges_s = intervals(min(0.0, float(scheduled_s.min(initial=0.0))), float(ended_s.max(initial=1.0)), len(table))
    loads = ~table.will_cancel
    ttft, tpot = (
        percentiles_over_time(scheduled_s[loads], metrics[name][loads], edges_s) for name in ("ttft_ms", "tpot_ms")
    )
    first_s = np.where(table.known("first"), _seconds(table.time_ns("first"), info), np.nan)
    return RunSeries(
        window_start_s=info.window_start_ns / _NS_PER_S,
        window_end_s=info.window_end_ns / _NS_PER_S,
        cdfs={name: cdf(metrics[name][window.counted]) for name in ("ttft_ms", "e2e_ms")}
        | _gap_cdfs(table, window.counted),
        ttft=ttft,
        tpot=tpot,
        flight=flight(scheduled_s, first_s, ended_s),
        rates=_rates(window, scheduled_s, ended_s, edges_s),
        slowest=_slowest(table, window.scheduled),
    )


def cdf(values_ms: Floats, weights: Ints | None = None) -> Cdf:
    """Of samples where NaN is undefined (left out) and +inf failed. `weights`: samples that each value stands for."""
    known = ~np.isnan(values_ms)
    step = max(1, -(-int(known.sum()) // CDF_SAMPLES_MAX))
    values = values_ms[known][::step]
    shares = np.ones(len(values), np.int64) if weights is None else weights[known][::step]
    order = np.argsort(values)
    values, reached = values[order], np.cumsum(shares[order])
    num_finite = int(np.searchsorted(values, np.inf))
    num = int(known.sum() if weights is None else weights[known].sum())
    if num_finite == 0:
        return Cdf(ms=[], ratio=[], num=num, failed_ratio=1.0 if num else 0.0)
    # Even steps, and the upper tail again as densely as the whole: that is where the reader looks.
    last = num_finite - 1
    even = np.linspace(0, last, CDF_POINTS_MAX // 2)
    tail = last - np.geomspace(1, num_finite, CDF_POINTS_MAX // 2) + 1
    ranks = np.unique(np.concatenate((even, tail)).round().astype(np.int64).clip(0, last))
    return Cdf(
        ms=values[ranks].tolist(),
        ratio=(reached[ranks] / reached[-1]).tolist(),
        num=num,
        failed_ratio=float(1 - reached[last] / reached[-1]),
    )


def intervals(start_s: float, end_s: float, num_requests: int) -> Floats:
    """Edges of equal intervals of a round length: some ten requests each where there are few, INTERVALS_MAX at most."""
    span_s = max(end_s - start_s, 1e-3)
    most = min(INTERVALS_MAX, max(INTERVALS_MIN, num_requests // 10))
    width_s = next((w for w in _WIDTHS_S if span_s / w <= most), span_s / most)
    return start_s + width_s * np.arange(int(np.ceil(span_s / width_s - 1e-9)) + 1, dtype=np.float64)


_WIDTHS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1_800, 3_600)


def percentiles_over_time(t_s: Floats, values_ms: Floats, edges_s: Floats) -> PercentileSeries:
    """Nearest rank in each interval. NaN is undefined and left out, +inf is failed and counts."""
    known = ~np.isnan(values_ms) & (t_s >= edges_s[0]) & (t_s < edges_s[-1])
    places = np.searchsorted(edges_s, t_s[known], side="right") - 1
    values = values_ms[known]
    order = np.lexsort((values, places))
    values, bounds = values[order], np.searchsorted(places[order], np.arange(len(edges_s)))
    groups = [values[a:b] for a, b in pairwise(bounds)]
    return PercentileSeries(
        t_s=((edges_s[:-1] + edges_s[1:]) / 2).tolist(),
        p50=[_nearest_rank(group, 0.5) for group in groups],
        p99=[_nearest_rank(group, 0.99) for group in groups],
        num=[len(group) for group in groups],
    )


def flight(scheduled_s: Floats, first_s: Floats, ended_s: Floats) -> FlightSeries:
    """`first_s` is NaN where no token came: such a request awaits it until it ends. O(n log n + points log n)."""
    waits_until_s = np.where(np.isnan(first_s), ended_s, first_s)
    if not len(scheduled_s):
        return FlightSeries(t_s=[], num_in_flight=[], num_awaiting_first=[], oldest_age_s=[])
    t_s = np.linspace(min(0.0, float(scheduled_s.min())), float(ended_s.max()), POINTS_MAX)
    order = np.argsort(scheduled_s, kind="stable")
    starts, waits = scheduled_s[order], waits_until_s[order]
    begun = np.searchsorted(starts, t_s, side="right")
    # The first request in order of arrival that is still waiting is the first whose prefix maximum exceeds the instant.
    oldest = np.searchsorted(np.maximum.accumulate(waits), t_s, side="right")
    ages = [float(t - starts[i]) if i < n else None for t, i, n in zip(t_s, oldest, begun, strict=True)]
    return FlightSeries(
        t_s=t_s.tolist(),
        num_in_flight=(begun - np.searchsorted(np.sort(ended_s), t_s, side="right")).tolist(),
        num_awaiting_first=(begun - np.searchsorted(np.sort(waits), t_s, side="right")).tolist(),
        oldest_age_s=ages,
    )


def per_interval(t_s: Floats, edges_s: Floats, weights: npt.NDArray[Any] | None = None) -> Floats:
    """Events (or their weights) in each of equal intervals; what lies outside is left out."""
    places = np.floor((t_s - edges_s[0]) / (edges_s[1] - edges_s[0]))
    inside = (places >= 0) & (places < len(edges_s) - 1)
    shares = None if weights is None else weights[inside]
    return np.bincount(places[inside].astype(np.int64), shares, len(edges_s) - 1).astype(np.float64)


def outcome_counts(t_s: Floats, codes: Ints, labels: Sequence[str], edges_s: Floats) -> dict[str, list[int]]:
    """Requests of each outcome by interval; `codes` index `labels`."""
    return {
        label: per_interval(t_s[codes == code], edges_s).astype(int).tolist()
        for code, label in enumerate(labels)
        if (codes == code).any()
    }


def thin(values: Floats, num_max: int) -> Floats:
    """At most `num_max` of them, evenly, the first and the last among them."""
    if len(values) <= num_max:
        return values
    return values[np.linspace(0, len(values) - 1, num_max).round().astype(np.int64)]


NO_TOKEN = "no token"
"""Last phase of a request that never had one."""
_PHASES = (
    ("send lag", "issued"),
    ("connect", "connected"),
    ("send", "sent"),
    ("headers", "headers"),
    ("first token", "first"),
    ("stream", "last"),
    ("end", "ended"),
)
"""(name, the instant of `table.TIMES` that ends it); each begins where the one before ended."""


def _slowest(table: RecordTable, scheduled: Bools) -> list[WaterfallRow]:
    """Longest from scheduled arrival to end, however they ended."""
    rows = np.flatnonzero(scheduled)
    took_ms = table.elapsed_ms("scheduled", "ended")[rows]
    chosen = rows[np.argsort(-took_ms, kind="stable")[:SLOWEST]]
    instants_ms = {until: table.elapsed_ms("scheduled", until)[chosen] for _, until in _PHASES}
    prompt = np.where(table.known("num_prompt_tokens"), table.count("num_prompt_tokens"), np.nan)[chosen]
    output = output_tokens(table)[chosen]
    return [
        WaterfallRow(
            row=int(row) + 1,
            outcome=OUTCOMES[table.outcome_codes[row]],
            num_prompt_tokens=_known(prompt[i]),
            num_output_tokens=_known(output[i]),
            phases=_phases({name: float(times[i]) for name, times in instants_ms.items()}),
            chunks_ms=_chunks_ms(table, int(row)),
        )
        for i, row in enumerate(chosen)
    ]


def _phases(instants_ms: dict[str, float]) -> list[tuple[str, float, float]]:
    """What did not happen, or took no time, is left out."""
    phases, start = [], 0.0
    for phase, until in _PHASES:
        end = instants_ms[until]
        if end > start:
            never = until == "ended" and np.isnan(instants_ms["first"])
            phases.append((NO_TOKEN if never else phase, start, end))
            start = end
    return phases


def _chunks_ms(table: RecordTable, row: int) -> list[float]:
    gaps_ns = table.chunks.gaps_ns[table.chunks.starts[row] : table.chunks.starts[row + 1]]
    instants: list[float] = thin(np.cumsum(gaps_ns) / _NS_PER_MS, CHUNKS_SHOWN_MAX).tolist()
    return instants


def _known(value: float) -> int | None:
    return None if np.isnan(value) else int(value)


def _gap_cdfs(table: RecordTable, rows: Bools) -> dict[str, Cdf]:
    """Chunk gaps, and the same shared out to the tokens of each chunk. What failed is in the request's own metrics."""
    chosen = table.chunks.after_first(rows & table.ok)
    step = max(1, -(-int(chosen.sum()) // CDF_SAMPLES_MAX))
    gaps_ms = table.chunks.gaps_ns[chosen][::step] / _NS_PER_MS
    tokens = table.chunks.tokens[chosen][::step].astype(np.int64)
    return {"itl_ms": cdf(gaps_ms / tokens, tokens), "chunk_gap_ms": cdf(gaps_ms)}


def _rates(window: Window, scheduled_s: Floats, ended_s: Floats, edges_s: Floats) -> RateSeries:
    info, table = window.info, window.table
    width_s = float(edges_s[1] - edges_s[0])
    tokens = np.zeros(len(edges_s) - 1)
    for instants_ns, counts in table.chunks.instants(table.time_ns("scheduled")):
        tokens += per_interval(_seconds(instants_ns, info), edges_s, counts)
    met = attained(window)
    return RateSeries(
        t_s=((edges_s[:-1] + edges_s[1:]) / 2).tolist(),
        interval_s=width_s,
        arrivals_per_s=(per_interval(scheduled_s, edges_s) / width_s).tolist(),
        completed_per_s=(per_interval(ended_s[table.ok], edges_s) / width_s).tolist(),
        output_tokens_per_s=(tokens / width_s).tolist(),
        attained_per_s=None if met is None else (per_interval(scheduled_s[met], edges_s) / width_s).tolist(),
        outcomes=outcome_counts(scheduled_s, table.outcome_codes, OUTCOMES, edges_s),
    )


def _seconds(times_ns: Ints, info: RunInfo) -> Floats:
    return (times_ns - info.origin_ns) / _NS_PER_S


def _nearest_rank(ordered: Floats, ratio: float) -> Quantile:
    return to_quantile(nearest_rank(ordered, ratio)) if len(ordered) else None
