"""The block bootstrap: what it must equal, what it must not depend on, and how often it covers the truth."""

import math

import numpy as np
import pytest
from scipy.special import ndtri

from tailrace.clock import random_stream
from tailrace.measure.distribution import to_quantile
from tailrace.measure.intervals import (
    RunSamples,
    block_length_ms,
    difference_intervals,
    percentile_draws,
    percentile_intervals,
    pooled_percentile,
    to_float,
    to_signed_quantile,
)
from tailrace.measure.statistics import nearest_rank, rank_interval

GAP_MS = 100.0
INF = math.inf


def run_of(values: np.ndarray, gap_ms: float = GAP_MS) -> RunSamples:
    return RunSamples(
        scheduled_ms=np.arange(len(values)) * gap_ms,
        values=np.asarray(values, dtype=float),
        window_ms=len(values) * gap_ms,
    )


def correlated_runs(seed: int, num_runs: int, num: int, *, kept: float, run_sd: float) -> list[RunSamples]:
    """Log-normal latencies: an autoregression of coefficient `kept` inside a run, and a shift of the whole run."""
    random = random_stream(seed, "simulated")
    noise = random.normal(0, 1, (num_runs, num))
    series = np.empty_like(noise)
    series[:, 0] = noise[:, 0]
    for i in range(1, num):
        series[:, i] = kept * series[:, i - 1] + math.sqrt(1 - kept * kept) * noise[:, i]
    return [run_of(np.exp(row)) for row in series + random.normal(0, run_sd, (num_runs, 1))]


def covers(runs: list[RunSamples], ratio: float, truth: float) -> tuple[bool, bool]:
    """Whether the block bootstrap, and whether the interval for independent samples, contains the truth."""
    interval = percentile_intervals(runs, [ratio], block_length_ms(20 * GAP_MS, runs[0].window_ms), num_resamples=200)[
        0
    ]
    pooled = np.sort(np.concatenate([run.values for run in runs]))
    upper, lower = rank_interval(len(pooled), ratio)
    assert upper is not None
    assert lower is not None
    return (
        to_float(interval.low_ms) <= truth <= to_float(interval.high_ms),
        bool(pooled[len(pooled) - lower] <= truth <= pooled[len(pooled) - upper]),
    )


@pytest.mark.parametrize("ratio", [0.5, 0.95])
def test_the_interval_covers_the_truth_where_one_for_independent_samples_does_not(ratio: float) -> None:
    truth = math.exp(math.sqrt(1 + 0.2**2) * float(ndtri(ratio)))
    found = [covers(correlated_runs(seed, 5, 400, kept=0.9, run_sd=0.2), ratio, truth) for seed in range(100)]
    assert sum(block for block, _ in found) >= 85
    assert sum(independent for _, independent in found) <= 60


def test_the_interval_covers_independent_samples_too() -> None:
    found = [
        covers(correlated_runs(seed, 5, 400, kept=0.0, run_sd=0.0), 0.9, math.exp(ndtri(0.9))) for seed in range(60)
    ]
    assert sum(block for block, _ in found) >= 51


def test_a_resample_counts_whole_blocks_of_time() -> None:
    # Two blocks, each half of the circle: the lowest of ten values is the lower of two halves' lowest.
    values = np.arange(10.0)
    drawn = percentile_draws([run_of(values)], [0.01], 5 * GAP_MS, num_resamples=500)[:, 0]
    unrolled = np.concatenate([values, values])
    halves = {min(unrolled[a : a + 5].min(), unrolled[b : b + 5].min()) for a in range(10) for b in range(10)}
    assert set(drawn) <= halves
    assert len(set(drawn)) > 1


def test_a_block_as_long_as_the_run_gives_the_run_itself_and_only_runs_vary() -> None:
    runs = [run_of(np.arange(10.0)), run_of(np.arange(100.0, 110.0))]
    drawn = percentile_draws(runs, [0.5], 10 * GAP_MS, num_resamples=400)[:, 0]
    assert set(drawn) == {4.0, 9.0, 104.0}


def test_the_seed_decides_the_interval_and_the_order_of_requests_does_not() -> None:
    runs = correlated_runs(3, 3, 300, kept=0.5, run_sd=0.1)
    shuffle = random_stream(4, "order").permutation(300)
    shuffled = [
        RunSamples(scheduled_ms=run.scheduled_ms[shuffle], values=run.values[shuffle], window_ms=run.window_ms)
        for run in runs
    ]
    first = percentile_intervals(runs, [0.5, 0.9], 2000.0, seed=5, num_resamples=200)
    assert percentile_intervals(shuffled, [0.5, 0.9], 2000.0, seed=5, num_resamples=200) == first
    assert percentile_intervals(runs, [0.5, 0.9], 2000.0, seed=6, num_resamples=200) != first


