"""Curves over time and of distributions from a table of records: a bounded number of points, whatever the run's length.

Times are seconds from the schedule's zero (`_s`) or milliseconds (`_ms`). Undefined is None, out of reach is "inf".
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from tailrace.measure.report import Quantile

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

INTERVALS_MAX = 120
"""Of a curve that gathers requests: enough to see a trend, wide enough to hold some requests each."""
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

    request_id: str
    outcome: str
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


def cdf(values_ms: Floats) -> Cdf:
    """Of samples where NaN is undefined (left out) and +inf failed."""
    known = values_ms[~np.isnan(values_ms)]
    step = -(-len(known) // CDF_SAMPLES_MAX)
    thinned = np.sort(known[::step] if step > 1 else known)
    num_finite = int(np.searchsorted(thinned, np.inf))
    total = len(thinned)
    if num_finite == 0:
        return Cdf(ms=[], ratio=[], num=len(known), failed_ratio=1.0 if total else 0.0)
    # Even steps, and the upper tail again as densely as the whole: that is where the reader looks.
    last = num_finite - 1
    even = np.linspace(0, last, CDF_POINTS_MAX // 2)
    tail = last - np.geomspace(1, max(num_finite, 1), CDF_POINTS_MAX // 2) + 1
    ranks = np.unique(np.concatenate((even, tail)).round().astype(np.int64).clip(0, last))
    return Cdf(
        ms=thinned[ranks].tolist(),
        ratio=((ranks + 1) / total).tolist(),
        num=len(known),
        failed_ratio=(total - num_finite) / total,
    )


def intervals(start_s: float, end_s: float) -> Floats:
    """Edges of equal intervals: whole tenths of seconds or rounder, at most INTERVALS_MAX of them."""
    span_s = max(end_s - start_s, 1e-3)
    width_s = next((w for w in _WIDTHS_S if span_s / w <= INTERVALS_MAX), span_s / INTERVALS_MAX)
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


def per_second(t_s: Floats, edges_s: Floats, weights: Floats | None = None) -> Floats:
    """Events (or their weights) a second in each interval."""
    return np.histogram(t_s, edges_s, weights=weights)[0] / np.diff(edges_s)


def outcome_counts(t_s: Floats, codes: Ints, labels: Sequence[str], edges_s: Floats) -> Mapping[str, list[int]]:
    """Requests of each outcome by interval; `codes` index `labels`."""
    return {
        label: np.histogram(t_s[codes == code], edges_s)[0].tolist()
        for code, label in enumerate(labels)
        if (codes == code).any()
    }


def chunk_instants(scheduled_ns: Ints, starts: Ints, gaps_ns: Ints) -> Ints:
    """Receipt of each chunk. Gaps of request i are `gaps_ns[starts[i]:starts[i + 1]]`; one start more than requests."""
    if not len(gaps_ns):
        return np.zeros(0, np.int64)
    running = np.concatenate((np.zeros(1, np.int64), np.cumsum(gaps_ns)))
    counts = np.diff(starts)
    return running[1:] + np.repeat(scheduled_ns - running[starts[:-1]], counts)


def thin(values: Floats, num_max: int) -> Floats:
    """At most `num_max` of them, evenly, the first and the last among them."""
    if len(values) <= num_max:
        return values
    return values[np.linspace(0, len(values) - 1, num_max).round().astype(np.int64)]


def _nearest_rank(ordered: Floats, ratio: float) -> Quantile:
    if not len(ordered):
        return None
    value = float(ordered[int(np.ceil(ratio * len(ordered))) - 1])
    return "inf" if np.isinf(value) else value
