"""Was the window a steady state? Only then does a percentile describe the service, and not the length of the run.

Evidence: requests in flight over time, TTFT over time, arrivals (completions in a closed loop) over time, and MSER-5.
The limits below are set so that a queue at 70 % of its capacity is called steady nearly always; the error rates are
measured in tests/unit/measure/test_steadiness.py.
"""

from itertools import pairwise
from typing import Literal

import msgspec
import numpy as np

from tailrace.measure.report import Steadiness
from tailrace.measure.statistics import mser5_truncation
from tailrace.measure.table import Floats

REQUESTS_MIN = 100
"""Fewer in the window say nothing."""
UNSERVED_RATIO_MAX = 0.03
"""Growth of requests in flight / arrivals in the window: the part of the load that the service does not carry."""
HALF_MIN = 10
"""Values of TTFT in each half of the window."""
BATCHES_MIN = 5
"""Batches with a value, for a slope and its error."""
TTFT_RATIO = 1.25
RESIDENCE_RATIO = 1.5
"""Second half / first half, from which on latency rises with the requests in flight: a queue grows before the first
token, or (an engine that admits everything) all answers become slow."""
TREND_T_STRONG = 3.5
"""t of a slope over batches, corrected for correlation of neighbours: about once in 1,000 steady runs."""
TREND_T_WITH_MSER = 2.5
"""Enough where MSER-5 finds no steady part either. MSER-5 alone is no evidence: it cuts half of many steady series."""
CHANGE_RATIO = 1.3
"""A trend matters when the halves of the window differ by this factor."""
RATE_CHANGE_RATIO = 1.2
START_RATIO = 3.0
"""The first tenth of the window is a start-up when its median TTFT exceeds that of every other tenth by this factor."""
START_REQUESTS_MIN = 200


_Name = Literal["steady", "drifting", "saturated", "unknown"]


class _Trend(msgspec.Struct, frozen=True):
    """Of a curve over the window, seen as batches of equal time."""

    growth: float
    """From the start to the end, along the line of least squares."""
    t: float
    ratio: float
    """Second half / first half."""

    def is_change(self, t_min: float, ratio: float) -> bool:
        return abs(self.t) > t_min and not 1 / ratio < self.ratio < ratio


def judge_steadiness(
    scheduled_s: Floats, ended_s: Floats, ttft_ms: Floats, window_s: float, *, is_closed: bool
) -> Steadiness:
    """`scheduled_s`, `ended_s`, `ttft_ms`: [n], of all requests, those outside the window too, in any order.

    Times count from the start of the window. A TTFT that is not finite is left out of the judgement of TTFT.
    """
    order = np.lexsort((ttft_ms, ended_s, scheduled_s))
    scheduled_s, ended_s, ttft_ms = scheduled_s[order], ended_s[order], ttft_ms[order]
    inside = (scheduled_s >= 0) & (scheduled_s < window_s)
    num = int(inside.sum())
    timed = inside & np.isfinite(ttft_ms)
    if num < REQUESTS_MIN or window_s <= 0:
        reason = f"{num} requests in the window; it takes {REQUESTS_MIN} to see a trend: run longer"
        return _verdict("unknown", [reason])
    batches = 20 if num >= 200 else 10
    means = in_flight_means(scheduled_s, ended_s, window_s, batches)
    in_flight = _trend(means)
    ttft = _median_trend(scheduled_s[timed], ttft_ms[timed], window_s, batches)
    residence = _median_trend(scheduled_s[inside], (ended_s - scheduled_s)[inside], window_s, batches)
    cut = mser5_truncation(ttft_ms[timed])
    t_min = TREND_T_WITH_MSER if cut is not None and cut > 0.5 else TREND_T_STRONG
    if is_closed:
        changes = _change("completions a second", _counts(ended_s, window_s, batches), t_min, RATE_CHANGE_RATIO)
    else:
        changes = _change("arrivals a second", _counts(scheduled_s, window_s, batches), t_min, RATE_CHANGE_RATIO)
        changes += _change("requests in flight", in_flight, t_min, CHANGE_RATIO)
    changes += _change("median TTFT", ttft, t_min, CHANGE_RATIO)
    changes += _start_up(scheduled_s[timed], ttft_ms[timed], window_s)
    verdict: _Name = "drifting" if changes else "steady"
    reasons = changes
    if not is_closed:
        slower = _rises(ttft, TTFT_RATIO) or _rises(residence, RESIDENCE_RATIO)
        verdict, reasons = _overload(verdict, reasons, means, in_flight.growth, num, slower)
    if verdict == "drifting":
        reasons = [*reasons, "let it warm up for longer (--warmup), or run longer"]
    return _verdict(verdict, reasons, in_flight.growth / window_s, None if ttft is None else ttft.ratio, cut)


