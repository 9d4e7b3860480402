"""Curves against the obvious way to make them."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_samples import make_info

from tailrace.measure.pages import series
from tailrace.measure.pages.plots import PHASE_COLOURS
from tailrace.measure.record import Outcome, RequestRecord
from tailrace.measure.table import RecordTable

INF, NAN = np.inf, np.nan


def test_failures_are_mass_at_infinity_and_undefined_is_left_out() -> None:
    curve = series.cdf(np.array([3.0, INF, 1.0, NAN, 2.0]))
    assert curve.ms == [1.0, 2.0, 3.0]
    assert curve.ratio == [0.25, 0.5, 0.75]
    assert (curve.num, curve.failed_ratio) == (4, 0.25)


def test_a_distribution_of_failures_alone_has_no_curve() -> None:
    curve = series.cdf(np.array([INF, INF]))
    assert (curve.ms, curve.failed_ratio) == ([], 1.0)
    assert series.cdf(np.zeros(0)).failed_ratio == 0.0


def test_a_distribution_has_a_bounded_number_of_points_that_lie_on_it() -> None:
    values = np.random.default_rng(3).lognormal(3, 1, 100_000)
    curve = series.cdf(values)
    assert len(curve.ms) <= series.CDF_POINTS_MAX
    assert curve.ms[-1] == values.max()
    assert curve.ratio[-1] == 1.0
    ordered = np.sort(values)
    np.testing.assert_allclose(np.searchsorted(ordered, curve.ms, side="right") / len(values), curve.ratio)
    assert sum(ratio > 0.99 for ratio in curve.ratio) > series.CDF_POINTS_MAX / 10, "the tail has points of its own"


def test_more_samples_than_a_curve_needs_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "CDF_SAMPLES_MAX", 100)
    curve = series.cdf(np.arange(1_000, dtype=np.float64))
    assert curve.num == 1_000
    assert curve.ms[0] == 0.0
    assert curve.ratio[-1] == 1.0


@given(st.floats(-100, 100), st.floats(0, 1e7), st.integers(0, 10**6))
def test_intervals_cover_the_span_and_are_few(start: float, length: float, num: int) -> None:
    edges = series.intervals(start, start + length, num)
    assert edges[0] == start
    assert edges[-1] >= start + length - 1e-6 * max(1.0, abs(start) + length)
    assert 2 <= len(edges) <= min(series.INTERVALS_MAX, max(series.INTERVALS_MIN, num // 10)) + 2


def test_percentiles_over_time_are_nearest_ranks_of_their_interval() -> None:
    t = np.array([0.1, 0.2, 0.3, 1.5, 2.5, 9.0])
    values = np.array([5.0, 1.0, INF, NAN, 7.0, 8.0])
    found = series.percentiles_over_time(t, values, np.array([0.0, 1.0, 2.0, 3.0]))
    assert found.t_s == [0.5, 1.5, 2.5]
    assert found.p50 == [5.0, None, 7.0]
    assert found.p99 == ["inf", None, 7.0]
    assert found.num == [3, 0, 1]


request = st.tuples(st.floats(0, 50), st.floats(0, 5), st.floats(0, 5), st.booleans())


@given(st.lists(request, min_size=1, max_size=40))
def test_flight_equals_counting_one_by_one(requests: list[tuple[float, float, float, bool]]) -> None:
    scheduled = np.array([r[0] for r in requests])
    first = np.array([r[0] + r[1] if r[3] else NAN for r in requests])
    ended = np.array([r[0] + r[1] + r[2] for r in requests])
    found = series.flight(scheduled, first, ended)
    for i in range(0, series.POINTS_MAX, 37):
        t = found.t_s[i]
        alive = [(s, e) for s, e in zip(scheduled, ended, strict=True) if s <= t < e]
        waits = np.where(np.isnan(first), ended, first)
        waiting = [s for s, w in zip(scheduled, waits, strict=True) if s <= t < w]
        assert found.num_in_flight[i] == len(alive)
        assert found.num_awaiting_first[i] == len(waiting)
        assert found.oldest_age_s[i] == (pytest.approx(t - min(waiting)) if waiting else None)


def test_no_request_is_an_empty_flight() -> None:
    none = np.zeros(0)
    assert series.flight(none, none, none).t_s == []


def test_events_outside_the_intervals_are_left_out() -> None:
    edges = np.array([0.0, 2.0, 4.0])
    assert series.per_interval(np.array([-0.1, 0.0, 1.0, 3.9, 4.0]), edges).tolist() == [2.0, 1.0]
    assert series.per_interval(np.array([0.5, 3.0]), edges, np.array([10, 4])).tolist() == [10.0, 4.0]


def test_weights_count_as_often_as_they_say() -> None:
    curve = series.cdf(np.array([5.0, 1.0, INF]), np.array([3, 1, 4]))
    assert (curve.ms, curve.ratio, curve.num, curve.failed_ratio) == ([1.0, 5.0], [0.125, 0.5], 8, 0.5)


def test_outcomes_that_do_not_occur_are_left_out() -> None:
    counts = series.outcome_counts(
        np.array([0.5, 1.5, 1.6]), np.array([0, 2, 2]), ["ok", "cut", "timeout"], np.array([0.0, 1.0, 2.0])
    )
    assert counts == {"ok": [1, 0], "timeout": [0, 2]}


def test_thinning_keeps_both_ends() -> None:
    thinned = series.thin(np.arange(1_000.0), 10)
    assert (len(thinned), thinned[0], thinned[-1]) == (10, 0.0, 999.0)
    assert series.thin(np.arange(3.0), 10).tolist() == [0, 1, 2]


NS = 10**9


def record(at_s: float, gaps_ms: list[int], outcome: Outcome = Outcome.OK, **more: object) -> RequestRecord:
    start = round(at_s * NS)
    fields: dict[str, object] = {
        "request_id": f"r{at_s}",
        "outcome": outcome,
        "scheduled_ns": start,
        "issued_ns": start + 1_000_000,
        "connected_ns": start + 2_000_000,
        "sent_ns": start + 3_000_000,
        "headers_ns": start + 4_000_000,
        "chunk_gaps_ns": [gap * 1_000_000 for gap in gaps_ms],
        "ended_ns": start + (sum(gaps_ms) + 6) * 1_000_000,
        "num_prompt_tokens": 9,
    }
    return msgspec.convert(fields | more, RequestRecord)


def table_series(*records: RequestRecord, slo: str = "ttft_ms_p99<=100") -> series.RunSeries:
    return series.run_series(make_info(slo=slo), RecordTable.from_records(records))


def test_curves_of_a_run_show_all_and_its_distributions_the_window_alone() -> None:
    found = table_series(
        record(1, [50, 10]),  # before the window
        record(10, [80, 10, 20]),
        record(20, [150, 10]),
        record(30, [], Outcome.REFUSED),
        record(40, [10], Outcome.CANCELLED, will_cancel=True),
    )
    assert (found.window_start_s, found.window_end_s) == (5.0, 65.0)
    assert found.cdfs["ttft_ms"].ms == [80.0, 150.0]
    assert found.cdfs["ttft_ms"].failed_ratio == pytest.approx(1 / 3)
    assert found.cdfs["chunk_gap_ms"].ms == [10.0, 10.0, 20.0]
    assert sum(found.rates.outcomes["ok"]) == 3
    assert list(found.rates.outcomes) == ["ok", "refused", "cancelled"]
    assert sum(found.rates.output_tokens_per_s) * found.rates.interval_s == pytest.approx(8)
    assert found.rates.attained_per_s is not None
    assert sum(found.rates.attained_per_s) * found.rates.interval_s == pytest.approx(1)


def test_several_tokens_in_a_chunk_share_its_gap() -> None:
    found = table_series(record(10, [80, 40, 9], chunk_tokens=[1, 4, 1]))
    assert found.cdfs["itl_ms"].ms == [9.0, 10.0]
    assert found.cdfs["itl_ms"].ratio == [0.2, 1.0]
    assert found.cdfs["chunk_gap_ms"].ms == [9.0, 40.0]


def test_the_waterfall_begins_with_the_longest_whatever_its_outcome() -> None:
    late = record(20, [], Outcome.TIMEOUT, ended_ns=29 * NS, headers_ns=None)
    found = table_series(record(10, [80, 10]), late).slowest
    assert [(row.row, row.outcome) for row in found] == [(2, "timeout"), (1, "ok")]
    assert found[0].phases[-1] == ("no token", 3.0, 9000.0)
    assert [name for name, _, _ in found[1].phases] == [name for name in PHASE_COLOURS if name != series.NO_TOKEN]
    assert found[1].phases[0] == ("send lag", 0.0, 1.0)
    assert found[1].phases[-1] == ("end", 90.0, 96.0)
    assert found[1].chunks_ms == [80.0, 90.0]


def test_without_an_slo_there_is_no_goodput() -> None:
    assert table_series(record(10, [80]), slo="").rates.attained_per_s is None


def test_a_run_without_requests_has_empty_curves() -> None:
    found = table_series()
    assert found.slowest == []
    assert found.flight.t_s == []
    assert found.cdfs["ttft_ms"].ms == []
