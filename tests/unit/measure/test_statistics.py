"""Order statistics against published vectors, and against their definitions written out."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.clock import random_stream
from tailrace.measure.statistics import (
    early_stopping_bound,
    early_stopping_t,
    fixed_samples,
    isotonic_fit,
    ks_distance,
    min_samples,
    monotone_p_value,
    mser5_truncation,
    nearest_rank,
    rank_interval,
    weighted_nearest_rank,
)

INF = math.inf


@pytest.mark.parametrize(
    ("num", "ratio", "rank"), [(100, 0.99, 99), (100, 0.5, 50), (101, 0.99, 100), (1, 0.99, 1), (1000, 0.999, 999)]
)
def test_nearest_rank_is_the_value_at_the_rounded_up_rank(num: int, ratio: float, rank: int) -> None:
    assert nearest_rank(np.arange(1.0, num + 1), ratio) == rank


@given(num=st.integers(1, 3000), thousandths=st.integers(1, 999))
def test_nearest_rank_is_exact_in_integers(num: int, thousandths: int) -> None:
    assert nearest_rank(np.arange(1.0, num + 1), thousandths / 1000) == -(-thousandths * num // 1000)


def test_failures_are_ranked_above_every_value_and_nothing_has_no_percentile() -> None:
    values = np.array([1.0, 2.0, 3.0, INF])
    assert nearest_rank(values, 0.75) == 3.0
    assert nearest_rank(values, 0.76) == INF
    with pytest.raises(ValueError, match="undefined"):
        nearest_rank(np.array([]), 0.5)


@given(
    samples=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), min_size=1, max_size=40).filter(
        lambda pairs: any(weight for _, weight in pairs)
    ),
    hundredths=st.integers(1, 99),
)
def test_weights_are_repetitions(samples: list[tuple[int, int]], hundredths: int) -> None:
    values = np.array([float(value) for value, _ in samples])
    weights = np.array([weight for _, weight in samples])
    expanded = np.sort(np.repeat(values, weights))
    ratio = hundredths / 100
    assert weighted_nearest_rank(values, weights, [ratio])[0] == nearest_rank(expanded, ratio)


def test_weights_of_nothing_have_no_percentile() -> None:
    with pytest.raises(ValueError, match="undefined"):
        weighted_nearest_rank(np.array([1.0]), np.array([0]), [0.5])


@pytest.mark.parametrize(("ratio", "num"), [(0.5, 11), (0.9, 64), (0.95, 130), (0.99, 662), (0.999, 6636)])
def test_early_stopping_begins_at_the_published_sample_count(ratio: float, num: int) -> None:
    assert min_samples(ratio) == num
    assert early_stopping_t(num - 1, ratio) is None
    assert early_stopping_t(num, ratio) == 1


@pytest.mark.parametrize(
    ("num", "allowed"),
    [(662, 1), (1000, 2), (2000, 9), (5000, 33), (10000, 77), (20000, 167), (100000, 927), (270336, 2583)],
)
def test_early_stopping_allows_the_published_number_over_the_limit(num: int, allowed: int) -> None:
    assert early_stopping_t(num, 0.99) == allowed


def test_the_bound_is_the_t_th_highest_and_absent_below_the_minimum() -> None:
    values = np.arange(1.0, 1001.0)
    assert early_stopping_bound(values, 0.99) == 999.0
    assert early_stopping_bound(values[:661], 0.99) is None
    assert early_stopping_bound(np.append(values[:-2], [INF, INF]), 0.99) == INF


@pytest.mark.parametrize(
    ("num", "ranks"),
    [(1000, (4, 18)), (2000, (12, 30)), (5000, (37, 65)), (10000, (81, 121)), (100000, (939, 1063))],
)
def test_rank_intervals_of_p99_are_the_published_ones(num: int, ranks: tuple[int, int]) -> None:
    assert rank_interval(num, 0.99) == ranks


def test_few_samples_leave_an_end_of_the_interval_open() -> None:
    assert rank_interval(100, 0.99) == (None, 4)
    assert rank_interval(100, 0.01) == (97, None)


@pytest.mark.parametrize(("ratio", "num"), [(0.9, 24576), (0.95, 57344), (0.97, 90112), (0.99, 270336)])
def test_fixed_sample_counts_are_the_published_ones(ratio: float, num: int) -> None:
    assert fixed_samples(ratio) == num


def test_mser_cuts_a_start_up_and_nothing_from_a_steady_series() -> None:
    random = random_stream(7, "mser")
    steady = random.normal(10, 1, 1000)
    start = np.concatenate([np.linspace(60, 10, 200), steady[200:]])
    drift = np.linspace(0, 100, 1000) + random.normal(0, 0.1, 1000)
    cut = [mser5_truncation(series) for series in (steady, start, drift)]
    assert cut[0] is not None
    assert cut[0] < 0.1
    assert cut[1] is not None
    assert 0.1 < cut[1] < 0.4
    assert cut[2] is not None
    assert cut[2] > 0.5


def test_mser_minimises_the_standard_error_of_the_rest() -> None:
    series = random_stream(8, "mser").exponential(1, 203)
    means = series[:200].reshape(40, 5).mean(1)
    errors = [float(((means[d:] - means[d:].mean()) ** 2).sum()) / (40 - d) ** 2 for d in range(36)]
    assert mser5_truncation(series) == int(np.argmin(errors)) / 40


def test_mser_says_nothing_of_short_series_and_refuses_failures() -> None:
    assert mser5_truncation(np.ones(49)) is None
    assert mser5_truncation(np.ones(50)) == 0.0
    with pytest.raises(ValueError, match="finite"):
        mser5_truncation(np.full(100, INF))


def test_the_distance_of_two_samples_is_the_largest_gap_of_their_distributions() -> None:
    first = np.array([1.0, 2.0, 3.0, 4.0])
    assert ks_distance(first, first[::-1]) == 0.0
    assert ks_distance(first, first + 10) == 1.0
    assert ks_distance(first, np.array([3.0, 4.0])) == 0.5
    with pytest.raises(ValueError, match="undefined"):
        ks_distance(first, np.array([]))


def test_isotonic_fit_pools_violators_by_weight() -> None:
    x = np.array([3.0, 1.0, 2.0, 2.0])
    assert isotonic_fit(x, np.array([2.0, 1.0, 5.0, 3.0])).tolist() == [10 / 3, 1.0, 10 / 3, 10 / 3]
    falling = isotonic_fit(
        np.array([1.0, 2.0, 3.0]), np.array([1.0, 0.0, 0.5]), np.array([1.0, 3.0, 1.0]), rising=False
    )
    assert falling.tolist() == [1.0, 0.125, 0.125]


@given(st.lists(st.tuples(st.integers(0, 10), st.floats(-5, 5)), min_size=1, max_size=30))
def test_isotonic_fit_is_monotone_and_keeps_the_mean(points: list[tuple[int, float]]) -> None:
    x = np.array([float(first) for first, _ in points])
    y = np.array([second for _, second in points])
    fitted = isotonic_fit(x, y)
    assert (np.diff(fitted[np.argsort(x, kind="stable")]) >= -1e-9).all()
    assert math.isclose(float(fitted.sum()), float(y.sum()), abs_tol=1e-6)


def test_a_clear_reversal_is_not_monotone_and_a_single_one_proves_nothing() -> None:
    assert monotone_p_value([5, 5, 0], [5, 5, 5]) == 1.0
    assert monotone_p_value([5, 0, 5, 0], [5, 5, 5, 5]) < 0.01
    assert monotone_p_value([1, 0, 1, 0], [1, 1, 1, 1]) > 0.1
    assert monotone_p_value([0, 2, 5], [5, 5, 5], rising=True) == 1.0
