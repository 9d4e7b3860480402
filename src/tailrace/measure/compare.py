"""Two results held against each other: what changed from A to B, and whether the data can tell.

Only runs of one workload under one law and one objective are comparable; anything else is refused by name. Percentiles
carry bootstrap intervals of the difference, figures of which each run has one (rates, goodput) Welch's t interval
over runs. An interval that contains "no difference" is no proof that there is none.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np
from scipy.special import stdtrit

from tailrace.errors import InvalidRequest
from tailrace.measure.combine import block_ms, invalid_reasons, law_differences, metric_ratios, samples_of
from tailrace.measure.intervals import (
    CONFIDENCE,
    NUM_RESAMPLES,
    DifferenceInterval,
    RunSamples,
    SignedQuantile,
    difference_intervals,
    pooled_percentile,
    to_float,
    to_signed_quantile,
)
from tailrace.measure.record import DEFINITIONS
from tailrace.measure.report import BenchResult, Quantile, Report
from tailrace.measure.slo import LIMITS_MAX, REQUEST_METRICS, percentile_name

Finding = Literal["lower", "higher", "none shown", "cannot tell"]
"""Of B against A. `none shown`: the interval contains no difference."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of A and B. Percentiles are ms over the requests of all runs; the others are means over runs."""

    name: str
    a: Quantile
    b: Quantile
    difference: SignedQuantile
    """B - A."""
    difference_low: SignedQuantile
    difference_high: SignedQuantile
    ratio: SignedQuantile
    """B / A."""
    ratio_low: SignedQuantile
    ratio_high: SignedQuantile
    finding: Finding
    num_a: int
    """Requests with a value (percentiles) or runs (the others)."""
    num_b: int


class Side(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    model: str
    num_runs: int
    num_requests: int
    outcomes: dict[str, int]
    passes: bool | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    definitions: str
    workload: str
    arrivals: str
    slo: str
    confidence_ratio: float
    a: Side
    b: Side
    percentiles: list[Change]
    figures: list[Change]
    """Per second, and the share of failed requests."""
    notes: list[str]
    """What the reader must know: few runs, unsteady runs, what else differs."""


def compare(
    a: BenchResult,
    b: BenchResult,
    *,
    allow_invalid: bool = False,
    seed: int = 0,
    num_resamples: int = NUM_RESAMPLES,
) -> Comparison:
    """Raises InvalidRequest that names all that differs, or each invalid run unless those are allowed."""
    _refuse(a, b, allow_invalid)
    info = a.reports[0].info
    length = max(block_ms(a.reports), block_ms(b.reports))
    percentiles = [
        change
        for metric in REQUEST_METRICS
        for change in _percentiles(a.reports, b.reports, metric, length, seed, num_resamples)
    ]
    return Comparison(
        definitions=info.definitions,
        workload=info.workload,
        arrivals=info.arrivals,
        slo=str(info.slo),
        confidence_ratio=CONFIDENCE,
        a=_side(a),
        b=_side(b),
        percentiles=percentiles,
        figures=_figures(a.reports, b.reports),
        notes=_notes(a, b, percentiles),
    )


def _refuse(a: BenchResult, b: BenchResult, allow_invalid: bool) -> None:
    for name, result in (("A", a), ("B", b)):
        if not result.reports:
            raise InvalidRequest(f"{name} holds no run")
        for report in result.reports:
            if report.info.definitions != DEFINITIONS:
                raise InvalidRequest(
                    f"{name} was made with the definitions {report.info.definitions}, these are {DEFINITIONS};"
                    " make its report again from its rows"
                )
            if len(report.info.slo.limits) > LIMITS_MAX:
                raise InvalidRequest(f"{name} was judged by more than {LIMITS_MAX} limits")
    first = a.reports[0].info
    found = [
        f"{where}{difference}"
        for where, result in (("within A: ", a), ("", b))
        for report in result.reports
        for difference in law_differences(first, report.info)
    ]
    if found:
        raise InvalidRequest(f"these are not comparable; they differ in: {'; '.join(dict.fromkeys(found))}")
    invalid = _invalid(a, b)
    if invalid and not allow_invalid:
        raise InvalidRequest(
            f"an invalid run proves nothing: {'; '.join(invalid)}; --allow-invalid compares them anyway"
        )


def _invalid(a: BenchResult, b: BenchResult) -> list[str]:
    return [
        f"{name} run {number} {'; '.join(invalid_reasons(report)) or 'is invalid'}"
        for name, result in (("A", a), ("B", b))
        for number, report in enumerate(result.reports, 1)
        if invalid_reasons(report) or not report.is_valid
    ]


def _percentiles(
    a: Sequence[Report], b: Sequence[Report], metric: str, length: float, seed: int, num_resamples: int
) -> list[Change]:
    sides = samples_of(a, metric), samples_of(b, metric)
    ratios = metric_ratios(metric, a[0].info.slo)
    intervals = difference_intervals(*sides, ratios, length, seed=seed, num_resamples=num_resamples)
    nums = [sum(_num_values(run) for run in side) for side in sides]
    return [
        _change(
            f"{metric}_{percentile_name(ratio)}",
            pooled_percentile(sides[0], ratio),
            pooled_percentile(sides[1], ratio),
            interval,
            nums,
        )
        for ratio, interval in zip(ratios, intervals, strict=True)
    ]


def _figures(a: Sequence[Report], b: Sequence[Report]) -> list[Change]:
    return [_figure(name, [read(run) for run in a], [read(run) for run in b]) for name, read in _FIGURES.items()]


def _failed_ratio(report: Report) -> float | None:
    failed = report.num_failed
    return None if failed is None or report.num_requests <= 0 else failed / report.num_requests


_FIGURES: dict[str, Callable[[Report], float | None]] = {
    "issued_per_s": lambda report: report.rates.issued_per_s,
    "completed_per_s": lambda report: report.rates.completed_per_s,
    "output_tokens_per_s": lambda report: report.rates.output_tokens_per_s,
    "prompt_tokens_per_s": lambda report: report.rates.prompt_tokens_per_s,
    "goodput_per_s": lambda report: report.goodput.per_s if report.goodput else None,
    "attainment_ratio": lambda report: report.goodput.attainment_ratio if report.goodput else None,
    "failed_ratio": _failed_ratio,
}


def _figure(name: str, a: Sequence[float | None], b: Sequence[float | None]) -> Change:
    first, second = (np.array([value for value in side if value is not None]) for side in (a, b))
    means = [float(side.mean()) if len(side) else math.nan for side in (first, second)]
    half = _welch_half_width(first, second)
    difference = means[1] - means[0]
    interval = DifferenceInterval(
        low=to_signed_quantile(difference - half),
        high=to_signed_quantile(difference + half),
        # The ratio of two means has no such simple interval; its ends are those of the difference over A's mean.
        ratio_low=to_signed_quantile(1 + (difference - half) / means[0]) if means[0] else None,
        ratio_high=to_signed_quantile(1 + (difference + half) / means[0]) if means[0] else None,
        confidence_ratio=CONFIDENCE,
    )
    return _change(name, means[0], means[1], interval, [len(first), len(second)])


def _welch_half_width(first: np.ndarray, second: np.ndarray) -> float:
    """Half of the t interval of a difference of means; NaN when a side has one run, which has no spread."""
    if min(len(first), len(second)) < 2:
        return math.nan
    parts = [float(side.var(ddof=1)) / len(side) for side in (first, second)]
    if not sum(parts):
        return 0.0
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(side) - 1) for part, side in zip(parts, (first, second), strict=True)
    )
    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * math.sqrt(sum(parts))


