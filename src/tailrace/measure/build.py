"""The report of one run, from its rows alone: the same rows in any order give the same report."""

import msgspec
import numpy as np

from tailrace.measure.checks import all_verdicts
from tailrace.measure.distribution import (
    chunk_gap_distribution,
    itl_distribution,
    ratios_for,
    request_distribution,
    to_quantile,
)
from tailrace.measure.metrics import tokens_are
from tailrace.measure.rates import cache_use, goodput, lengths, little, rates
from tailrace.measure.record import TokenCount
from tailrace.measure.report import Distribution, LimitResult, Little, Quantile, Report, Samples, Steadiness, Verdict
from tailrace.measure.run_info import RunInfo
from tailrace.measure.slo import Limit, percentile_name
from tailrace.measure.statistics import min_samples
from tailrace.measure.steadiness import judge_steadiness
from tailrace.measure.table import OUTCOMES, Floats, Ints, RecordTable
from tailrace.measure.window import Window, window_of

METRICS = (
    "ttft_ms",
    "ttft_service_ms",
    "send_lag_ms",
    "connect_ms",
    "ttfo_ms",
    "tpot_ms",
    "itl_ms",
    "chunk_gap_ms",
    "stall_ms",
    "e2e_ms",
    "tail_ms",
)
SAMPLES_MAX = 20_000
MESSAGES_SHOWN = 10
NEEDED_VERDICTS = ("client", "steady")
"""These must be `ok` for a claim that an SLO is met; of the others it is enough that none is `invalid`."""


def build_report(info: RunInfo, table: RecordTable) -> Report:
    """Metrics, rates and verdicts of the requests scheduled in the window of `info`."""
    window = window_of(info, table)
    metrics = {name: _distribution(window, name) for name in METRICS}
    found_little = little(window)
    steadiness = _steadiness(window, found_little)
    verdicts = all_verdicts(window, steadiness)
    num_scheduled, num_counted = int(window.scheduled.sum()), int(window.counted.sum())
    return Report(
        info=info,
        window_s=window.seconds,
        num_requests=num_counted,
        num_planned_cancels=num_scheduled - num_counted,
        num_outside_window=len(table) - num_scheduled,
        outcomes=_outcomes(window),
        messages=_messages(window),
        metrics=metrics,
        rates=rates(window),
        goodput=goodput(window),
        little=found_little,
        steadiness=steadiness,
        lengths=lengths(window),
        cache=cache_use(window),
        limits=[limit_result(limit, metrics[limit.metric], verdicts) for limit in info.slo.limits],
        verdicts=verdicts,
        is_valid=all(verdict.state != "invalid" for verdict in verdicts.values()),
        samples=_samples(window),
    )


def limit_result(limit: Limit, metric: Distribution, verdicts: dict[str, Verdict]) -> LimitResult:
    """Whether one limit holds: yes only when the bound is within it and the run may carry a claim.

    A percentile over the limit fails in a run that is drifting or saturated too: that is what overload looks like.
    """
    name = percentile_name(limit.percentile_ratio)
    value, bound = metric.percentiles[name], metric.bounds[name]
    passes, reason = _judge(limit, value, bound, metric.num, verdicts)
    return LimitResult(limit=str(limit), value_ms=value, bound_ms=bound, passes=passes, reason=reason)


def _judge(
    limit: Limit, value: Quantile, bound: Quantile, num: int, verdicts: dict[str, Verdict]
) -> tuple[bool | None, str]:
    faults = [name for name, verdict in verdicts.items() if verdict.state == "invalid" and name != "steady"]
    if faults:
        return None, f"the run is {', '.join(f'invalid-{name}' for name in faults)}: it says nothing about the service"
    if value is None:
        return None, "no request has a value"
    if _over(value, limit.limit_ms):
        return False, "the percentile is over the limit"
    unproven = [_UNPROVEN[name, state] for name in NEEDED_VERDICTS if (state := verdicts[name].state) != "ok"]
    missing = list(unproven)
    if bound is None:
        needed = min_samples(limit.percentile_ratio)
        missing.append(f"too few samples for a bound of this percentile: {needed:,} independent ones are needed")
    elif _over(bound, limit.limit_ms):
        missing.append(f"its 99 % bound over {num:,} samples is not")
    if missing:
        return None if unproven or bound is None else False, "; ".join(["the percentile is within the limit", *missing])
    unchecked = ", ".join(name for name, verdict in verdicts.items() if verdict.state == "unknown")
    return True, "the 99 % bound is within the limit" + (f" (not checked: {unchecked})" if unchecked else "")


