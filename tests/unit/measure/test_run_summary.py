"""One word and a few numbers of a run, as the search over rates takes them."""

import math

import numpy as np
import pytest
from made_reports import latencies, report
from measured_records import record, run_info
from simulated_queue import simulate

from tailrace.measure.build import build_report
from tailrace.measure.report import Report, Samples
from tailrace.measure.run_summary import RunOutcome, judge, queue_ages_ms, summarise
from tailrace.measure.saturation import Probe, SaturationSearch, SaturationSettings
from tailrace.measure.table import RecordTable


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


def queue_report(rate: float, seed: int) -> Report:
    """A run of 1,500 requests against four servers of one second each, first come first served: capacity 4/s."""
    scheduled, ended, ttft, window_s = simulate(seed, 1500, servers=4, exponential=False, load=rate / 4, warm=200)
    start = -float(scheduled[0])
    records = [
        record(f"q{i}", (at + start) * 1e3, [first, max((end - at) * 1e3 - first, 1.0)])
        for i, (at, end, first) in enumerate(zip(scheduled.tolist(), ended.tolist(), ttft.tolist(), strict=True))
    ]
    window_ms = (start * 1e3, (start + window_s) * 1e3)
    header = run_info(window_ms, slo="ttft_ms_p99<=4000", arrivals=f"poisson:{rate:g}", run_id=f"q{seed}")
    return build_report(header, RecordTable.from_records(records))


def test_the_search_over_reports_of_a_queue_holds_the_rate_at_which_its_p99_reaches_the_limit() -> None:
    long = [simulate(9, 50_000, servers=4, exponential=False, load=rate / 4, warm=2000)[2] for rate in (3.2, 3.6)]
    assert np.quantile(long[0], 0.99) < 4000 < np.quantile(long[1], 0.99)
    search = SaturationSearch(SaturationSettings(), 0)
    while isinstance(probe := search.next_probe(), Probe):
        search.record(probe, judge(queue_report(probe.rate_per_s, probe.number)))
    result = search.result()
    assert (result.status, result.is_confirmed, result.is_monotone) == ("found", True, True)
    assert result.last_pass_per_s is not None
    assert result.first_fail_per_s is not None
    assert 2.5 < result.last_pass_per_s < 3.2
    assert 3.6 < result.first_fail_per_s < 4.5
