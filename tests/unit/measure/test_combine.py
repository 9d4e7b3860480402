"""Repeats become one result: who may be combined, and when an objective counts as met."""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from made_reports import latencies, report

from tailrace.errors import InvalidRequest
from tailrace.measure.combine import combine as combine_fully
from tailrace.measure.combine import law_differences
from tailrace.measure.intervals import to_float
from tailrace.measure.report import BenchResult, Report, Verdict


def combine(reports: Sequence[Report]) -> BenchResult:
    return combine_fully(reports, num_resamples=100)


def repeats(num: int, **changed: object) -> list[Report]:
    return [report(latencies(i), f"run-{i}", **changed) for i in range(num)]


def test_intervals_cover_every_metric_at_the_usual_percentiles_and_those_of_the_slo() -> None:
    result = combine(repeats(2, slo="ttft_ms_p99<=500, e2e_ms_p90<=900"))
    usual = {f"{metric}_{p}" for metric in ("ttft_ms", "tpot_ms", "e2e_ms", "stall_ms") for p in ("p50", "p95", "p99")}
    assert set(result.intervals) == usual | {"e2e_ms_p90"}
    pooled = np.sort(np.concatenate([latencies(0), latencies(1)]))
    interval = result.intervals["ttft_ms_p50"]
    assert to_float(interval.low_ms) <= pooled[1500] <= to_float(interval.high_ms)
    assert (interval.num_runs, interval.num_blocks) == (2, 50)


def test_repeats_pass_when_the_upper_end_is_within_the_limit() -> None:
    result = combine(repeats(3))
    assert result.passes is True
    assert "over 3 runs ends at" in result.reasons[0]


def test_repeats_do_not_pass_when_only_the_percentile_itself_is_within() -> None:
    runs = repeats(3)
    pooled = np.sort(np.concatenate([latencies(i) for i in range(3)]))
    limit = math.ceil(pooled[math.ceil(0.99 * len(pooled)) - 1])
    result = combine([report(latencies(i), r.info.run_id, slo=f"ttft_ms_p99<={limit}") for i, r in enumerate(runs)])
    assert to_float(result.intervals["ttft_ms_p99"].high_ms) > limit
    assert result.passes is False
    assert "not shown" in result.reasons[0]


def test_one_run_is_judged_by_its_bound() -> None:
    values = latencies(1)
    assert combine([report(values)]).passes is True
    assert combine([report(values, slo="ttft_ms_p99<=101")]).passes is False
    few = combine([report(values[:400])])
    assert few.passes is None
    assert "too few" in few.reasons[0]


def test_too_few_requests_can_fail_and_cannot_pass() -> None:
    few = [report(latencies(i, num=100), f"run-{i}") for i in range(2)]
    assert combine(few).passes is None
    assert "too few requests over 2 runs" in combine(few).reasons[0]
    over = [report(latencies(i, num=100), f"run-{i}", slo="ttft_ms_p99<=101") for i in range(2)]
    assert combine(over).passes is False


def test_failures_that_reach_the_percentile_fail_the_objective() -> None:
    values = latencies(1)
    values[::20] = math.inf
    result = combine([report(values, "run-a"), report(values, "run-b")])
    assert result.passes is False
    assert "reaches the failures" in result.reasons[0]
    assert result.intervals["ttft_ms_p99"].high_ms == "inf"


@pytest.mark.parametrize("name", ["client", "cache", "output", "tokens"])
def test_an_invalid_run_forbids_the_claim_either_way(name: str) -> None:
    runs = [*repeats(2), report(latencies(9), "run-9", invalid=[name])]
    result = combine(runs)
    assert result.passes is None
    assert any(f"invalid-{name}: {name} is wrong" in reason and "run-9" in reason for reason in result.reasons)
    assert combine([report(latencies(1), invalid=[name], slo="ttft_ms_p99<=1")]).passes is None