def in_flight_means(scheduled_s: Floats, ended_s: Floats, window_s: float, batches: int) -> Floats:
    """[batches] time average of requests in flight (scheduled, not ended) over equal parts of the window."""
    edges = np.linspace(0.0, window_s, batches + 1)
    spent = ended_s - scheduled_s
    reached = np.array([np.clip(edge - scheduled_s, 0.0, spent).sum() for edge in edges])
    return np.diff(reached) * batches / window_s


def _overload(
    verdict: _Name, reasons: list[str], in_flight: Floats, growth: float, num: int, slower: bool
) -> tuple[_Name, list[str]]:
    """Requests in flight of a steady queue wander too, by about their square root: that proves nothing."""
    unserved = UNSERVED_RATIO_MAX * num
    wander = 4 + 1.5 * float(np.sqrt(in_flight[: len(in_flight) // 2].mean()))
    if not (slower and growth > max(unserved, wander)):
        return verdict, reasons
    words = f"requests in flight grew by {growth:.0f} while {num} arrived, and latency grew with them"
    if growth > unserved + wander:
        return "saturated", [f"{words}: the service does not carry this rate"]
    if verdict == "drifting":
        return verdict, reasons
    return "unknown", [f"{words}: too few requests to tell overload from chance; run longer"]


def _trend(curve: Floats, variance_min: float = 0.0) -> _Trend:
    """Least squares over [batches]; the standard error allows for neighbours that resemble each other (AR(1))."""
    num = len(curve)
    x = (np.arange(num) + 0.5) / num - 0.5
    squares = float((x * x).sum())
    growth = float((x * (curve - curve.mean())).sum()) / squares
    rest = curve - curve.mean() - growth * x
    total = float((rest * rest).sum())
    likeness = float((rest[1:] * rest[:-1]).sum()) / total if total > 0 else 0.0
    # Residuals of a line understate their correlation by about this much.
    likeness = min(max(likeness + (1 + 4 * max(likeness, 0.0)) / num, 0.0), 0.9)
    variance = max(total / (num - 2), variance_min) * (1 + likeness) / (1 - likeness)
    error = float(np.sqrt(variance / squares))
    first, second = float(curve[: num // 2].mean()), float(curve[num // 2 :].mean())
    return _Trend(growth, growth / error if error > 0 else 0.0, second / first if first > 0 else 1.0)


def _counts(t_s: Floats, window_s: float, batches: int) -> _Trend:
    """Events a batch. Their variance is taken as at least what independent events have."""
    counts = np.histogram(t_s, np.linspace(0.0, window_s, batches + 1))[0].astype(np.float64)
    return _trend(counts, variance_min=float(counts.mean()))


def _median_trend(t_s: Floats, values: Floats, window_s: float, batches: int) -> _Trend | None:
    """Of the median in each batch; None when too few batches, or a half of the window, have values. `t_s` ascends."""
    if min((t_s < window_s / 2).sum(), (t_s >= window_s / 2).sum()) < HALF_MIN:
        return None
    medians = _medians(t_s, values, window_s, batches)
    medians = medians[~np.isnan(medians)]
    if len(medians) < BATCHES_MIN:
        return None
    middle = np.searchsorted(t_s, window_s / 2)
    first, second = float(np.median(values[:middle])), float(np.median(values[middle:]))
    trend = _trend(medians)
    return _Trend(trend.growth, trend.t, second / first if first > 0 else 1.0)


def _medians(t_s: Floats, values: Floats, window_s: float, batches: int) -> Floats:
    """[batches], NaN where a batch has no value."""
    bounds = np.searchsorted(t_s, np.linspace(0.0, window_s, batches + 1))
    parts = [values[a:b] for a, b in pairwise(bounds)]
    return np.array([np.median(part) if len(part) else np.nan for part in parts])


def _start_up(t_s: Floats, ttft_ms: Floats, window_s: float) -> list[str]:
    if len(t_s) < START_REQUESTS_MIN:
        return []
    tenths = _medians(t_s, ttft_ms, window_s, 10)
    others = tenths[1:][~np.isnan(tenths[1:])]
    if not (len(others) and tenths[0] > START_RATIO * others.max()):
        return []
    return [
        f"the first tenth of the window has a median TTFT of {tenths[0]:.0f} ms, no other tenth more than "
        f"{others.max():.0f} ms"
    ]


def _rises(trend: _Trend | None, ratio: float) -> bool:
    return trend is not None and trend.ratio > ratio


def _change(what: str, trend: _Trend | None, t_min: float, ratio: float) -> list[str]:
    if trend is None or not trend.is_change(t_min, ratio):
        return []
    return [f"{what}: the second half of the window has {trend.ratio:.2f} times the first half's (t = {trend.t:.1f})"]


def _verdict(
    verdict: _Name, reasons: list[str], slope: float | None = None, ratio: float | None = None, cut: float | None = None
) -> Steadiness:
    return Steadiness(
        verdict=verdict,
        in_flight_slope_per_s=slope,
        ttft_trend_ratio=ratio,
        truncation_ratio=cut,
        reasons=reasons,
    )
