"""How far a percentile over repeats can be trusted: a hierarchical bootstrap over runs, then over blocks of time.

Requests of one run are not independent: one long prefill delays every stream beside it, a queue delays all behind it.
So whole stretches of a run are drawn (circular blocks longer than the longest request), and before that whole runs,
which carry what differs from start to start. A resample is a set of ranges in time, never a copy of its samples: its
percentile is the k-th smallest of them, and +inf (failures) needs no special case. The same seed gives the same
interval.

In: for each run the instants its requests were scheduled and one value each (NaN: undefined, left out; inf: failed).
"""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.clock import random_stream
from tailrace.measure.distribution import to_quantile
from tailrace.measure.report import Interval
from tailrace.measure.statistics import Floats, nearest_rank, rank_interval
from tailrace.measure.wavelet import WaveletMatrix

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95
BLOCKS_WANTED = 25
"""Blocks a run when requests are short: enough of them to resample, each long enough to hold a burst."""
BLOCKS_MIN = 2
"""A block is at most half a run, however long its requests; `Interval.num_blocks` tells the reader."""
BLOCKS_MAX = 1000
SAMPLES_MAX = 100_000
"""Above so many over all runs, every k-th is used: time and memory stay bounded, and the interval grows a little."""
_CHUNK_RANGES = 1_000_000

SignedQuantile = float | Literal["inf", "-inf"] | None


