import numpy as np
import pytest
from scipy import stats

from tailrace.clock import NS_PER_S
from tailrace.errors import InvalidRequest
from tailrace.workload.arrivals import Closed, Gamma, Paced, Poisson, Schedule, Trace, parse_arrivals

SEEDS = range(12)


def gaps_s(law: Poisson | Paced | Gamma, seed: int, num: int = 5_000) -> np.ndarray:
    return np.diff(Schedule(law, seed).instants_ns(0, num), prepend=0) / NS_PER_S


@pytest.mark.parametrize(
    ("text", "law"),
    [
        ("poisson:4", Poisson(4.0)),
        ("poisson:0.25", Poisson(0.25)),
        ("constant:2.5", Paced(2.5)),
        ("gamma:4:2.5", Gamma(4.0, 2.5)),
        ("closed:16", Closed(16)),
        ("trace:a/b.jsonl", Trace("a/b.jsonl")),
        ("trace:b.csv@2.0", Trace("b.csv", 2.0)),
        ("trace:C:/x@home/b.csv", Trace("C:/x@home/b.csv")),
        ("trace:x@y@0.5", Trace("x@y", 0.5)),
    ],
)
def test_a_law_is_read_from_its_text(text: str, law: object) -> None:
    assert parse_arrivals(text) == law


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "write poisson:RATE"),
        ("poisson", "write poisson:RATE"),
        ("poisson:", "write poisson:RATE"),
        ("possion:4", "'possion' is no law of arrivals"),
        ("poisson:four", "not a number: 'four'"),
        ("poisson:nan", "must lie in"),
        ("poisson:inf", "must lie in"),
        ("poisson:0", "must lie in"),
        ("poisson:-3", "must lie in"),
        ("constant:1e9", "must lie in"),
        ("gamma:4", "write gamma:RATE:CV"),
        ("gamma:4:0", "coefficient of variation must lie in"),
        ("closed:2.5", "whole number"),
        ("closed:0", "whole number"),
        ("closed:-1", "whole number"),
        ("closed:²", "whole number"),
        ("closed:999999999999999999999999", "whole number"),
        ("trace:@2.0", "a trace needs a file"),
        ("trace:a@0", "the speed must lie in"),
        ("trace:a@nan", "the speed must lie in"),
    ],
)
def test_a_wrong_text_is_refused_and_the_wrong_part_named(text: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_arrivals(text)
    assert said in caught.value.message
    assert caught.value.param == "arrivals"


def test_poisson_gaps_are_exponential_with_the_rates_mean() -> None:
    """Kolmogorov-Smirnov on each of twelve fixed seeds. Were the law right, the least of twelve p-values lies below
    0.001 once in 83 choices of seeds; a wrong rate (5 %) or quantised gaps give 1e-6 and less."""
    p_values = [stats.kstest(gaps_s(Poisson(8.0), seed), stats.expon(scale=1 / 8).cdf).pvalue for seed in SEEDS]
    assert min(p_values) > 0.001
    wrong = [stats.kstest(gaps_s(Poisson(8.4), seed), stats.expon(scale=1 / 8).cdf).pvalue for seed in SEEDS]
    assert np.median(wrong) < 0.01


def test_poisson_gaps_keep_the_mean_over_seeds_and_are_not_rescaled_to_it() -> None:
    means = np.array([gaps_s(Poisson(8.0), seed).mean() for seed in SEEDS])
    # Standard error of the mean of 60,000 gaps: 0.41 %.
    assert means.mean() == pytest.approx(1 / 8, rel=0.015)
    assert means.std() / means.mean() == pytest.approx(1 / np.sqrt(5_000), rel=0.7)


def test_a_gap_says_nothing_of_the_next() -> None:
    for seed in SEEDS:
        gaps = gaps_s(Poisson(8.0), seed)
        # Standard error of a correlation of 5,000 independent pairs: 0.014.
        assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.05


def test_counts_of_equal_spans_are_poisson() -> None:
    instants_s = Schedule(Poisson(8.0), 3).instants_ns(0, 16_000) / NS_PER_S
    counts = np.bincount(instants_s.astype(int), minlength=1_900)[:1_900]
    assert counts.mean() == pytest.approx(8.0, rel=0.03)
    # Variance over mean is 1, standard error sqrt(2 / 1,900).
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.13)


def test_bursts_have_the_spread_they_were_given_and_the_same_rate() -> None:
    gaps = np.concatenate([gaps_s(Gamma(8.0, 2.5), seed) for seed in SEEDS])
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.04)
    assert gaps.std() / gaps.mean() == pytest.approx(2.5, rel=0.05)


def test_paced_arrivals_do_not_drift_from_their_rate() -> None:
    schedule = Schedule(Paced(3.0), 1)
    assert schedule.instant_ns(0) == 333_333_333
    assert schedule.instant_ns(299_999) == 100_000 * NS_PER_S
    gaps = np.diff(schedule.instants_ns(0, 10_000))
    assert gaps.max() - gaps.min() <= 1


def test_the_number_of_arrivals_before_an_instant_is_found() -> None:
    schedule = Schedule(Paced(10.0), 1)
    assert schedule.first_at_or_after(0) == 0
    assert schedule.first_at_or_after(NS_PER_S) == 9
    assert schedule.first_at_or_after(NS_PER_S + 1) == 10


def test_seeds_differ_and_repeat() -> None:
    one, again, other = (Schedule(Poisson(5.0), seed).instants_ns(0, 100) for seed in (1, 1, 2))
    assert (one == again).all()
    assert (one != other).all()