def _change(name: str, a: float, b: float, interval: DifferenceInterval, nums: Sequence[int]) -> Change:
    both_failed = math.isinf(a) and math.isinf(b)
    return Change(
        name=name,
        a=_unsigned(a),
        b=_unsigned(b),
        difference=None if both_failed else to_signed_quantile(b - a),
        difference_low=interval.low,
        difference_high=interval.high,
        ratio=None if both_failed or not a else to_signed_quantile(b / a),
        ratio_low=interval.ratio_low,
        ratio_high=interval.ratio_high,
        finding=_finding(to_float(interval.low), to_float(interval.high)),
        num_a=nums[0],
        num_b=nums[1],
    )


def _finding(low: float, high: float) -> Finding:
    if math.isnan(low) or math.isnan(high) or (math.isinf(low) and math.isinf(high) and low < high):
        return "cannot tell"
    if low > 0:
        return "higher"
    return "lower" if high < 0 else "none shown"


def _notes(a: BenchResult, b: BenchResult, percentiles: Sequence[Change]) -> list[str]:
    notes = [f"{reason}: nothing here is a claim" for reason in _invalid(a, b)]
    for name, result in (("A", a), ("B", b)):
        if len(result.reports) < 2:
            notes.append(f"{name} is one run: how runs differ from start to start is in no interval; repeat it")
        elif len(result.reports) < 5:
            notes.append(f"{name} has {len(result.reports)} runs: below five the intervals are too narrow")
        notes += [
            f"{name} run {number}: {_STEADINESS.get(report.steadiness.verdict, report.steadiness.verdict)}, so its "
            "percentiles may depend on its length"
            for number, report in enumerate(result.reports, 1)
            if report.steadiness.verdict != "steady"
        ]
    few = [change.name for change in percentiles if change.finding == "cannot tell"]
    if few:
        notes.append(f"too few samples, or too many failures, to tell: {', '.join(few)}")
    return notes + _conditions(a, b)


_STEADINESS = {"unknown": "steadiness unknown"}


def _conditions(a: BenchResult, b: BenchResult) -> list[str]:
    """What differs and does not forbid a comparison."""
    first, second = a.reports[0], b.reports[0]
    pairs = [
        ("model", first.info.model, second.info.model),
        ("window", f"{first.window_s:g} s", f"{second.window_s:g} s"),
        ("timeout", f"{first.info.timeout_ns / 1e9:g} s", f"{second.info.timeout_ns / 1e9:g} s"),
    ]
    found = [f"{what} ({one} against {other})" for what, one, other in pairs if one != other]
    if first.info.machine != second.info.machine:
        found.append("the client's host")
    return [f"they also differ in: {', '.join(found)}"] if found else []


def _side(result: BenchResult) -> Side:
    info = result.reports[0].info
    outcomes: dict[str, int] = {}
    for report in result.reports:
        for name, num in report.outcomes.items():
            outcomes[name] = outcomes.get(name, 0) + num
    return Side(
        url=info.url,
        model=info.model,
        num_runs=len(result.reports),
        num_requests=sum(report.num_requests for report in result.reports),
        outcomes=outcomes,
        passes=result.passes,
    )


def _num_values(run: RunSamples) -> int:
    return int((~np.isnan(run.values)).sum())


def _unsigned(value: float) -> Quantile:
    return None if math.isnan(value) else ("inf" if value == math.inf else value)
