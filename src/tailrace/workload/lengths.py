"""Laws of lengths and times of a workload, each given by its quantile function.

A law turns one uniform number into one value, so that a draw costs one random number, and mean and clipping of a law
follow from the same function that draws (`mean`, `clipped_ratio`), not from a second formula.
"""

import bisect
import itertools
import math
from functools import cached_property
from statistics import NormalDist
from typing import ClassVar

import msgspec
import numpy as np

VALUE_MAX = 10_000_000.0
"""Tokens, seconds or turns: beyond this a figure is a slip of the pen."""
EMPIRICAL_VALUES_MAX = 100_000
_GRID_POINTS = 4096
_NORMAL = NormalDist()
_P95 = _NORMAL.inv_cdf(0.95)


class _Law(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="law"):
    """`min` and `max` clip what is drawn: a clipped draw takes the limit's value. Units are those of the key in the
    file: tokens, seconds, turns."""

    _floor: ClassVar[float] = 0.0

    min: float | None = None
    max: float | None = None

    def __post_init__(self) -> None:
        for name in ("min", "max"):
            limit = getattr(self, name)
            if limit is not None:
                _check(name, limit, 0.0)
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}")
        self.check()

    def check(self) -> None:
        """Raises ValueError when the law's own figures make no sense."""
        raise NotImplementedError

    def quantile(self, u: float) -> float:
        """Value below which the share `u`, in (0, 1), of unclipped draws lies."""
        raise NotImplementedError

    def clip(self, value: float) -> float:
        if self.min is not None and value < self.min:
            return self.min
        if self.max is not None and value > self.max:
            return self.max
        return value

    def sample(self, rng: np.random.Generator) -> float:
        """One draw, clipped."""
        return self.clip(self.quantile(_open_unit(rng.random())))

    def sample_count(self, rng: np.random.Generator, at_least: int = 1) -> int:
        """One draw as a whole number."""
        return max(at_least, round(self.sample(rng)))


class Constant(_Law, frozen=True, kw_only=True, tag="constant"):
    value: float

    def check(self) -> None:
        _check("value", self.value, 0.0)

    def quantile(self, u: float) -> float:  # noqa: ARG002
        return self.value


class Uniform(_Law, frozen=True, kw_only=True, tag="uniform"):
    """Any value of [low, high] alike."""

    low: float
    high: float

    def check(self) -> None:
        _check("low", self.low, 0.0)
        _check("high", self.high, self.low)

    def quantile(self, u: float) -> float:
        return self.low + u * (self.high - self.low)


class Lognormal(_Law, frozen=True, kw_only=True, tag="lognormal"):
    """By `median` and `p95`, or by `mean` and `sigma` (standard deviation of the logarithm). Of the unclipped law."""

    median: float | None = None
    p95: float | None = None
    mean: float | None = None
    sigma: float | None = None

    def check(self) -> None:
        if self.median is not None and self.p95 is not None and self.mean is None and self.sigma is None:
            _check("median", self.median, 0.0, open_at_least=True)
            _check("p95", self.p95, self.median)
        elif self.mean is not None and self.sigma is not None and self.median is None and self.p95 is None:
            _check("mean", self.mean, 0.0, open_at_least=True)
            _check("sigma", self.sigma, 0.0, most=5.0)
        else:
            raise ValueError("a lognormal law takes median and p95, or mean and sigma")

    def quantile(self, u: float) -> float:
        if self.median is not None:
            assert self.p95 is not None, "check() ran"
            sigma = math.log(self.p95 / self.median) / _P95
            return self.median * math.exp(sigma * _NORMAL.inv_cdf(u))
        assert self.mean is not None, "check() ran"
        assert self.sigma is not None, "check() ran"
        return self.mean * math.exp(self.sigma * _NORMAL.inv_cdf(u) - self.sigma**2 / 2)


class Exponential(_Law, frozen=True, kw_only=True, tag="exponential"):
    mean: float

    def check(self) -> None:
        _check("mean", self.mean, 0.0, open_at_least=True)

    def quantile(self, u: float) -> float:
        return -self.mean * math.log1p(-u)


class Empirical(_Law, frozen=True, kw_only=True, tag="empirical", dict=True):
    """Listed values, each as likely as its weight (all alike without weights)."""

    values: tuple[float, ...]
    weights: tuple[float, ...] = ()

    def check(self) -> None:
        if not 1 <= len(self.values) <= EMPIRICAL_VALUES_MAX:
            raise ValueError(f"values must be 1 to {EMPIRICAL_VALUES_MAX} numbers")
        if self.weights and len(self.weights) != len(self.values):
            raise ValueError(f"{len(self.values)} values and {len(self.weights)} weights: give one weight a value")
        for value in self.values:
            _check("values", value, 0.0)
        for weight in self.weights:
            _check("weights", weight, 0.0)
        if self.weights and sum(self.weights) <= 0:
            raise ValueError("all weights are zero")

    def quantile(self, u: float) -> float:
        if not self.weights:
            return self.values[min(int(u * len(self.values)), len(self.values) - 1)]
        cumulative = self._cumulative
        return self.values[min(bisect.bisect_right(cumulative, u * cumulative[-1]), self._last)]

    @cached_property
    def _cumulative(self) -> list[float]:
        return list(itertools.accumulate(self.weights))

    @cached_property
    def _last(self) -> int:
        """The last value with a weight: rounding must not reach beyond it."""
        return max(number for number, weight in enumerate(self.weights) if weight > 0)


Law = Constant | Uniform | Lognormal | Exponential | Empirical


def mean(law: Law, *, whole: bool = False, at_least: int = 1) -> float:
    """Mean of clipped draws, on a grid of 4,096 quantiles. `whole`: of `sample_count`."""
    drawn = [law.clip(law.quantile(u)) for u in _grid()]
    if whole:
        drawn = [float(max(at_least, round(value))) for value in drawn]
    return math.fsum(drawn) / len(drawn)


def clipped_ratio(law: Law) -> tuple[float, float]:
    """Shares of draws that `min` lifts and `max` cuts: a law that is clipped much is not the law it is called."""
    values = [law.quantile(u) for u in _grid()]
    low = sum(1 for value in values if law.min is not None and value < law.min)
    high = sum(1 for value in values if law.max is not None and value > law.max)
    return low / len(values), high / len(values)


def _grid() -> list[float]:
    return [(i + 0.5) / _GRID_POINTS for i in range(_GRID_POINTS)]


def _open_unit(u: float) -> float:
    """0 has no finite quantile; the generator's step is 2**-53."""
    return u or 2.0**-54


def _check(name: str, value: float, least: float, *, most: float = VALUE_MAX, open_at_least: bool = False) -> None:
    if not math.isfinite(value) or value > most or value < least or (open_at_least and value == least):
        raise ValueError(
            f"{name} {value:g} must be {'above' if open_at_least else 'at least'} {least:g}, at most {most:g}"
        )
