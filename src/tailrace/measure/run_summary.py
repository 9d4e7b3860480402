"""What a search over rates needs of one run: a few numbers out of its report, and one word for how it ended."""

import enum
import math

import msgspec
import numpy as np

from tailrace.measure.combine import combine, invalid_reasons
from tailrace.measure.intervals import to_float
from tailrace.measure.report import LimitResult, Quantile, Report, Samples
from tailrace.measure.slo import Limit
from tailrace.measure.statistics import nearest_rank

SUMMARY_RESAMPLES = 1
"""A single run is judged by its bound; its intervals are not looked at."""


class RunOutcome(enum.StrEnum):
    """How a run at one rate ended."""

    PASS = "pass"
    """Valid, steady, and every bound is within its limit."""
    FAIL = "fail"
    """A bound is over its limit, or there is no steady state to bound."""
    TOO_FEW = "too-few"
    """A bound cannot be known from so few requests. Not a pass."""
    CLIENT = "invalid-client"
    """The client could not keep its own schedule: the run says nothing of the server."""
    INVALID = "invalid"
    """Another verdict forbids every claim (cache, output, tokens)."""


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One run in short. ms and per second; None is undefined."""

    offered_per_s: float | None
    issued_per_s: float | None = None
    completed_per_s: float | None = None
    num_requests: int = 0
    num_errors: int = 0
    """Requests in the window that did not end well, planned cancellations left out."""
    num_attained: int = 0
    attainment_ratio: float | None = None
    goodput_per_s: float | None = None
    output_tokens_per_s: float | None = None
    ttft_ms_p50: Quantile = None
    ttft_ms_p95: Quantile = None
    ttft_ms_p99: Quantile = None
    tpot_ms_p99: Quantile = None
    steadiness: str = "unknown"
    queue_age_ms_p99: float | None = None
    """At each arrival, how long the oldest request without a token had waited: see `queue_ages_ms`."""
    little_difference_ratio: float | None = None
    little_agrees: bool | None = True
    limits: list[LimitResult] = []
    """Of the SLO, each with its percentile and bound."""

    def limited_ms(self, limit: Limit) -> Quantile:
        """The percentile that a limit speaks of."""
        return next((found.value_ms for found in self.limits if found.limit == str(limit)), None)


class RunVerdict(msgspec.Struct, frozen=True, kw_only=True):
    outcome: RunOutcome
    summary: RunSummary
    reasons: list[str] = []


def judge(report: Report) -> RunVerdict:
    """One run as the search takes it. Raises InvalidRequest for a report with broken columns."""
    result = combine([report], num_resamples=SUMMARY_RESAMPLES)
    return RunVerdict(outcome=_outcome(report, result.passes), summary=summarise(report), reasons=result.reasons)


def summarise(report: Report) -> RunSummary:
    goodput = report.goodput
    ages = queue_ages_ms(report.samples)
    return RunSummary(
        offered_per_s=report.rates.offered_per_s,
        issued_per_s=report.rates.issued_per_s,
        completed_per_s=report.rates.completed_per_s,
        num_requests=report.num_requests,
        num_errors=report.num_failed or 0,
        num_attained=goodput.num_attained if goodput else 0,
        attainment_ratio=goodput.attainment_ratio if goodput else None,
        goodput_per_s=goodput.per_s if goodput else None,
        output_tokens_per_s=report.rates.output_tokens_per_s,
        ttft_ms_p50=_percentile(report, "ttft_ms", "p50"),
        ttft_ms_p95=_percentile(report, "ttft_ms", "p95"),
        ttft_ms_p99=_percentile(report, "ttft_ms", "p99"),
        tpot_ms_p99=_percentile(report, "tpot_ms", "p99"),
        steadiness=report.steadiness.verdict,
        queue_age_ms_p99=nearest_rank(np.sort(ages), 0.99) if len(ages) else None,
        little_difference_ratio=report.little.difference_ratio,
        little_agrees=report.little.agrees,
        limits=report.limits,
    )


def queue_ages_ms(samples: Samples) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Age, at each arrival, of the oldest earlier request that had no token yet (0: none), one entry a request.

    Failed requests never get one and are left out, as are those without a value. Thinned samples give ages that are
    too small by a gap between arrivals at most.
    """
    pairs = sorted(
        (scheduled, scheduled + to_float(ttft))
        for scheduled, ttft in zip(samples.scheduled_ms, samples.ttft_ms, strict=True)
        if math.isfinite(to_float(ttft))
    )
    ages = np.zeros(len(pairs))
    oldest = 0
    for index, (now, _) in enumerate(pairs):
        # What has its token by now keeps it, so the oldest without one only moves on.
        while oldest < index and pairs[oldest][1] <= now:
            oldest += 1
        ages[index] = now - pairs[oldest][0]
    return ages


def _outcome(report: Report, passes: bool | None) -> RunOutcome:
    invalid = invalid_reasons(report)
    if any(reason.startswith("invalid-client") for reason in invalid):
        return RunOutcome.CLIENT
    if invalid:
        return RunOutcome.INVALID
    if report.steadiness.verdict in ("drifting", "saturated"):
        return RunOutcome.FAIL
    if passes is None:
        return RunOutcome.TOO_FEW
    return RunOutcome.PASS if passes else RunOutcome.FAIL


def _percentile(report: Report, metric: str, name: str) -> Quantile:
    found = report.metrics.get(metric)
    return found.percentiles.get(name) if found else None
