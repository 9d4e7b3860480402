import random

import pytest

from tailrace.cost.step_time import PRIOR, StepCoefficients, StepFeatures, StepTimeModel

TRUTH = StepCoefficients(3.0e6, 0.5e6, 0.8e3, 3.0e3, 50.0, 0.3e6, 1.0e6)


def true_ns(features: StepFeatures, factor: float = 1.0) -> float:
    return factor * sum(each * count for each, count in zip(TRUTH, (1, *features), strict=True))


def random_features(pick: random.Random) -> StepFeatures:
    rows, context = pick.randint(1, 64), pick.randint(100, 2000)
    if pick.random() < 0.7:
        return StepFeatures(rows, rows * context, 0, 0, rows, pick.random() < 0.2)
    chunk, past = pick.choice((64, 128, 256, 512)), pick.randrange(4096)
    return StepFeatures(rows + chunk, rows * context, past, chunk * past + chunk * chunk // 2, rows, True)


def errors(model: StepTimeModel, seed: int, count: int, factor: float, outlier_ratio: float = 0.0) -> list[float]:
    """Relative errors before each observation."""
    pick, found = random.Random(seed), []
    for _ in range(count):
        features = random_features(pick)
        duration_ns = true_ns(features, factor) * pick.gauss(1, 0.05)
        found.append(abs(model.predict_ns(features) / true_ns(features, factor) - 1))
        if pick.random() < outlier_ratio:
            duration_ns *= 10
        model.observe(features, max(int(duration_ns), 1))
    return found


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("factor", [0.3, 1.0, 5.0])
def test_it_learns_a_machine_of_another_speed_and_shape(factor: float) -> None:
    found = errors(StepTimeModel(), 1, 800, factor)
    assert mean(found[400:]) < 0.06


def test_outliers_move_it_little() -> None:
    assert mean(errors(StepTimeModel(), 1, 800, 1.0, outlier_ratio=0.02)[400:]) < 0.12


def test_it_follows_a_machine_that_becomes_slower() -> None:
    model = StepTimeModel()
    errors(model, 1, 500, 1.0)
    assert mean(errors(model, 2, 100, 2.5)[50:]) < 0.2


def test_predictions_are_never_negative_and_grow_with_every_term() -> None:
    model = StepTimeModel()
    errors(model, 3, 300, 1.0)
    assert all(value >= 0 for value in model.coefficients)
    base = StepFeatures(64, 1000, 500, 2000, 3, False)
    for name in StepFeatures._fields:
        more = base._replace(**{name: True if name == "changed" else getattr(base, name) * 2})
        assert model.predict_ns(more) >= model.predict_ns(base)


def test_long_equal_decoding_does_not_spoil_what_it_says_of_prefill() -> None:
    """Twenty thousand steps of eight rows, then a chunk: right within a factor of two, and in ten steps within 15 %."""
    model, pick = StepTimeModel(), random.Random(3)
    for number in range(20_000):
        features = StepFeatures(8, 8 * (1000 + number % 100), 0, 0, 8, False)
        model.observe(features, int(true_ns(features, 5.0) * pick.gauss(1, 0.05)))
    chunk = StepFeatures(256, 8000, 2000, 500_000, 9, True)
    assert 0.5 < model.predict_ns(chunk) / true_ns(chunk, 5.0) < 2.0
    for _ in range(10):
        model.observe(chunk, int(true_ns(chunk, 5.0)))
    assert model.predict_ns(chunk) / true_ns(chunk, 5.0) == pytest.approx(1.0, abs=0.15)


def test_before_any_observation_it_says_what_the_prior_says() -> None:
    assert StepTimeModel().predict_ns(StepFeatures(tokens=1, kv_read=100, rows=1)) == int(
        PRIOR.fixed + PRIOR.token + 100 * PRIOR.kv_read + PRIOR.row
    )