class RunSamples(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One metric of one run: two arrays of one entry a request, and how long the window was."""

    scheduled_ms: Floats
    values: Floats
    window_ms: float


class DifferenceInterval(msgspec.Struct, frozen=True, kw_only=True):
    """Of B - A and of B / A. None: too few samples to say, or without meaning (inf - inf)."""

    low: SignedQuantile
    high: SignedQuantile
    ratio_low: SignedQuantile
    ratio_high: SignedQuantile
    confidence_ratio: float


def to_signed_quantile(value: float) -> SignedQuantile:
    return "-inf" if value == -math.inf else to_quantile(value)


def to_float(value: SignedQuantile) -> float:
    """Inverse of `to_signed_quantile`: NaN for None."""
    return math.nan if value is None else float(value)


def block_length_ms(longest_request_ms: float, window_ms: float) -> float:
    """Longer than the longest request, at least 1/25 and at most 1/2 of the window."""
    wanted = max(longest_request_ms * 1.001, window_ms / BLOCKS_WANTED)
    return min(wanted, window_ms / BLOCKS_MIN)


def pooled_percentile(runs: Sequence[RunSamples], ratio: float) -> float:
    """Nearest rank over the requests of all runs; NaN without any."""
    values = np.concatenate([_defined(run)[1] for run in runs]) if runs else np.empty(0)
    return nearest_rank(np.sort(values), ratio) if len(values) else math.nan


def percentile_intervals(
    runs: Sequence[RunSamples],
    ratios: Sequence[float],
    block_ms: float,
    *,
    seed: int = 0,
    num_resamples: int = NUM_RESAMPLES,
    confidence: float = CONFIDENCE,
) -> list[Interval]:
    """One interval a ratio. An end is None when too few samples lie beyond it for even independent ones to show it."""
    drawn = percentile_draws(runs, ratios, block_ms, seed=seed, num_resamples=num_resamples)
    num_samples = sum(len(_defined(run)[1]) for run in runs)
    num_blocks = sum(_num_blocks(run.window_ms, block_ms) for run in runs)
    intervals = []
    for column, ratio in enumerate(ratios):
        low, high = _ends(drawn[:, column], confidence)
        upper_rank, lower_rank = rank_interval(num_samples, ratio, confidence)
        intervals.append(
            Interval(
                low_ms=None if lower_rank is None else to_quantile(low),
                high_ms=None if upper_rank is None else to_quantile(high),
                confidence_ratio=confidence,
                num_runs=len(runs),
                num_blocks=num_blocks,
            )
        )
    return intervals


def difference_intervals(
    first: Sequence[RunSamples],
    second: Sequence[RunSamples],
    ratios: Sequence[float],
    block_ms: float,
    *,
    seed: int = 0,
    num_resamples: int = NUM_RESAMPLES,
    confidence: float = CONFIDENCE,
) -> list[DifferenceInterval]:
    """Intervals of second - first and second / first, one a ratio; the two sides are resampled independently.

    An end that few samples cannot show is None: where either side has too few beyond the percentile for its own end.
    """
    # Two streams: the same draws on both sides would pair run 1 with run 1, which are not a pair.
    drawn = [
        percentile_draws(runs, ratios, block_ms, seed=seed, num_resamples=num_resamples, name=name)
        for runs, name in ((first, "intervals-first"), (second, "intervals-second"))
    ]
    nums = [sum(len(_defined(run)[1]) for run in runs) for runs in (first, second)]
    found = []
    for column, ratio in enumerate(ratios):
        known = all(None not in rank_interval(num, ratio, confidence) for num in nums)
        found.append(
            _difference(drawn[0][:, column], drawn[1][:, column], confidence) if known else _unknown(confidence)
        )
    return found


def percentile_draws(
    runs: Sequence[RunSamples],
    ratios: Sequence[float],
    block_ms: float,
    *,
    seed: int = 0,
    num_resamples: int = NUM_RESAMPLES,
    name: str = "intervals",
) -> Floats:
    """The percentiles of resamples, [num_resamples, len(ratios)]; NaN for a resample without a sample."""
    if not block_ms > 0:
        raise ValueError("a block has a length")
    runs = _thinned(runs)
    columns = [_defined(run) for run in runs]
    values = np.concatenate([value for _, value in columns]) if columns else np.empty(0)
    drawn = np.full((num_resamples, len(ratios)), math.nan)
    if not len(values):
        return drawn
    random = random_stream(seed, name)
    ordered = np.sort(values)
    circles = WaveletMatrix(_unrolled_ranks([value for _, value in columns]))
    num_blocks = sum(_num_blocks(run.window_ms, block_ms) for run in runs)
    rows = max(1, _CHUNK_RANGES // num_blocks)
    for start in range(0, num_resamples, rows):
        stop = min(start + rows, num_resamples)
        resample, low, high = _draw_ranges(runs, columns, block_ms, stop - start, random)
        total = np.bincount(resample, high - low, stop - start)
        for column, ratio in enumerate(ratios):
            wanted = np.maximum(np.ceil(np.round(ratio * total, 6)), 1).astype(np.int64)
            ranks = circles.smallest(resample, low, high, wanted - 1)
            drawn[start:stop, column] = np.where(total > 0, ordered[np.minimum(ranks, len(ordered) - 1)], math.nan)
    return drawn


def _unrolled_ranks(columns: Sequence[Floats]) -> NDArray[np.int64]:
    """Rank of each sample among those of all runs, each run twice over: a block that crosses its end is one range."""
    order = np.argsort(np.concatenate(columns), kind="stable")
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    runs = np.split(ranks, np.cumsum([len(column) for column in columns])[:-1])
    return np.concatenate([part for run in runs for part in (run, run)])


def _draw_ranges(
    runs: Sequence[RunSamples],
    columns: Sequence[tuple[Floats, Floats]],
    block_ms: float,
    num_resamples: int,
    random: np.random.Generator,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """All blocks of all resamples, one entry each: its resample, and from where to where in `_unrolled_ranks`.

    A block is [start, start + block) of a circle of the window's length.
    """
    chosen = random.integers(0, len(runs), size=(num_resamples, len(runs)))
    parts, offset = [], 0
    for index, (run, (times, _)) in enumerate(zip(runs, columns, strict=True)):
        resample = np.nonzero(chosen == index)[0]  # a run drawn twice into a resample gets blocks of its own each time
        num_blocks = _num_blocks(run.window_ms, block_ms)
        starts = random.uniform(0, run.window_ms, size=(len(resample), num_blocks)).ravel()
        unrolled = np.concatenate([times, times + run.window_ms])
        low = np.searchsorted(unrolled, starts) + offset
        high = np.searchsorted(unrolled, starts + min(block_ms, run.window_ms)) + offset
        parts.append((np.repeat(resample, num_blocks), low, high))
        offset += len(unrolled)
    resample, low, high = (np.concatenate(each) for each in zip(*parts, strict=True))
    return resample, low, high


def _defined(run: RunSamples) -> tuple[Floats, Floats]:
    """Instants from the first, in [0, window), ascending, and the values at them, undefined ones left out."""
    values = np.asarray(run.values, dtype=np.float64)
    times = np.asarray(run.scheduled_ms, dtype=np.float64)
    known = ~np.isnan(values)
    times, values = times[known], values[known]
    if not len(times):
        return times, values
    times = np.mod(times - times.min(), run.window_ms)
    order = np.argsort(times, kind="stable")
    return times[order], values[order]


def _thinned(runs: Sequence[RunSamples]) -> list[RunSamples]:
    step = -(-sum(len(run.values) for run in runs) // SAMPLES_MAX)
    if step <= 1:
        return list(runs)
    return [
        RunSamples(scheduled_ms=run.scheduled_ms[::step], values=run.values[::step], window_ms=run.window_ms)
        for run in runs
    ]


def _num_blocks(window_ms: float, block_ms: float) -> int:
    return min(max(math.ceil(round(window_ms / block_ms, 6)), 1), BLOCKS_MAX)


def _ends(draws: Floats, confidence: float) -> tuple[float, float]:
    kept = np.sort(draws[~np.isnan(draws)])
    if not len(kept):
        return math.nan, math.nan
    tail = (1 - confidence) / 2
    return nearest_rank(kept, tail), nearest_rank(kept, 1 - tail)


def _difference(first: Floats, second: Floats, confidence: float) -> DifferenceInterval:
    with np.errstate(invalid="ignore", divide="ignore"):
        difference, ratio = second - first, second / first
    # inf against inf could be anything: it counts against each end.
    low, _ = _ends(np.where(np.isnan(difference), -math.inf, difference), confidence)
    _, high = _ends(np.where(np.isnan(difference), math.inf, difference), confidence)
    ratio_low, _ = _ends(np.where(np.isnan(ratio), 0.0, ratio), confidence)
    _, ratio_high = _ends(np.where(np.isnan(ratio), math.inf, ratio), confidence)
    return DifferenceInterval(
        low=to_signed_quantile(low),
        high=to_signed_quantile(high),
        ratio_low=to_signed_quantile(ratio_low),
        ratio_high=to_signed_quantile(ratio_high),
        confidence_ratio=confidence,
    )


def _unknown(confidence: float) -> DifferenceInterval:
    return DifferenceInterval(low=None, high=None, ratio_low=None, ratio_high=None, confidence_ratio=confidence)