def test_the_instant_of_the_first_request_does_not_matter() -> None:
    run = correlated_runs(3, 1, 200, kept=0.5, run_sd=0.0)[0]
    later = RunSamples(scheduled_ms=run.scheduled_ms + 5e4, values=run.values, window_ms=run.window_ms)
    intervals = [percentile_intervals([each], [0.9], 2000.0, num_resamples=100) for each in (run, later)]
    assert intervals[0] == intervals[1]


def test_failures_are_infinite_and_undefined_values_are_left_out() -> None:
    values = np.arange(1.0, 1001.0)
    values[::10] = INF
    interval = percentile_intervals([run_of(values)], [0.5, 0.95], 4000.0, num_resamples=200)
    assert isinstance(interval[0].high_ms, float)
    assert interval[1].high_ms == "inf"
    undefined = np.where(np.isinf(values), np.nan, values)
    assert pooled_percentile([run_of(undefined)], 1.0) == 1000.0
    assert pooled_percentile([run_of(values)], 1.0) == INF
    assert isinstance(percentile_intervals([run_of(undefined)], [0.95], 4000.0, num_resamples=200)[0].high_ms, float)


def test_too_few_samples_have_no_upper_end() -> None:
    few = percentile_intervals([run_of(np.arange(300.0))], [0.5, 0.99], 1000.0, num_resamples=100)
    assert few[0].high_ms is not None
    assert few[1].high_ms is None
    assert few[1].low_ms is not None


def test_no_samples_have_no_interval_and_no_percentile() -> None:
    nothing = percentile_intervals([run_of(np.full(5, np.nan))], [0.5], 100.0, num_resamples=50)[0]
    assert (nothing.low_ms, nothing.high_ms) == (None, None)
    assert math.isnan(pooled_percentile([], 0.5))


def test_a_long_run_is_thinned_to_a_bound_and_keeps_its_percentile() -> None:
    values = random_stream(9, "long").exponential(1.0, 250_000)
    interval = percentile_intervals([run_of(values, 1.0)], [0.9], 20_000.0, num_resamples=40)[0]
    assert to_float(interval.low_ms) <= nearest_rank(np.sort(values), 0.9) <= to_float(interval.high_ms)


def test_blocks_are_longer_than_the_longest_request_as_far_as_the_window_allows() -> None:
    assert block_length_ms(0.0, 100_000.0) == 4_000.0
    assert block_length_ms(10_000.0, 100_000.0) > 10_000.0
    assert block_length_ms(90_000.0, 100_000.0) == 50_000.0


def test_a_difference_is_found_and_its_absence_is_not() -> None:
    runs = correlated_runs(1, 5, 400, kept=0.5, run_sd=0.02)
    same = correlated_runs(2, 5, 400, kept=0.5, run_sd=0.02)
    slower = [RunSamples(scheduled_ms=r.scheduled_ms, values=r.values * 1.5, window_ms=r.window_ms) for r in same]
    none, some = (difference_intervals(runs, other, [0.5], 4000.0, num_resamples=400)[0] for other in (same, slower))
    assert to_float(none.low) < 0 < to_float(none.high)
    assert to_float(none.ratio_low) < 1 < to_float(none.ratio_high)
    assert to_float(some.low) > 0
    assert to_float(some.ratio_low) > 1


def test_a_difference_of_failures_is_unknown_and_of_few_samples_is_not_said() -> None:
    failed = [run_of(np.full(400, INF))]
    fine = [run_of(np.arange(1.0, 401.0))]
    both = difference_intervals(failed, failed, [0.5], 4000.0, num_resamples=50)[0]
    assert (both.low, both.high, both.ratio_low, both.ratio_high) == ("-inf", "inf", 0.0, "inf")
    worse = difference_intervals(fine, failed, [0.5], 4000.0, num_resamples=50)[0]
    assert (worse.low, worse.high) == ("inf", "inf")
    few = difference_intervals(fine, [run_of(np.arange(50.0))], [0.99], 4000.0, num_resamples=50)[0]
    assert (few.low, few.high) == (None, None)


def test_quantiles_survive_json() -> None:
    assert [to_quantile(value) for value in (1.5, INF, math.nan)] == [1.5, "inf", None]
    assert to_signed_quantile(-INF) == "-inf"
    assert [to_float(value) for value in (1.5, "inf", "-inf")] == [1.5, INF, -INF]
    assert math.isnan(to_float(None))