def test_a_run_that_is_not_steady_cannot_pass_and_can_fail() -> None:
    runs = [*repeats(2), report(latencies(9), "run-9", steady="drifting")]
    assert combine(runs).passes is None
    assert any("drifting: the queue grows" in reason for reason in combine(runs).reasons)
    over = [report(latencies(i), f"run-{i}", steady="saturated", slo="ttft_ms_p99<=90") for i in range(2)]
    assert combine(over).passes is False


def test_where_only_the_interval_is_over_a_run_that_is_not_steady_leaves_it_open() -> None:
    pooled = np.sort(np.concatenate([latencies(i) for i in range(2)]))
    slo = f"ttft_ms_p99<={math.ceil(pooled[math.ceil(0.99 * len(pooled)) - 1])}"
    assert combine(repeats(2, slo=slo)).passes is False
    assert combine(repeats(2, slo=slo, steady="drifting")).passes is None


def test_a_metric_with_many_values_a_request_is_judged_run_by_run() -> None:
    result = combine(repeats(2, slo="ttft_ms_p99<=500, itl_ms_p99<=60"))
    assert result.passes is None
    assert any(reason.startswith("itl_ms_p99<=60: too few samples") for reason in result.reasons)


def test_without_an_slo_nothing_passes() -> None:
    result = combine(repeats(2, slo=""))
    assert result.passes is None
    assert result.reasons == ["no SLO was given"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("definitions", "tailrace-measure/0"),
        ("workload_sha256", "ef" * 32),
        ("arrivals", "poisson:11"),
        ("api", "completions"),
        ("ignore_eos", False),
        ("num_clients", 4),
        ("url", "http://127.0.0.1:9"),
        ("model", "other"),
    ],
)
def test_runs_of_other_things_are_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=r"are no repeats: .* against .*"):
        combine([report(latencies(1), "run-1"), report(latencies(2), "run-2", **{field: value})])


def test_other_objectives_are_refused_and_all_that_differs_is_named() -> None:
    first = report(latencies(1), "run-1")
    second = report(latencies(2), "run-2", slo="ttft_ms_p99<=400", api="completions", workload_sha256="ef" * 32)
    assert len(law_differences(first.info, second.info)) == 3
    with pytest.raises(InvalidRequest, match=r"workload .*SLO .*API"):
        combine([first, second])


def test_the_same_law_written_differently_is_the_same() -> None:
    first = report(latencies(1), slo="ttft_ms_p99<=500, tpot_ms_p99<=60").info
    second = report(latencies(1), slo="tpot_ms_p99<60,ttft_ms_p99<=500", arrivals="poisson:10.0").info
    assert law_differences(first, second) == []


def test_one_run_twice_is_no_repeat_and_none_is_nothing() -> None:
    with pytest.raises(InvalidRequest, match="twice"):
        combine([report(latencies(1)), report(latencies(1))])
    with pytest.raises(InvalidRequest, match="no report"):
        combine([])


def test_columns_of_unequal_length_and_an_empty_window_are_refused() -> None:
    good = report(latencies(1))
    broken = msgspec.structs.replace(good, samples=msgspec.structs.replace(good.samples, ttft_ms=[1.0]))
    with pytest.raises(InvalidRequest, match="samples of ttft_ms are 1 for 1500"):
        combine([broken])
    with pytest.raises(InvalidRequest, match="no sensible length"):
        combine([msgspec.structs.replace(good, window_s=0.0)])


def test_a_result_survives_json() -> None:
    values = latencies(1)
    values[::20] = math.inf
    result = combine([report(values, "run-a"), report(values, "run-b")])
    assert msgspec.json.decode(msgspec.json.encode(result), type=BenchResult) == result


@pytest.mark.parametrize("num_runs", [1, 3])
def test_a_client_that_was_not_checked_carries_no_claim(num_runs: int) -> None:
    unchecked = Verdict(state="unknown", reasons=["no calibration against a null server was made"])
    runs = [msgspec.structs.replace(run, verdicts=run.verdicts | {"client": unchecked}) for run in repeats(num_runs)]
    result = combine(runs)
    assert result.passes is None
    assert "client not checked: no calibration" in result.reasons[0]
