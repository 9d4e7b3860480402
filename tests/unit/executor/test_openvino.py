"""The real kernels on a tiny model: failures are outcomes, passes do not show, interrupts are aimed."""

from pathlib import Path

import numpy as np
import pytest

from tailrace.engine.step import ExecutorLimits, SamplingRow, Slice, StepCut, StepDone, StepFailed, StepPlan
from tailrace.executor.openvino import OpenVinoExecutor
from tailrace.model.paged import Float32s, PagedModel, StepArrays, load_paged
from tailrace.request import SamplingParams, SequenceId, StepId
from tiny_model import write_tiny_model

LIMITS = ExecutorLimits(num_blocks=40, context_tokens_max=600, step_sizes=(64,), scratch_tokens_max=1200)
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@pytest.fixture(scope="module")
def paged(tiny_xml: Path) -> PagedModel:
    return load_paged(tiny_xml, kv_dtype="f32", inference_dtype="f32", num_threads=2)


@pytest.fixture
def executor(paged: PagedModel) -> OpenVinoExecutor:
    paged.allocate(LIMITS.num_blocks)
    return OpenVinoExecutor(paged, LIMITS)


def plan_of(num_tokens: int, *, step: int = 1, scored: bool = False) -> StepPlan:
    tokens = np.random.default_rng(num_tokens).integers(0, 500, num_tokens).tolist()
    piece = Slice(
        sequence_id=SequenceId(1),
        start=0,
        token_ids=tokens,
        block_ids=range(-(-num_tokens // 32)),
        sampling=SamplingRow(params=GREEDY, choice=0, position=num_tokens),
        num_prompt_logprobs=2 if scored else None,
        prompt_targets=tokens[1:] if scored else (),
    )
    return StepPlan(step_id=StepId(step), slices=(piece,))


def test_a_step_tells_its_durations(executor: OpenVinoExecutor) -> None:
    outcome = executor.execute(plan_of(50))
    assert isinstance(outcome, StepDone)
    assert outcome.kernel_ns > 0
    assert outcome.sampling_ns > 0


def test_prompt_logprobs_in_several_passes_are_those_of_one(paged: PagedModel, executor: OpenVinoExecutor) -> None:
    whole = executor.execute(plan_of(150, scored=True))
    paged.allocate(LIMITS.num_blocks)
    parts = OpenVinoExecutor(paged, LIMITS, logit_rows_max=16).execute(plan_of(150, scored=True))
    assert isinstance(whole, StepDone)
    assert isinstance(parts, StepDone)
    assert parts.outcomes[0].token_ids == whole.outcomes[0].token_ids
    ours = [each.chosen for each in parts.outcomes[0].prompt_logprobs]
    theirs = [each.chosen for each in whole.outcomes[0].prompt_logprobs]
    assert [each.token_id for each in ours] == [each.token_id for each in theirs]
    assert [each.logprob for each in ours] == pytest.approx([each.logprob for each in theirs], abs=1e-4)


class _Model:
    """The real model, with something done at the start or the end of a pass."""

    def __init__(self, paged: PagedModel) -> None:
        self.paged = paged
        self.num_blocks, self.vocab_size = paged.num_blocks, paged.vocab_size
        self.num_cancels = 0
        self.on_wait = lambda: None

    def start(self, arrays: StepArrays) -> None:
        self.paged.start(arrays)

    def wait(self) -> Float32s:
        self.on_wait()
        return self.paged.wait()

    def cancel(self) -> None:
        self.num_cancels += 1
        self.paged.cancel()

    @property
    def is_torn(self) -> bool:
        return self.paged.is_torn

    def mend(self) -> None:
        self.paged.mend()


@pytest.fixture
def watched(executor: OpenVinoExecutor, paged: PagedModel) -> _Model:
    model = _Model(paged)
    executor._model = model  # type: ignore[assignment]
    return model


def test_an_interrupt_while_kernels_run_cancels_them(executor: OpenVinoExecutor, watched: _Model) -> None:
    watched.on_wait = lambda: executor.interrupt(StepId(5))
    assert isinstance(executor.execute(plan_of(500, step=5)), StepCut)
    assert watched.num_cancels == 1
    watched.on_wait = lambda: None
    assert isinstance(executor.execute(plan_of(500, step=6)), StepDone)


def test_an_interrupt_of_another_step_cancels_nothing(executor: OpenVinoExecutor, watched: _Model) -> None:
    watched.on_wait = lambda: executor.interrupt(StepId(4))
    assert isinstance(executor.execute(plan_of(500, step=5)), StepDone)
    assert watched.num_cancels == 0


def test_an_interrupt_between_passes_stops_the_next_one(paged: PagedModel) -> None:
    paged.allocate(LIMITS.num_blocks)
    split = OpenVinoExecutor(paged, LIMITS, logit_rows_max=16)
    model = _Model(paged)
    split._model = model  # type: ignore[assignment]
    num_passes = 0

    def count() -> None:
        nonlocal num_passes
        num_passes += 1
        if num_passes == 2:
            split.interrupt(StepId(1))

    model.on_wait = count
    assert isinstance(split.execute(plan_of(150, scored=True)), StepCut)
    assert num_passes == 2


def test_a_late_interrupt_does_not_reach_the_next_step(executor: OpenVinoExecutor) -> None:
    assert isinstance(executor.execute(plan_of(50, step=7)), StepDone)
    executor.interrupt(StepId(7))
    assert isinstance(executor.execute(plan_of(50, step=8)), StepDone)


def test_kernels_that_fail_are_an_outcome(executor: OpenVinoExecutor, watched: _Model) -> None:
    def fail() -> None:
        watched.paged.wait()
        raise RuntimeError("Exception from src/inference: out of scratch")

    watched.on_wait = fail
    outcome = executor.execute(plan_of(50))
    assert isinstance(outcome, StepFailed)
    assert "out of scratch" in outcome.message
    watched.on_wait = lambda: None
    assert isinstance(executor.execute(plan_of(50)), StepDone)


def test_logits_that_are_no_numbers_are_an_outcome(tmp_path: Path) -> None:
    broken = load_paged(write_tiny_model(tmp_path, scale=float("nan")), kv_dtype="f32", inference_dtype="f32")
    broken.allocate(LIMITS.num_blocks)
    outcome = OpenVinoExecutor(broken, LIMITS).execute(plan_of(50))
    assert isinstance(outcome, StepFailed)
    assert "not numbers" in outcome.message
