"""One word and a few numbers of a run, as the search over rates takes them."""

import math

import pytest
from made_reports import latencies, report

from tailrace.measure.report import Samples
from tailrace.measure.run_summary import RunOutcome, judge, queue_ages_ms, summarise


def test_a_steady_run_within_its_limits_passes() -> None:
    verdict = judge(report(latencies(1)))
    assert verdict.outcome is RunOutcome.PASS
    assert verdict.reasons


def test_a_bound_over_the_limit_fails_and_an_unknown_one_is_too_few() -> None:
    assert judge(report(latencies(1), slo="ttft_ms_p99<=101")).outcome is RunOutcome.FAIL
    assert judge(report(latencies(1, num=400))).outcome is RunOutcome.TOO_FEW


@pytest.mark.parametrize("steady", ["drifting", "saturated"])
def test_a_run_without_steady_state_fails_whatever_its_percentiles(steady: str) -> None:
    assert judge(report(latencies(1), steady=steady, invalid=["steady"])).outcome is RunOutcome.FAIL


def test_a_run_of_unknown_steadiness_is_no_pass() -> None:
    assert judge(report(latencies(1), steady="unknown")).outcome is RunOutcome.TOO_FEW


def test_an_invalid_client_is_never_slow() -> None:
    slow = report(latencies(1), slo="ttft_ms_p99<=1", steady="saturated", invalid=["client", "cache"])
    assert judge(slow).outcome is RunOutcome.CLIENT
    assert judge(report(latencies(1), invalid=["cache"])).outcome is RunOutcome.INVALID


def test_the_summary_is_of_the_report() -> None:
    values = latencies(1)
    values[:30] = math.inf
    made = report(values)
    summary = summarise(made)
    assert (summary.num_requests, summary.num_errors, summary.num_attained) == (1500, 30, 1470)
    assert summary.ttft_ms_p99 == "inf"
    assert summary.ttft_ms_p50 == made.metrics["ttft_ms"].percentiles["p50"]
    assert summary.tpot_ms_p99 == "inf"
    assert summary.goodput_per_s == pytest.approx(9.8)


def test_the_queue_age_is_that_of_the_oldest_request_without_a_token() -> None:
    samples = Samples(
        scheduled_ms=[0.0, 10.0, 20.0, 30.0, 200.0, 210.0],
        ttft_ms=[25.0, 5.0, 100.0, "inf", None, 1.0],
        tpot_ms=[],
        e2e_ms=[],
        stall_ms=[],
    )
    # At 10 and 20 the first waits (until 25); at 210 nobody does.
    assert queue_ages_ms(samples).tolist() == [0.0, 10.0, 20.0, 0.0]


def test_queue_ages_equal_the_definition_written_out() -> None:
    values = latencies(5, num=200, scale=300.0)
    made = report(values)
    arrivals = made.samples.scheduled_ms
    expected = [
        max((now - at for at, ttft in zip(arrivals[:i], values[:i], strict=True) if at + ttft > now), default=0.0)
        for i, now in enumerate(arrivals)
    ]
    assert queue_ages_ms(made.samples).tolist() == pytest.approx(expected)
