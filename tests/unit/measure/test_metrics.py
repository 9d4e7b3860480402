"""Each metric against tables worked out by hand, and laws that hold for any table."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_records import failed, ns, record

from tailrace.measure.distribution import (
    chunk_gap_distribution,
    itl_distribution,
    request_distribution,
)
from tailrace.measure.metrics import (
    Pool,
    chunk_gap_pool,
    itl_pool,
    output_tokens,
    pooled_quantile,
    request_metrics,
)
from tailrace.measure.record import Outcome, RequestRecord, TokenCount
from tailrace.measure.report import Distribution, Quantile
from tailrace.measure.statistics import weighted_nearest_rank
from tailrace.measure.table import Floats, RecordTable

ANSWER_METRICS = ("ttft_ms", "ttft_service_ms", "ttfo_ms", "tpot_ms", "stall_ms", "e2e_ms", "tail_ms")
INF, NAN = math.inf, math.nan


def metrics_of(*rows: RequestRecord) -> dict[str, list[float]]:
    return {name: values.tolist() for name, values in request_metrics(RecordTable.from_records(rows)).items()}


def same(found: list[float], expected: list[float]) -> bool:
    return np.allclose(found, expected, rtol=0, atol=1e-9, equal_nan=True)


def test_times_are_told_apart() -> None:
    made = record(
        "a",
        100,
        [50, 10, 30],
        issued_ns=ns(102),
        connected_ns=ns(105),
        sent_ns=ns(109),
        first_answer_ns=ns(160),
        ended_ns=ns(197),
    )
    found = {name: values[0] for name, values in metrics_of(made).items()}
    assert found == pytest.approx(
        {
            "ttft_ms": 50,
            "ttft_service_ms": 41,
            "send_lag_ms": 2,
            "connect_ms": 3,
            "ttfo_ms": 60,
            "tpot_ms": 20,  # (10 + 30) / (3 - 1)
            "stall_ms": 30,
            "e2e_ms": 90,
            "tail_ms": 7,
        }
    )


def test_latency_counts_from_the_schedule_however_late_the_client_was() -> None:
    late = record("a", 0, [500], issued_ns=ns(400), connected_ns=ns(400), sent_ns=ns(400))
    assert metrics_of(late)["ttft_ms"] == [500]
    assert metrics_of(late)["ttft_service_ms"] == [100]


def test_a_bundled_first_chunk_does_not_flatter_tpot() -> None:
    # Seven tokens, three of them at once in the first chunk: four came in 40 ms.
    assert metrics_of(record("a", 0, [50, 10, 30], [3, 1, 3]))["tpot_ms"] == [10]


def test_the_server_counts_tokens_that_chunks_do_not_show() -> None:
    hidden = record("a", 0, [50, 10, 30], [1, 1, 1], num_output_tokens=5)
    assert metrics_of(hidden)["tpot_ms"] == [10]  # 40 / (5 - 1)
    assert output_tokens(RecordTable.from_records([hidden])).tolist() == [5]


@pytest.mark.parametrize(
    "made",
    [
        record("one", 0, [50]),
        record("bundled", 0, [50], [8]),
        record("bundled, and not said so", 0, [50], num_output_tokens=9),
        record("said too few", 0, [50, 10], [2, 1], num_output_tokens=2),
        record("unknown", 0, [50, 10], num_output_tokens=None, token_count=TokenCount.UNKNOWN),
    ],
    ids=lambda made: made.request_id,
)
def test_tpot_without_tokens_after_the_first_chunk_is_undefined_never_zero(made: RequestRecord) -> None:
    assert same(metrics_of(made)["tpot_ms"], [NAN])


def test_an_answer_in_one_chunk_has_no_stall() -> None:
    assert same(metrics_of(record("a", 0, [50], [8]))["stall_ms"], [NAN])


def test_an_answer_of_reasoning_alone_has_a_ttft_and_no_ttfo() -> None:
    found = metrics_of(record("a", 0, [50, 10], first_answer_ns=None))
    assert found["ttft_ms"] == [50]
    assert same(found["ttfo_ms"], [NAN])


def test_a_role_only_first_chunk_is_not_the_first_token() -> None:
    # Such chunks are not in a record: headers and role at 5 ms, the first token at 50 ms.
    assert metrics_of(record("a", 0, [50, 10], headers_ns=ns(5)))["ttft_ms"] == [50]


@pytest.mark.parametrize("outcome", [each for each in Outcome if each is not Outcome.OK])
def test_what_did_not_end_well_is_infinite_even_if_it_began_well(outcome: Outcome) -> None:
    found = metrics_of(record("a", 0, [50, 10, 30], outcome=outcome))
    assert {name: found[name] for name in ANSWER_METRICS} == {name: [INF] for name in ANSWER_METRICS}


def test_the_clients_own_lateness_is_known_for_failures_too() -> None:
    found = metrics_of(
        failed("refused", 0, issued_ns=ns(3), connected_ns=ns(4)),
        failed("no connection", 0, Outcome.UNREACHABLE, issued_ns=ns(2), connected_ns=None),
        failed("never sent", 0, Outcome.CANCELLED, issued_ns=None, connected_ns=None),
        record("not observed", 0, [1], issued_ns=None, connected_ns=None),
    )
    assert same(found["send_lag_ms"], [3, 2, INF, NAN])
    assert same(found["connect_ms"], [1, INF, INF, NAN])


def itl_of(rows: list[RequestRecord]) -> Distribution:
    table = RecordTable.from_records(rows)
    return itl_distribution(table, np.ones(len(table), np.bool_), [0.5, 0.99])


def gaps_of(rows: list[RequestRecord]) -> Distribution:
    table = RecordTable.from_records(rows)
    return chunk_gap_distribution(table, np.ones(len(table), np.bool_), [0.5, 0.99])


def test_itl_is_weighted_by_tokens_and_a_chunk_gap_is_not() -> None:
    # After the first chunk: 30 ms with three tokens, 20 ms with one.
    rows = [record("a", 0, [50, 30, 20], [3, 3, 1])]
    itl, gaps = itl_of(rows), gaps_of(rows)
    assert (itl.num, itl.num_estimated, itl.percentiles) == (4, 3, {"p50": 10, "p99": 20})
    assert itl.mean_ms == pytest.approx(50 / 4)
    assert (gaps.num, gaps.num_estimated, gaps.percentiles) == (2, 0, {"p50": 20, "p99": 30})
    assert gaps.mean_ms == 25


def test_itl_equals_the_chunk_gap_when_every_chunk_has_one_token() -> None:
    rows = [record("a", 0, [50, 30, 20, 25]), record("b", 0, [9, 1])]
    itl, gaps = itl_of(rows), gaps_of(rows)
    assert itl == gaps
    assert itl.num_estimated == 0


def test_ttft_is_no_gap() -> None:
    assert gaps_of([record("a", 0, [10_000, 1, 1])]).max_ms == 1


def test_a_failed_request_weighs_as_much_as_an_ordinary_one() -> None:
    # Ordinary: 4 gaps. One request is refused (4 at +inf), one cut after its second gap (2 seen, 2 at +inf).
    good = [record(str(i), 0, [50, 1, 2, 3, 4]) for i in range(2)]
    cut = record("cut", 0, [50, 5, 6], outcome=Outcome.CUT)
    gaps = gaps_of([*good, failed("refused", 0), cut])
    assert (gaps.num, gaps.num_failed, gaps.max_ms) == (8 + 4 + 2 + 2, 2, "inf")
    assert gaps.percentiles == {"p50": 4, "p99": "inf"}
    assert gaps.successes == {"p50": 2, "p99": 4}


def test_failures_alone_are_infinite_and_have_no_mean() -> None:
    for found in (gaps_of([failed("a", 0)]), itl_of([failed("a", 0)])):
        assert found.percentiles == {"p50": "inf", "p99": "inf"}
        assert found.successes == {"p50": None, "p99": None}
        assert (found.num, found.mean_ms, found.min_ms, found.max_ms) == (1, None, None, "inf")


def test_one_chunk_answers_have_no_gap_and_are_counted_as_such() -> None:
    found = gaps_of([record("a", 0, [5]), record("b", 0, [5, 2])])
    assert (found.num, found.num_undefined, found.num_failed) == (1, 1, 0)


def test_unknown_tokens_give_gaps_and_no_itl() -> None:
    rows = [record("a", 0, [5, 2, 2], token_count=TokenCount.UNKNOWN, num_output_tokens=None)]
    assert gaps_of(rows).num == 2
    assert (itl_of(rows).num, itl_of(rows).num_undefined) == (0, 1)


def test_tokens_shared_out_by_length_are_flagged() -> None:
    rows = [record("a", 0, [5, 2, 2], token_count=TokenCount.LENGTH), record("b", 0, [5, 2])]
    assert (itl_of(rows).num, itl_of(rows).num_estimated) == (3, 2)


def test_a_pooled_bound_counts_requests_not_samples() -> None:
    def bounds(num_requests: int, num_gaps: int) -> Quantile:
        rows = [record(str(i), 0, [1.0] * (num_gaps + 1)) for i in range(num_requests)]
        return gaps_of(rows).bounds["p50"]

    assert bounds(10, 100) is None  # eleven are the fewest for a median
    assert bounds(11, 2) == 1


@pytest.mark.parametrize("rows", [[], [record("a", 0, [])]], ids=["no rows", "no chunks"])
def test_nothing_makes_undefined_not_zero(rows: list[RequestRecord]) -> None:
    table = RecordTable.from_records(rows)
    for values in request_metrics(table).values():
        assert len(values) == len(rows)
    empty = request_distribution(np.zeros(0), [0.5])
    assert empty.percentiles == empty.successes == empty.bounds == {"p50": None}
    assert (empty.num, empty.mean_ms, empty.min_ms, empty.max_ms) == (0, None, None, None)


def test_a_request_distribution_keeps_its_three_states_apart() -> None:
    found = request_distribution(np.array([4.0, INF, NAN, 2.0, 3.0]), [0.5, 0.99])
    assert (found.num, found.num_failed, found.num_undefined) == (4, 1, 1)
    assert found.percentiles == {"p50": 3, "p99": "inf"}
    assert found.successes == {"p50": 3, "p99": 4}
    assert (found.mean_ms, found.min_ms, found.max_ms) == (3, 2, "inf")


def test_the_bound_of_a_p99_needs_662_requests() -> None:
    values = np.arange(1.0, 663.0)
    assert request_distribution(values[:-1], [0.99]).bounds == {"p99": None}
    assert request_distribution(values, [0.99]).bounds == {"p99": 662}


_VALUES = st.lists(st.one_of(st.floats(0, 1e6), st.just(INF), st.just(NAN)), max_size=60)


def as_number(value: Quantile) -> float:
    return INF if value == "inf" else NAN if value is None else float(value)


@given(_VALUES, st.floats(0.01, 0.999))
def test_failures_never_lower_a_percentile_and_a_bound_is_no_less(values: list[float], ratio: float) -> None:
    found = request_distribution(np.array(values, np.float64), [ratio])
    (over_all,), (good,), (bound,) = found.percentiles.values(), found.successes.values(), found.bounds.values()
    assert found.num + found.num_undefined == len(values)
    if good is not None:
        assert as_number(over_all) >= as_number(good)
    if bound is not None:
        assert as_number(bound) >= as_number(over_all)


_WEIGHTED = st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5)), min_size=1, max_size=30)


@given(_WEIGHTED, _WEIGHTED, st.integers(0, 5), st.floats(0.01, 0.999))
def test_a_pool_equals_its_samples_written_out(
    first: list[tuple[float, int]], second: list[tuple[float, int]], num_inf: int, ratio: float
) -> None:
    def columns(pairs: list[tuple[float, int]]) -> tuple[Floats, np.ndarray]:
        return np.array([value for value, _ in pairs]), np.array([weight for _, weight in pairs])

    pools = [Pool(*columns(first)), Pool(*columns(second))]
    values, weights = columns([*first, *second, *[(INF, 1)] * num_inf])
    assert pooled_quantile(pools, num_inf, ratio) == weighted_nearest_rank(values, weights, [ratio])[0]
    written = np.sort(np.repeat(values, weights))
    assert pooled_quantile(pools, num_inf, ratio) == written[max(math.ceil(round(ratio * len(written), 6)), 1) - 1]
    assert sum(pool.total for pool in pools) == pytest.approx(written[np.isfinite(written)].sum())


@given(st.lists(st.tuples(st.lists(st.integers(0, 50), max_size=5), st.booleans()), max_size=8), st.integers(0, 99))
def test_order_of_rows_does_not_matter(drawn: list[tuple[list[int], bool]], seed: int) -> None:
    rows = [
        record(str(i), i, [g / 7 for g in gaps], [1 + g % 3 for g in gaps], outcome=Outcome.OK if ok else Outcome.CUT)
        for i, (gaps, ok) in enumerate(drawn)
    ]
    mixed = [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))]
    assert itl_of(rows) == itl_of(mixed)
    assert gaps_of(rows) == gaps_of(mixed)


def test_pools_take_only_the_rows_asked_for() -> None:
    table = RecordTable.from_records([record("a", 0, [9, 1]), record("b", 0, [9, 2, 4], [1, 1, 2])])
    only_b = np.array([False, True])
    assert [run.tolist() for run in chunk_gap_pool(table, only_b).values()] == [[2, 4]]
    pool, smeared = itl_pool(table, only_b)
    assert (pool.num, smeared, pool.num_at_most(2)) == (3, 2, 3)


def test_a_whole_table_of_time_zero_is_fine() -> None:
    zero = RequestRecord(
        request_id="z", outcome=Outcome.OK, scheduled_ns=0, ended_ns=0, chunk_gaps_ns=[0, 0], num_output_tokens=2
    )
    found = metrics_of(zero)
    assert found["ttft_ms"] == found["tpot_ms"] == found["stall_ms"] == found["e2e_ms"] == [0]
