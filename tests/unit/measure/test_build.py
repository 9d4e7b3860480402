"""The report of one run: windows, rates, goodput, limits, and the laws that hold for any rows."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_records import client_stats, failed, ns, record, run_info
from simulated_queue import simulate

from tailrace.measure.build import METRICS, SAMPLES_MAX, build_report
from tailrace.measure.record import Outcome, RequestRecord, TokenCount
from tailrace.measure.report import Report
from tailrace.measure.run_info import Lag, RunInfo
from tailrace.measure.run_summary import summarise
from tailrace.measure.table import RecordTable


def report(rows: list[RequestRecord], info: RunInfo | None = None) -> Report:
    return build_report(info or run_info(), RecordTable.from_records(rows))


def round_trip(made: Report) -> Report:
    return msgspec.json.decode(msgspec.json.encode(made), type=Report, strict=True)


def test_the_window_is_set_by_scheduled_time() -> None:
    rows = [
        record("warm-up", 99, [500]),
        record("first", 100, [50]),
        record("last", 899, [900]),
        record("after", 900, [1]),
    ]
    made = report(rows, run_info(window_ms=(100, 900)))
    assert (made.window_s, made.num_requests, made.num_outside_window) == (0.8, 2, 2)
    assert made.metrics["ttft_ms"].percentiles["p99"] == 900
    assert made.metrics["ttft_ms"].percentiles["p50"] == 50


def test_planned_cancellations_are_load_and_nothing_else() -> None:
    rows = [
        record("a", 0, [50, 10]),
        record("leaves", 10, [400, 90], outcome=Outcome.CANCELLED, will_cancel=True),
        record("left by itself", 20, [60], outcome=Outcome.CANCELLED),
        record("meant to leave, ended first", 30, [700], will_cancel=True),
    ]
    made = report(rows, run_info(slo="ttft_ms_p99<=500"))
    assert (made.num_requests, made.num_planned_cancels) == (2, 2)
    assert made.outcomes == {"ok": 2, "cancelled": 2}
    assert made.metrics["ttft_ms"].percentiles == {"p50": 50, "p90": "inf", "p95": "inf", "p99": "inf"}
    assert made.goodput is not None
    assert (made.goodput.num, made.goodput.num_attained, made.goodput.attainment_ratio) == (2, 1, 0.5)
    assert made.little.arrivals_per_s == 4
    assert made.rates.output_tokens_per_s == 2 + 2 + 1 + 1


def test_throughput_counts_what_arrived_inside_the_window() -> None:
    rows = [
        record("from before", -100, [90, 20, 30], num_prompt_tokens=7),  # tokens at -10, 10, 40
        record("cut", 500, [100, 100], [1, 3], outcome=Outcome.CUT, num_prompt_tokens=11),  # 600, 700
        record("runs on", 900, [50, 40, 20], num_prompt_tokens=13),  # 950, 990, 1010
    ]
    rates = report(rows).rates
    assert rates.output_tokens_per_s == 2 + 4 + 2
    assert rates.completed_per_s == 1
    assert rates.issued_per_s == 2
    assert rates.prompt_tokens_per_s == 11 + 13


def test_token_rates_are_undefined_where_tokens_are_not_known() -> None:
    rows = [record("a", 0, [5, 5], token_count=TokenCount.UNKNOWN, num_output_tokens=None)]
    made = report(rows, run_info(slo="ttft_ms_p99<=500"))
    assert (made.rates.output_tokens_per_s, made.rates.num_uncounted_chunks) == (2, 2), "at least one a chunk"
    assert made.rates.prompt_tokens_per_s is None
    assert made.goodput is not None
    assert made.goodput.output_tokens_per_s is None
    assert made.metrics["tpot_ms"].percentiles["p50"] is None


def test_a_request_attains_when_each_of_its_values_is_within_the_limit() -> None:
    rows = [
        record("good", 0, [50, 10, 10]),
        record("one chunk, no TPOT", 10, [60]),
        record("slow start", 20, [101, 10]),
        record("slow after", 30, [50, 31]),
        failed("refused", 40),
        record("on the limit", 50, [100, 30]),
    ]
    made = report(rows, run_info(window_ms=(0, 500), slo="ttft_ms_p99<=100, tpot_ms_p99<=30")).goodput
    assert made is not None
    assert (made.num_attained, made.num, made.per_s) == (3, 6, 6)
    assert made.output_tokens_per_s == (3 + 1 + 2) / 0.5


def test_without_an_slo_there_is_no_goodput() -> None:
    assert report([record("a", 0, [5])]).goodput is None


def test_littles_law_holds_for_whole_stays_and_fails_for_cut_ones() -> None:
    inside = report([record(str(i), i * 10, [39]) for i in range(90)]).little
    assert inside.in_flight_mean == pytest.approx(90 * 0.04)
    assert inside.difference_ratio == pytest.approx(0)
    assert inside.agrees
    growing = report([record(str(i), i * 10, [2_000]) for i in range(90)]).little
    assert growing.agrees is False


def test_littles_law_is_open_where_the_edges_of_the_window_may_explain_the_difference() -> None:
    two_in_turn = [record("a", 0, [499]), record("b", 500, [2_000])]  # a closed loop of one, cut by its window
    found = report(two_in_turn).little
    assert found.difference_ratio == pytest.approx(1.501)
    assert found.chance_ratio == pytest.approx(2 * 1.501)
    assert found.agrees is None
    assert report([]).little.agrees is None


def queue_report(seed: int, load: float) -> Report:
    """300 requests, after 100 to warm up, of eight servers; answers of one chunk that ends when their service does."""
    start_s, end_s, _, window_s = simulate(seed, 300, servers=8, exponential=True, load=load, warm=100)
    rows = [
        record(str(i), 1e5 + 1e3 * float(at), [1e3 * float(end - at)])
        for i, (at, end) in enumerate(zip(start_s, end_s, strict=True))
    ]
    return report(rows, run_info(window_ms=(1e5, 1e5 + 1e3 * window_s)))


def test_a_short_overload_that_the_trends_take_for_chance_is_not_steady_by_littles_law() -> None:
    overloaded = [queue_report(seed, 1.2) for seed in range(20)]
    caught = [made for made in overloaded if any("Little's law" in reason for reason in made.steadiness.reasons)]
    assert caught
    assert all((made.steadiness.verdict, made.little.agrees) == ("unknown", False) for made in caught)
    assert sum(made.steadiness.verdict == "steady" for made in overloaded) <= 1
    assert sum(queue_report(seed, 0.6).steadiness.verdict == "steady" for seed in range(20)) >= 19


def test_chunks_of_a_cut_stream_count_one_token_each_and_are_named_where_they_fall_into_the_window() -> None:
    def counted(*rows: RequestRecord) -> tuple[float, int]:
        rates = report([good, *rows]).rates
        return rates.output_tokens_per_s, rates.num_uncounted_chunks

    cut = {"outcome": Outcome.CANCELLED, "token_count": TokenCount.UNKNOWN, "num_output_tokens": None}
    good = record("a", 0, [5, 5])
    assert counted(record("stopped", 1_001, [5, 5], **cut)) == (2, 0)
    assert counted(record("in the window", 990, [5, 50], **cut)) == (3, 1)
    assert counted(record("into the window", -10, [5, 50], **cut)) == (3, 1)


def test_failures_are_counted_among_the_counted_alone() -> None:
    rows = [
        record("planned, ended before it", 0, [5], will_cancel=True),
        failed("planned, refused", 1, will_cancel=True),
        failed("left by itself", 2, outcome=Outcome.CANCELLED),
        record("good", 3, [5]),
    ]
    made = report(rows)
    assert (made.num_requests, made.num_planned_cancels, made.num_failed) == (2, 2, 1)
    assert summarise(made).num_errors == 1


def test_lengths_and_cache_use_are_summed() -> None:
    rows = [
        record("a", 0, [1, 1], num_prompt_tokens=100, num_prompt_tokens_asked=90, num_cached_tokens=32),
        record("b", 1, [1], num_prompt_tokens=300, num_prompt_tokens_asked=290, num_shared_tokens=64),
        failed("c", 2),
    ]
    made = report(rows)
    assert (made.lengths.prompt.num, made.lengths.prompt.mean, made.lengths.prompt.p95) == (2, 200, 300)
    assert (made.lengths.output.num, made.lengths.output.max, made.lengths.prompt_asked.p5) == (2, 2, 90)
    assert (made.cache.num_prompt_tokens, made.cache.num_declared_tokens, made.cache.num_cached_tokens) == (400, 64, 32)
    assert report([record("a", 0, [1])]).cache.num_cached_tokens is None


def test_failure_messages_are_counted_most_frequent_first() -> None:
    rows = [failed(str(i), i, message=("b", "a", "b", "a", "c")[i % 5]) for i in range(10)]
    assert list(report(rows).messages.items()) == [("a", 4), ("b", 4), ("c", 2)]


def poisson(num: int, seed: int, ttft_ms: float = 100.0, window_s: float = 100.0) -> list[RequestRecord]:
    """A service far from its limits; TTFT exponential about its mean."""
    rng = np.random.default_rng(seed)
    at_ms = np.sort(rng.random(num)) * window_s * 1e3
    return [
        record(str(i), float(at), [float(first), 10, 10], num_cached_tokens=0, num_prompt_tokens=100)
        for i, (at, first) in enumerate(zip(at_ms, 20 + rng.exponential(ttft_ms, num), strict=True))
    ]


def limit_of(rows: list[RequestRecord], slo: str, **changes: object) -> tuple[bool | None, str]:
    made = report(rows, run_info(window_ms=(0, 100_000), slo=slo, **changes))
    return made.limits[0].passes, made.limits[0].reason


def test_a_limit_passes_only_by_its_bound() -> None:
    rows = poisson(1000, 1)
    made = report(rows, run_info(window_ms=(0, 100_000), slo="ttft_ms_p99<=5000"))
    found = made.limits[0]
    assert found.passes is True
    assert isinstance(found.value_ms, float)
    assert isinstance(found.bound_ms, float)
    between = (found.value_ms + found.bound_ms) / 2
    passes, reason = limit_of(rows, f"ttft_ms_p99<={between:f}")
    assert passes is False
    assert "bound" in reason
    assert limit_of(rows, f"ttft_ms_p99<={found.value_ms / 2:f}") == (False, "the percentile is over the limit")


def test_too_few_samples_carry_no_claim() -> None:
    passes, reason = limit_of(poisson(600, 1), "ttft_ms_p99<=5000")
    assert passes is None
    assert "662" in reason


def test_every_reason_why_nothing_can_be_said_is_named() -> None:
    passes, reason = limit_of(poisson(50, 1), "ttft_ms_p99<=5000")
    assert passes is None
    assert "steadiness unknown" in reason
    assert "662" in reason
    rows = [record(str(i), 1000.0 * i, [50 + i, 1]) for i in range(99)]
    passes, reason = limit_of(rows, "ttft_ms_p50<=100")
    assert passes is None, "a run that may carry no claim is no proof of the opposite either"
    assert reason == ("the percentile is within the limit; steadiness unknown; its 99 % bound over 99 samples is not")


def test_an_invalid_client_forbids_every_claim_good_or_bad() -> None:
    client = client_stats(loop_lag=Lag(p50_ms=0, p99_ms=9_000, max_ms=9_000))
    for limit in (5000, 1):
        passes, reason = limit_of(poisson(1000, 1), f"ttft_ms_p99<={limit}", client=client)
        assert passes is None
        assert "invalid-client" in reason


def test_a_run_that_is_not_steady_cannot_pass_but_can_fail() -> None:
    rows = [record(str(i), 100.0 * i, [50 + 40.0 * i, 1]) for i in range(1000)]
    assert report(rows, run_info(window_ms=(0, 100_000))).steadiness.verdict == "saturated"
    assert limit_of(rows, "ttft_ms_p99<=1")[0] is False
    passes, reason = limit_of(rows, "ttft_ms_p99<=1000000")
    assert passes is None
    assert "no steady state" in reason


def test_what_was_not_checked_is_said_beside_a_pass() -> None:
    passes, reason = limit_of(poisson(1000, 1), "ttft_ms_p99<=5000")
    assert passes is True
    assert "not checked: tokens" in reason


def test_percentiles_of_the_slo_are_reported_too() -> None:
    made = report(poisson(700, 2), run_info(window_ms=(0, 100_000), slo="ttft_ms_p99.9<=500, itl_ms_p75<=20"))
    assert list(made.metrics["ttft_ms"].percentiles) == ["p50", "p90", "p95", "p99", "p99_9"]
    assert list(made.metrics["itl_ms"].percentiles) == ["p50", "p75", "p90", "p95", "p99"]
    assert [limit.limit for limit in made.limits] == ["ttft_ms_p99_9<=500", "itl_ms_p75<=20"]


@pytest.mark.parametrize(
    ("rows", "info"),
    [
        ([], run_info()),
        ([record("a", 5_000, [5])], run_info()),
        ([record("a", 0, [5])], run_info(window_ms=(0, 0))),
        ([RequestRecord(request_id="z", outcome=Outcome.OK, scheduled_ns=ns(0), ended_ns=ns(0))], run_info()),
        ([failed("a", 0)], run_info(slo="ttft_ms_p99<=1, itl_ms_p99<=1", client=None)),
    ],
    ids=["no rows", "none in the window", "no window", "no time", "only a failure"],
)
def test_a_run_of_nothing_has_a_report(rows: list[RequestRecord], info: RunInfo) -> None:
    made = report(rows, info)
    assert set(made.metrics) == set(METRICS)
    assert round_trip(made) == made
    assert made.rates.completed_per_s == 0
    assert made.steadiness.verdict == "unknown"
    # An answer without a token is a failure; without a request there is nothing to say.
    assert made.metrics["ttft_ms"].percentiles["p50"] == ("inf" if made.num_requests else None)


def test_samples_are_thinned_evenly_and_keep_both_ends() -> None:
    rows = [record(str(i), float(i), [1.0]) for i in range(SAMPLES_MAX + 5_000)]
    samples = report(rows, run_info(window_ms=(0, 1e6))).samples
    assert len(samples.scheduled_ms) == SAMPLES_MAX
    assert (samples.scheduled_ms[0], samples.scheduled_ms[-1]) == (0, SAMPLES_MAX + 4_999)
    assert set(np.diff(samples.scheduled_ms)) == {1, 2}


_ROW = st.tuples(
    st.integers(-50, 1_100),
    st.lists(st.integers(0, 40), max_size=4),
    st.sampled_from([Outcome.OK, Outcome.OK, Outcome.CUT, Outcome.REFUSED]),
    st.sampled_from(list(TokenCount)),
    st.booleans(),
    st.none() | st.integers(0, 9),
)


@given(st.lists(_ROW, max_size=30), st.integers(0, 99))
def test_rows_in_any_order_give_the_same_report(drawn: list[tuple], seed: int) -> None:  # type: ignore[type-arg]
    rows = [
        record(
            str(i),
            at,
            [gap / 3 for gap in gaps],
            [1 + gap % 3 for gap in gaps],
            outcome=outcome,
            token_count=how,
            will_cancel=leaves,
            num_output_tokens=num,
            num_cached_tokens=num,
            message=f"m{i % 3}",
        )
        for i, (at, gaps, outcome, how, leaves, num) in enumerate(drawn)
    ]
    info = run_info(slo="ttft_ms_p99<=10, tpot_ms_p90<=5, itl_ms_p99<=9")
    made = report(rows, info)
    assert report([rows[i] for i in np.random.default_rng(seed).permutation(len(rows))], info) == made
    assert round_trip(made) == made
    for metric in made.metrics.values():
        assert metric.num_failed <= metric.num
        if metric.num_failed == 0:
            assert metric.successes == metric.percentiles
        elif metric.num == metric.num_failed:
            assert set(metric.percentiles.values()) == {"inf"}
    assert sum(made.outcomes.values()) + made.num_outside_window == len(rows)


def test_an_infinite_value_is_written_as_a_word() -> None:
    made = report([failed("a", 0)], run_info(slo="ttft_ms_p99<=10"))
    raw = msgspec.json.decode(msgspec.json.encode(made))
    assert raw["metrics"]["ttft_ms"]["percentiles"]["p99"] == "inf"
    assert raw["samples"]["ttft_ms"] == ["inf"]
