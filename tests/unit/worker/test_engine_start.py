import pytest

from tailrace.clock import NS_PER_MS
from tailrace.cost.step_time import PRIOR, StepCoefficients, StepFeatures, StepTimeModel
from tailrace.engine.config import EngineConfig, resolve_config
from tailrace.engine.step import ExecutorLimits
from tailrace.errors import ConfigError, ModelRefused
from tailrace.worker.channel import EngineSpec, ModeledFaults, ModeledSpec
from tailrace.worker.engine_start import (
    STEP_TIMEOUT_RATIO,
    PhaseTimer,
    calibrated_step_time,
    start_engine,
    step_timeout_ms,
)

LIMITS = ExecutorLimits(num_blocks=1_000, context_tokens_max=4_096, step_sizes=(64, 512), scratch_tokens_max=8_192)
SIZES = [StepFeatures(tokens=n, query_kv=n * n // 2, rows=1, changed=True) for n in (1, 16, 64, 128, 256, 512)]


def scaled(factor: float) -> StepTimeModel:
    return StepTimeModel(StepCoefficients(*(factor * value for value in PRIOR)))


@pytest.mark.parametrize("factor", [0.2, 1.0, 6.0, 60.0])
def test_a_few_warm_up_steps_teach_the_speed_of_the_machine_also_where_they_did_not_look(factor: float) -> None:
    machine = scaled(factor)
    model = calibrated_step_time([(features, machine.predict_ns(features)) for features in SIZES])
    for features in (*SIZES, StepFeatures(tokens=64, kv_read=64_000, rows=64)):
        assert model.predict_ns(features) == pytest.approx(machine.predict_ns(features), rel=0.1)


def test_one_stalled_warm_up_step_does_not_set_the_scale() -> None:
    observations = [(features, StepTimeModel().predict_ns(features)) for features in SIZES]
    observations[2] = (SIZES[2], 40 * observations[2][1])
    model = calibrated_step_time(observations)
    assert model.predict_ns(SIZES[-1]) < 3 * StepTimeModel().predict_ns(SIZES[-1])


def test_without_a_warm_up_the_prior_stands() -> None:
    assert calibrated_step_time([]).coefficients == PRIOR


@pytest.mark.parametrize(
    "features",
    [
        StepFeatures(tokens=512, query_kv=512 * 3_584 + 512 * 513 // 2, kv_repacked=3_584, rows=1, changed=True),
        StepFeatures(tokens=64, kv_read=32_000, rows=64),
    ],
    ids=["the last chunk of the longest prompt", "a full pool decodes"],
)
def test_no_step_that_can_be_planned_is_predicted_near_the_time_out(features: StepFeatures) -> None:
    step_time = scaled(3.0)
    bound_ms = step_timeout_ms(step_time, resolve_config(EngineConfig(), LIMITS), LIMITS)
    assert step_time.predict_ns(features) * STEP_TIMEOUT_RATIO <= bound_ms * NS_PER_MS


def test_phases_are_told_as_they_begin_and_timed_until_the_next() -> None:
    told: list[tuple[str, str]] = []
    timer = PhaseTimer(lambda phase, message: told.append((phase, message)))
    timer.begin("load", "a")
    timer.begin("compile", "b")
    assert list(timer.startup_ms) == ["load"]
    timer.end()
    timer.end()
    assert told == [("load", "a"), ("compile", "b")]
    assert list(timer.startup_ms) == ["load", "compile"]
    assert all(took_ms >= 0 for took_ms in timer.startup_ms.values())


def spec(*, faults: ModeledFaults | None = None, engine: EngineConfig | None = None) -> EngineSpec:
    executor = ModeledSpec(num_blocks=8, vocab_size=10, context_tokens_max=128, faults=faults or ModeledFaults())
    return EngineSpec(executor=executor, engine=engine or EngineConfig(), step_timeout_ms_min=123_456)


def test_the_time_out_has_a_floor() -> None:
    assert start_engine(spec(), lambda _phase, _message: None).ready.step_timeout_ms == 123_456


def test_a_start_that_cannot_be_raises_the_error_it_is() -> None:
    with pytest.raises(ModelRefused):
        start_engine(spec(faults=ModeledFaults(start_label="model_refused")), lambda _phase, _message: None)
    with pytest.raises(ConfigError):
        start_engine(spec(engine=EngineConfig(sequences_max=9, token_budget=8)), lambda _phase, _message: None)
