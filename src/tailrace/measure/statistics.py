"""Order statistics and tests that the reports rest on. Pure: arrays in, numbers out; +inf is an ordinary value.

Ratios are 0 to 1 (0.99 is p99). Ranks "from the top" count the highest value as 1.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, ndtri

from tailrace.clock import random_stream

Floats = NDArray[np.float64]

MSER_BATCH = 5
"""Values a batch in MSER-5 (White, Cobb and Spratt 2000)."""
MSER_BATCHES_MIN = 10
"""Fewer batches than that say nothing about where a start-up ends."""
LOADGEN_ROUNDING = 8192
"""MLPerf rounds its fixed sample counts up to a multiple of this."""


def nearest_rank(sorted_values: Floats, ratio: float) -> float:
    """The value at rank ceil(ratio n) of ascending values. Raises ValueError without values."""
    if not len(sorted_values):
        raise ValueError("a percentile of no values is undefined")
    return float(sorted_values[_rank(len(sorted_values), ratio) - 1])


def nearest_rank_index(num: int, ratio: float) -> int:
    """Index into `num` ascending values: ceil(ratio num) - 1."""
    return _rank(num, ratio) - 1


def weighted_nearest_rank(values: Floats, weights: NDArray[np.generic], ratios: Sequence[float]) -> Floats:
    """Nearest rank as if each value stood there `weight` times, one result a ratio.

    `values` and `weights` have one entry a sample, in any order. Raises ValueError when no weight is above 0.
    """
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(np.asarray(weights, dtype=np.float64)[order])
    if not len(reached) or not reached[-1] > 0:
        raise ValueError("a percentile of no values is undefined")
    wanted = np.array([round(ratio * float(reached[-1]), 6) for ratio in ratios])
    index = np.searchsorted(reached, wanted, side="left")
    return np.asarray(values, dtype=np.float64)[order][np.minimum(index, len(reached) - 1)]


def early_stopping_t(num: int, ratio: float, confidence: float = 0.99) -> int | None:
    """The largest t >= 1 with P(Bin(num, 1 - ratio) <= t) <= 1 - confidence; None when `num` is too small for any.

    MLPerf LoadGen's early stopping with no tolerance: so many of `num` samples may lie over a limit, and the claim
    "the percentile is within the limit" still has the confidence.
    """
    allowed = _largest_below(num, ratio, 1 - confidence)
    return allowed if allowed is not None and allowed >= 1 else None


def early_stopping_bound(sorted_values: Floats, ratio: float, confidence: float = 0.99) -> float | None:
    """Upper bound of a percentile: the t-th highest of ascending values, t from `early_stopping_t`.

    Valid for independent samples; latencies of one run are not, so a claim over repeats rests on `measure.intervals`.
    """
    allowed = early_stopping_t(len(sorted_values), ratio, confidence)
    return None if allowed is None else float(sorted_values[len(sorted_values) - allowed])


def min_samples(ratio: float, confidence: float = 0.99) -> int:
    """Samples from which `early_stopping_bound` has a value (t = 1). Raises ValueError unless 0 < ratio < 1."""
    if not 0 < ratio < 1:
        raise ValueError(f"a percentile lies between 0 and 1, not at {ratio}")
    high = 2
    while early_stopping_t(high, ratio, confidence) is None:
        high *= 2
    low = high // 2
    while low < high:
        middle = (low + high) // 2
        if early_stopping_t(middle, ratio, confidence) is None:
            low = middle + 1
        else:
            high = middle
    return high


def fixed_samples(ratio: float, confidence: float = 0.99) -> int:
    """Samples MLPerf asks for where it does not stop early: z^2 p (1 - p) / m^2 with m = (1 - p) / 20, rounded up."""
    margin = (1 - ratio) / 20
    exact = float(ndtri((1 + confidence) / 2)) ** 2 * ratio * (1 - ratio) / margin**2
    return math.ceil(exact / LOADGEN_ROUNDING) * LOADGEN_ROUNDING


def rank_interval(num: int, ratio: float, confidence: float = 0.95) -> tuple[int | None, int | None]:
    """Ranks from the top, (upper end, lower end), between which the true percentile lies: independent samples only.

    Each tail holds at most half of what `confidence` leaves. None: no sample is extreme enough for that end.
    """
    tail = (1 - confidence) / 2
    over = _largest_below(num, ratio, tail)
    upper = None if over is None else over + 1
    # P(Bin >= b) is the chance that num - b or fewer lie on the other side, each with the chance `ratio`.
    under = _largest_below(num, 1 - ratio, tail)
    return upper, None if under is None else num - under


def mser5_truncation(series: Floats) -> float | None:
    """The part of a series (0 to 1) that MSER-5 would cut from its start; above 0.5 there is no steady part.

    The cut minimises the squared standard error of the mean of what remains, over means of batches of five; the last
    five batches are never cut, since so few agree by chance. None under 50 values. Raises ValueError on inf or NaN.
    """
    if not np.isfinite(series).all():
        raise ValueError("MSER-5 needs finite values")
    num_batches = len(series) // MSER_BATCH
    if num_batches < MSER_BATCHES_MIN:
        return None
    means = np.asarray(series[: num_batches * MSER_BATCH], dtype=np.float64).reshape(num_batches, MSER_BATCH).mean(1)
    means -= means.mean()
    left = np.arange(num_batches, 0, -1)
    sums = np.cumsum(means[::-1])[::-1]
    squares = np.cumsum((means * means)[::-1])[::-1]
    errors = (squares - sums * sums / left) / (left * left)
    cut = int(np.argmin(errors[: num_batches - MSER_BATCH + 1]))
    return cut / num_batches


def ks_distance(first: Floats, second: Floats) -> float:
    """Kolmogorov-Smirnov: the largest difference of two empirical distributions. Raises ValueError without values."""
    if not len(first) or not len(second):
        raise ValueError("a distribution of no values is undefined")
    points = np.concatenate([first, second])
    below = [np.searchsorted(np.sort(sample), points, side="right") / len(sample) for sample in (first, second)]
    return float(np.abs(below[0] - below[1]).max())


def isotonic_fit(x: Floats, y: Floats, weights: Floats | None = None, *, rising: bool = True) -> Floats:
    """The monotone values nearest to `y` in weighted squares (pool adjacent violators), in the order given.

    Equal `x` share one value. One entry a sample in all three; weights above 0.
    """
    xs, inverse = np.unique(np.asarray(x, dtype=np.float64), return_inverse=True)
    weight = np.ones(len(y)) if weights is None else np.asarray(weights, dtype=np.float64)
    total = np.bincount(inverse, weights=weight, minlength=len(xs)).astype(np.float64)
    mean = np.bincount(inverse, weights=weight * y, minlength=len(xs)) / total
    fitted = _pool(mean if rising else -mean, total)
    return (fitted if rising else -fitted)[inverse]


def monotone_p_value(
    successes: Sequence[int], trials: Sequence[int], *, rising: bool = False, num_draws: int = 2000, seed: int = 0
) -> float:
    """How likely data that violate monotonicity at least so strongly are, were the truth the isotonic fit.

    One entry a rate, rates ascending. The measure is the deviance between each rate's own share of successes and the
    isotonic fit of them; its distribution comes from draws out of the fit (parametric bootstrap), so few repeats give
    a large value: they prove nothing. 1.0 when nothing violates. Small (< 0.05): not monotone.
    """
    tried = np.asarray(trials, dtype=np.float64)
    seen = np.asarray(successes, dtype=np.float64)
    rates = np.arange(len(tried), dtype=np.float64)
    fitted = isotonic_fit(rates, seen / tried, tried, rising=rising)
    observed = _deviance(seen, tried, fitted)
    if observed <= 1e-12:
        return 1.0
    draws = random_stream(seed, "monotone").binomial(tried.astype(np.int64), fitted, size=(num_draws, len(tried)))
    as_strong = sum(
        _deviance(drawn, tried, isotonic_fit(rates, drawn / tried, tried, rising=rising)) >= observed - 1e-9
        for drawn in draws.astype(np.float64)
    )
    return (1 + as_strong) / (1 + num_draws)


def _rank(num: int, ratio: float) -> int:
    # 0.99 * 100 is 99.00000000000001 in binary: rounding keeps ratios of six decimals exact.
    return min(max(math.ceil(round(ratio * num, 6)), 1), num)


def _largest_below(num: int, ratio: float, tail: float) -> int | None:
    """The largest k with P(Bin(num, 1 - ratio) <= k) <= tail; None when even k = 0 has more."""
    over_ratio = 1 - ratio
    if num <= 0 or not 0 < over_ratio < 1 or float(bdtr(0, num, over_ratio)) > tail:
        return None
    low, high = 0, num  # low holds, high does not: P(Bin <= num) is 1
    while high - low > 1:
        middle = (low + high) // 2
        if float(bdtr(middle, num, over_ratio)) <= tail:
            low = middle
        else:
            high = middle
    return low


def _pool(means: Floats, weights: Floats) -> Floats:
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for mean, weight in zip(means.tolist(), weights.tolist(), strict=True):
        block = (mean, weight, 1)
        while blocks and blocks[-1][0] > block[0]:
            before = blocks.pop()
            total = before[1] + block[1]
            pooled = (before[0] * before[1] + block[0] * block[1]) / total
            block = (pooled, total, before[2] + block[2])
        blocks.append(block)
    return np.repeat([block[0] for block in blocks], [block[2] for block in blocks])


def _deviance(successes: Floats, trials: Floats, fitted: Floats) -> float:
    def log_likelihood(share: Floats) -> float:
        with np.errstate(divide="ignore", invalid="ignore"):
            good = np.where(successes > 0, successes * np.log(share), 0.0)
            bad = np.where(trials > successes, (trials - successes) * np.log1p(-share), 0.0)
        return float((good + bad).sum())

    return 2 * (log_likelihood(successes / trials) - log_likelihood(np.clip(fitted, 0.0, 1.0)))
