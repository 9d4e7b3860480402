"""Several runs of one thing become one result: intervals over the repeats, and whether the objective is met.

One run can only speak through its bound (early stopping); from two on the upper end of the interval decides, because
runs differ from each other by more than their own requests show.
"""

import math
from collections.abc import Sequence

import numpy as np

from tailrace.errors import InvalidRequest
from tailrace.measure.intervals import (
    NUM_RESAMPLES,
    RunSamples,
    block_length_ms,
    percentile_intervals,
    pooled_percentile,
    to_float,
)
from tailrace.measure.report import BenchResult, Interval, Report, Verdict
from tailrace.measure.run_info import RunInfo
from tailrace.measure.slo import REQUEST_METRICS, Limit, Slo, percentile_name
from tailrace.measure.statistics import Floats

RATIOS_ALWAYS = (0.5, 0.95, 0.99)
SAMPLES_A_REPORT_MAX = 20_000
"""As `report.Samples` promises; a file with more was not written by tailrace."""
WINDOW_S_MAX = 1e9


def combine(reports: Sequence[Report], *, seed: int = 0, num_resamples: int = NUM_RESAMPLES) -> BenchResult:
    """Raises InvalidRequest without reports, when one run is there twice, or when they are not repeats of one thing."""
    _refuse_other_runs(reports)
    slo = reports[0].info.slo
    intervals = _intervals(reports, slo, seed, num_resamples)
    forbidden = [
        reason for number, report in enumerate(reports, 1) for reason in _invalid(report, number, len(reports))
    ]
    unproven = [
        reason for number, report in enumerate(reports, 1) for reason in _unproven(report, number, len(reports))
    ]
    found = [_judge(limit, reports, intervals, bool(unproven)) for limit in slo.limits]
    return BenchResult(
        definitions=reports[0].info.definitions,
        reports=list(reports),
        intervals=intervals,
        passes=_together([passes for passes, _ in found], bool(forbidden), bool(unproven)),
        reasons=forbidden + unproven + ([reason for _, reason in found] or ["no SLO was given"]),
    )


def metric_ratios(metric: str, slo: Slo) -> list[float]:
    """The percentiles of a metric that get intervals: p50, p95, p99 and those of the SLO, ascending."""
    asked = {limit.percentile_ratio for limit in slo.limits if limit.metric == metric}
    return sorted(asked | set(RATIOS_ALWAYS))


def samples_of(reports: Sequence[Report], metric: str) -> list[RunSamples]:
    """Columns for `measure.intervals`; `metric` is one of REQUEST_METRICS. Raises InvalidRequest on broken columns."""
    return [
        RunSamples(
            scheduled_ms=_column(report, "scheduled_ms", metric),
            values=_column(report, metric, metric),
            window_ms=_window_ms(report),
        )
        for report in reports
    ]


def block_ms(reports: Sequence[Report]) -> float:
    """Length of a block for these runs: longer than the longest request that ended, in the shortest window."""
    longest = 0.0
    for report in reports:
        ended = _column(report, "e2e_ms", "e2e_ms")
        ended = ended[np.isfinite(ended)]
        longest = max(longest, float(ended.max()) if len(ended) else 0.0)
    return block_length_ms(longest, min(_window_ms(report) for report in reports))


def law_differences(first: RunInfo, second: RunInfo) -> list[str]:
    """All that forbids holding two runs against each other, in words; empty when nothing does."""
    pairs = [
        ("definitions", first.definitions, second.definitions),
        ("SLO", _slo_text(first.slo), _slo_text(second.slo)),
        ("API", first.api, second.api),
        ("arrivals", _arrivals(first), _arrivals(second)),
        ("clients", str(first.num_clients), str(second.num_clients)),
        ("ignore_eos", str(first.ignore_eos), str(second.ignore_eos)),
    ]
    found = [f"{what} ({one} against {other})" for what, one, other in pairs if one != other]
    if first.workload_sha256 != second.workload_sha256:
        found.insert(0, f"workload ({_workload(first)} against {_workload(second)})")
    return found


def invalid_reasons(report: Report) -> list[str]:
    """Why a run forbids every claim, the verdict named first; steadiness is judged apart from these."""
    return [
        f"invalid-{name}: {'; '.join(verdict.reasons) or 'no reason kept'}"
        for name, verdict in report.verdicts.items()
        if name != "steady" and verdict.state == "invalid"
    ]


def _refuse_other_runs(reports: Sequence[Report]) -> None:
    if not reports:
        raise InvalidRequest("there is no report to combine")
    first = reports[0].info
    for report in reports[1:]:
        found = law_differences(first, report.info)
        found += [
            f"{what} ({one} against {other})"
            for what, one, other in (("URL", first.url, report.info.url), ("model", first.model, report.info.model))
            if one != other
        ]
        if found:
            raise InvalidRequest(f"runs {first.run_id} and {report.info.run_id} are no repeats: {'; '.join(found)}")
    names = [report.info.run_id for report in reports]
    if len(set(names)) < len(names):
        raise InvalidRequest("one run is there twice; a repeat is a run of its own")


