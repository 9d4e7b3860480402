"""From an IR to a warm executor, with a memory plan that holds."""

from pathlib import Path

import pytest

from tailrace.engine.step import StepDone, StepPlan
from tailrace.errors import ConfigError, ModelSourceError
from tailrace.executor.settings import ExecutorSettings
from tailrace.executor.start import list_step_sizes, start_executor
from tailrace.executor.warm_up import prefill_plan
from tiny_model import SHAPE

POOL = ExecutorSettings(kv_memory="2MiB", threads=1)


def ignore(plan: StepPlan, duration_ns: int) -> None:
    pass


def test_a_model_becomes_a_warm_executor_phase_by_phase(tiny_xml: Path) -> None:
    phases: list[str] = []
    observations: list[int] = []
    started = start_executor(
        tiny_xml,
        SHAPE,
        POOL,
        token_budget=64,
        sequences_max=4,
        on_phase=lambda phase, message: phases.append(phase) if message else None,
        observe=lambda plan, duration_ns: observations.append(plan.num_tokens) if duration_ns > 0 else None,
    )
    assert phases == ["load", "compile", "allocate", "warm_up"]
    assert started.warm_sizes == (1, 16, 32, 64)
    assert set(observations) == set(started.warm_sizes)
    limits = started.executor.limits
    assert limits.step_sizes == (16, 32, 64)
    assert limits.num_blocks == started.memory.num_blocks == (2 << 20) // (SHAPE.num_layers * 2 * 128 * 32)
    assert limits.context_tokens_max == min(SHAPE.context_tokens_max, started.memory.kv_tokens)
    assert limits.scratch_tokens_max >= limits.context_tokens_max
    assert started.num_threads == 1
    assert isinstance(started.executor.execute(prefill_plan(50)), StepDone)


def test_a_context_asked_for_must_fit_the_pool(tiny_xml: Path) -> None:
    with pytest.raises(ConfigError, match="fewer than one context"):
        start_executor(
            tiny_xml,
            SHAPE,
            ExecutorSettings(kv_memory="1MiB", kv_dtype="f32", threads=1, context_tokens_max=2048),
            on_phase=lambda _, __: None,
            observe=ignore,
        )


def test_missing_weights_are_said(tiny_xml: Path, tmp_path: Path) -> None:
    (tmp_path / "openvino_model.xml").write_bytes(tiny_xml.read_bytes())
    with pytest.raises(ModelSourceError, match=r"openvino_model\.xml"):
        start_executor(tmp_path / "openvino_model.xml", SHAPE, POOL, on_phase=lambda _, __: None, observe=ignore)


@pytest.mark.parametrize(("tokens_max", "sizes"), [(16, (16,)), (100, (16, 32, 64, 100)), (1, (1,))])
def test_listed_sizes_end_with_the_budget(tokens_max: int, sizes: tuple[int, ...]) -> None:
    assert list_step_sizes(tokens_max) == sizes