_UNPROVEN = {
    ("client", "unknown"): "client not checked",
    ("steady", "unknown"): "steadiness unknown",
    ("steady", "invalid"): "no steady state",
}
"""By verdict and state."""


def _over(value: Quantile, limit_ms: float) -> bool:
    return value == "inf" or (isinstance(value, float) and value > limit_ms)


def _distribution(window: Window, name: str) -> Distribution:
    ratios = ratios_for(name, window.info.slo)
    if name == "itl_ms":
        return itl_distribution(window.table, window.counted, ratios)
    if name == "chunk_gap_ms":
        return chunk_gap_distribution(window.table, window.counted, ratios)
    values = window.metrics[name]
    estimated = 0
    if name == "tpot_ms":
        estimated = int((window.counted & np.isfinite(values) & tokens_are(window.table, TokenCount.LENGTH)).sum())
    return request_distribution(values[window.counted], ratios, estimated)


def _steadiness(window: Window, found_little: Little) -> Steadiness:
    """In an open loop, with Little's law as a witness: it sees a short overload that the trends take for chance."""
    ttft_ms = np.where(window.counted, window.metrics["ttft_ms"], np.nan)
    start_s, end_s = window.since_start_s("scheduled"), window.since_start_s("ended")
    found = judge_steadiness(start_s, end_s, ttft_ms, window.seconds, is_closed=window.is_closed)
    if found.verdict != "steady" or window.is_closed or found_little.agrees is not False:
        return found
    reason = (
        f"Little's law differs by {found_little.difference_ratio:.1%}: what lasts past the window and what comes from "
        "before it differ by more than chance explains; run longer"
    )
    return msgspec.structs.replace(found, verdict="unknown", reasons=[reason])


def _outcomes(window: Window) -> dict[str, int]:
    counts = np.bincount(window.table.outcome_codes[window.scheduled], minlength=len(OUTCOMES))
    return {str(outcome): int(num) for outcome, num in zip(OUTCOMES, counts, strict=True) if num}


def _messages(window: Window) -> dict[str, int]:
    codes = window.table.message_codes[window.counted & ~window.table.ok]
    counts = np.bincount(codes, minlength=len(window.table.messages)).tolist()
    said = [(text, num) for text, num in zip(window.table.messages, counts, strict=True) if text and num]
    return dict(sorted(said, key=lambda pair: (-pair[1], pair[0]))[:MESSAGES_SHOWN])


def _samples(window: Window) -> Samples:
    """In order of arrival; of very many an even selection, the first and the last among them."""
    columns = [window.metrics[name] for name in ("ttft_ms", "tpot_ms", "e2e_ms", "stall_ms")]
    scheduled_ms = window.since_start_s("scheduled") * 1e3
    rows: Ints = np.flatnonzero(window.counted)
    order = np.lexsort([column[rows] for column in (*columns[::-1], scheduled_ms)])
    rows = rows[order]
    if len(rows) > SAMPLES_MAX:
        rows = rows[np.linspace(0, len(rows) - 1, SAMPLES_MAX).round().astype(np.int64)]
    ttft, tpot, e2e, stall = (_quantiles(column[rows]) for column in columns)
    return Samples(
        scheduled_ms=scheduled_ms[rows].round(6).tolist(), ttft_ms=ttft, tpot_ms=tpot, e2e_ms=e2e, stall_ms=stall
    )


def _quantiles(values: Floats) -> list[Quantile]:
    """`to_quantile` of each."""
    found: list[Quantile] = values.round(6).tolist()
    for row in np.flatnonzero(~np.isfinite(values)).tolist():
        found[row] = to_quantile(float(values[row]))
    return found