def _intervals(reports: Sequence[Report], slo: Slo, seed: int, num_resamples: int) -> dict[str, Interval]:
    length = block_ms(reports)
    found: dict[str, Interval] = {}
    for metric in REQUEST_METRICS:
        ratios = metric_ratios(metric, slo)
        intervals = percentile_intervals(
            samples_of(reports, metric), ratios, length, seed=seed, num_resamples=num_resamples
        )
        for ratio, interval in zip(ratios, intervals, strict=True):
            found[f"{metric}_{percentile_name(ratio)}"] = interval
    return found


def _judge(
    limit: Limit, reports: Sequence[Report], intervals: dict[str, Interval], is_unproven: bool
) -> tuple[bool | None, str]:
    interval = intervals.get(f"{limit.metric}_{percentile_name(limit.percentile_ratio)}")
    if len(reports) == 1 or interval is None:
        return _judge_by_runs(limit, reports)
    end = to_float(interval.high_ms)
    runs = f"over {len(reports)} runs"
    found = pooled_percentile(samples_of(reports, limit.metric), limit.percentile_ratio)
    if found > limit.limit_ms:
        why = "reaches the failures" if math.isinf(found) else f"is {found:.4g} ms, over the limit"
        return False, f"{limit}: the percentile {runs} {why}"
    if math.isnan(end):
        return None, f"{limit}: too few requests {runs} for an upper end of the interval"
    if end <= limit.limit_ms:
        return True, f"{limit}: the interval {runs} ends at {end:.4g} ms"
    why = "reaches the failures" if math.isinf(end) else f"ends at {end:.4g} ms"
    # A run that may carry no claim is no proof of the opposite either (as `build.limit_result` has it for one run).
    return None if is_unproven else False, f"{limit}: not shown, the interval {runs} {why}"


def _judge_by_runs(limit: Limit, reports: Sequence[Report]) -> tuple[bool | None, str]:
    """By each run's own bound: a single run, and metrics with many values a request, which have no interval."""
    results = [result for report in reports for result in report.limits if result.limit == str(limit)]
    if len(results) < len(reports):
        return None, f"{limit}: not judged in {len(reports) - len(results)} of {len(reports)} runs"
    passes = _together([result.passes for result in results], False, False)
    worst = next(result for result in results if result.passes is passes)
    beside = "" if len(reports) == 1 else f" (by the bound of each of {len(reports)} runs)"
    return passes, f"{limit}: {worst.reason or 'the bound is within the limit'}{beside}"


def _together(found: Sequence[bool | None], is_forbidden: bool, is_unproven: bool) -> bool | None:
    if is_forbidden or not found:
        return None
    if False in found:
        return False
    return None if None in found or is_unproven else True


def _invalid(report: Report, number: int, num_runs: int) -> list[str]:
    return [f"{_run(report, number, num_runs)}{reason}" for reason in invalid_reasons(report)]


def _unproven(report: Report, number: int, num_runs: int) -> list[str]:
    """What keeps a run from carrying a claim, though it may still show that a limit is broken."""
    found = []
    client = report.verdicts.get("client", Verdict(state="unknown"))
    if client.state == "unknown":
        found.append(_because("client not checked", client.reasons))
    if report.steadiness.verdict != "steady":
        found.append(_because(f"steadiness {report.steadiness.verdict}", report.steadiness.reasons))
    return [f"{_run(report, number, num_runs)}{reason}" for reason in found]


def _because(what: str, reasons: Sequence[str]) -> str:
    return f"{what}: {'; '.join(reasons)}" if reasons else what


def _run(report: Report, number: int, num_runs: int) -> str:
    """Which run a reason speaks of, where there are several."""
    return f"run {number} of {num_runs} ({report.info.run_id}): " if num_runs > 1 else ""


def _column(report: Report, name: str, metric: str) -> Floats:
    scheduled = report.samples.scheduled_ms
    column = getattr(report.samples, name)
    if not len(column) == len(scheduled) <= SAMPLES_A_REPORT_MAX:
        raise InvalidRequest(
            f"run {report.info.run_id}: its samples of {metric} are {len(column)} for {len(scheduled)} requests,"
            f" of at most {SAMPLES_A_REPORT_MAX}; make the report again from its rows"
        )
    return np.array([to_float(value) for value in column], dtype=np.float64)


def _window_ms(report: Report) -> float:
    if not 0 < report.window_s <= WINDOW_S_MAX:
        raise InvalidRequest(f"run {report.info.run_id}: its window of {report.window_s:g} s has no sensible length")
    return report.window_s * 1000


def _workload(info: RunInfo) -> str:
    return f"{info.workload} {info.workload_sha256[:12]}"


def _slo_text(slo: Slo) -> str:
    return ", ".join(sorted(str(limit) for limit in slo.limits)) or "none"


def _arrivals(info: RunInfo) -> str:
    """`poisson:4` and `poisson:4.0` are one law."""
    law, _, rate = info.arrivals.partition(":")
    try:
        return f"{law}:{float(rate)!r}"
    except ValueError:
        return info.arrivals
