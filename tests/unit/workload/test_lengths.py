import math

import msgspec
import numpy as np
import pytest

from tailrace.workload.lengths import (
    EMPIRICAL_VALUES_MAX,
    Constant,
    Empirical,
    Exponential,
    Law,
    Lognormal,
    Uniform,
    clipped_ratio,
    mean,
)


def sampled(law: Law, num: int = 20_000) -> np.ndarray:
    rng = np.random.default_rng(1)
    return np.array([law.sample(rng) for _ in range(num)])


def test_a_lognormal_law_has_the_median_and_p95_it_was_given() -> None:
    drawn = sampled(Lognormal(median=100, p95=400))
    # Standard errors of these quantiles at 20,000 draws are about 0.8 and 1.5 %.
    assert np.quantile(drawn, 0.5) == pytest.approx(100, rel=0.04)
    assert np.quantile(drawn, 0.95) == pytest.approx(400, rel=0.06)


def test_a_lognormal_law_by_mean_and_sigma_has_them() -> None:
    drawn = sampled(Lognormal(mean=100, sigma=0.5))
    assert drawn.mean() == pytest.approx(100, rel=0.02)
    assert np.log(drawn).std() == pytest.approx(0.5, rel=0.03)


def test_an_exponential_law_has_its_mean_and_as_much_spread() -> None:
    drawn = sampled(Exponential(mean=3))
    assert drawn.mean() == pytest.approx(3, rel=0.04)
    assert drawn.std() == pytest.approx(3, rel=0.06)


def test_a_uniform_law_stays_in_its_bounds_and_reaches_both_ends() -> None:
    drawn = sampled(Uniform(low=10, high=20))
    assert 10 <= drawn.min() < 10.1
    assert 19.9 < drawn.max() <= 20


def test_listed_values_come_as_often_as_their_weights_say_and_never_without_weight() -> None:
    drawn = sampled(Empirical(values=(5, 1, 9, 3), weights=(3, 0, 0, 1)))
    assert set(drawn) == {5, 3}
    assert (drawn == 5).mean() == pytest.approx(0.75, abs=0.02)
    assert (sampled(Empirical(values=(1, 2))) == 1).mean() == pytest.approx(0.5, abs=0.02)


def test_a_list_at_its_longest_is_looked_up_and_not_walked() -> None:
    """A walk of 100,000 weights takes a second for every hundred draws, and a mean is 4,096 of them."""
    law = Empirical(values=tuple(range(EMPIRICAL_VALUES_MAX)), weights=(1.0,) * EMPIRICAL_VALUES_MAX)
    assert mean(law) == pytest.approx((EMPIRICAL_VALUES_MAX - 1) / 2, rel=1e-3)
    assert law == Empirical(values=law.values, weights=law.weights), "what is kept for look-ups is no part of the value"


@pytest.mark.parametrize("u", [2.0**-54, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize(
    "law",
    [
        Constant(value=4),
        Uniform(low=1, high=2),
        Lognormal(median=10, p95=30),
        Lognormal(mean=10, sigma=1),
        Exponential(mean=2),
        Empirical(values=(1, 2, 3), weights=(0, 1, 0)),
    ],
)
def test_a_quantile_is_finite_and_never_negative_at_either_end(law: Law, u: float) -> None:
    assert math.isfinite(law.quantile(u))
    assert law.quantile(u) >= 0


def test_draws_beyond_the_limits_take_the_limits_value_and_their_share_is_known() -> None:
    law = Uniform(low=0, high=100, min=10, max=70)
    drawn = sampled(law)
    assert drawn.min() == 10
    assert drawn.max() == 70
    assert clipped_ratio(law) == (pytest.approx(0.1, abs=1e-3), pytest.approx(0.3, abs=1e-3))
    assert clipped_ratio(Uniform(low=0, high=100)) == (0, 0)


def test_the_mean_is_that_of_clipped_draws() -> None:
    law = Lognormal(median=100, p95=400, max=200)
    assert mean(law) == pytest.approx(sampled(law).mean(), rel=0.01)
    assert mean(Constant(value=2.5)) == 2.5


def test_the_mean_of_whole_draws_counts_what_is_rounded_and_lifted_to_one() -> None:
    assert mean(Constant(value=0.2), whole=True) == 1
    assert mean(Constant(value=0.2), whole=True, at_least=0) == 0
    assert mean(Empirical(values=(1, 3)), whole=True) == 2


def test_a_counted_draw_is_whole_and_at_least_one() -> None:
    rng = np.random.default_rng(1)
    assert Constant(value=0).sample_count(rng) == 1
    assert Constant(value=0).sample_count(rng, at_least=0) == 0
    assert Constant(value=7.4).sample_count(rng) == 7


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"law": "constant", "value": -1}, "value -1"),
        ({"law": "constant", "value": float("nan")}, "value nan"),
        ({"law": "constant", "value": 1e9}, "at most"),
        ({"law": "uniform", "low": 5, "high": 4}, "high 4 must be at least 5"),
        ({"law": "lognormal", "median": 100}, "median and p95, or mean and sigma"),
        ({"law": "lognormal", "median": 100, "p95": 200, "mean": 3}, "median and p95, or mean and sigma"),
        ({"law": "lognormal", "median": 100, "p95": 50}, "p95 50"),
        ({"law": "lognormal", "mean": 100, "sigma": 9}, "sigma 9"),
        ({"law": "exponential", "mean": 0}, "mean 0 must be above 0"),
        ({"law": "empirical", "values": []}, "values must be"),
        ({"law": "empirical", "values": [1, 2], "weights": [1]}, "one weight a value"),
        ({"law": "empirical", "values": [1, 2], "weights": [0, 0]}, "all weights are zero"),
        ({"law": "constant", "value": 1, "min": 5, "max": 4}, "min 5 is above max 4"),
        ({"law": "constant", "value": 1, "min": float("inf")}, "min inf"),
    ],
)
def test_a_law_without_sense_is_refused_and_says_which_figure(fields: dict[str, object], said: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=said):
        msgspec.convert(fields, Law)
