"""Hop 10: a `StepPlan` in, a `StepOutcome` out, on the real kernels. Knows no requests and keeps nothing of a plan.

Check the plan, copy blocks, compute (`model.paged`), draw (`engine.sampling`). One thread executes; `interrupt` may
come from any other. What goes wrong in a step is an outcome, never an exception.
"""

import threading
from collections.abc import Sequence

from tailrace.clock import monotonic_ns
from tailrace.cost.memory import LOGIT_ROWS_MAX
from tailrace.engine.sampling import prompt_logprobs, sample_rows
from tailrace.engine.step import (
    ExecutorLimits,
    SliceOutcome,
    StepCut,
    StepDone,
    StepFailed,
    StepOutcome,
    StepPlan,
)
from tailrace.errors import EngineFailed
from tailrace.executor.checks import find_problem
from tailrace.executor.passes import Part, rows_wanted, split_passes
from tailrace.model.paged import Float32s, PagedModel, StepArrays, pack_step
from tailrace.request import PositionLogprobs, StepId


class OpenVinoExecutor:
    """An `Executor`. The model's caches are allocated, `limits.num_blocks` of them."""

    def __init__(self, model: PagedModel, limits: ExecutorLimits, *, logit_rows_max: int = LOGIT_ROWS_MAX) -> None:
        assert model.num_blocks == limits.num_blocks, "the pool is as large as the limits say"
        self._model = model
        self._limits = limits
        self._logit_rows_max = logit_rows_max
        self._lock = threading.Lock()
        # Guarded by the lock: which step an interrupt may cut, whether one has, whether kernels run to be cancelled.
        self._step_id: StepId | None = None
        self._is_cut = False
        self._is_running = False

    @property
    def limits(self) -> ExecutorLimits:
        return self._limits

    def execute(self, plan: StepPlan) -> StepOutcome:
        problem = find_problem(plan, self._limits, self._model.vocab_size)
        if problem is not None:
            return StepFailed(f"plan refused: {problem}")
        try:
            if self._model.is_torn:
                self._model.mend()
            for source, destination in plan.block_copies:
                self._model.copy_block(source, destination)
            with self._lock:
                self._step_id, self._is_cut = plan.step_id, False
            return self._execute_checked(plan)
        except (RuntimeError, MemoryError, EngineFailed) as error:
            return StepFailed(f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._step_id = None

    def interrupt(self, step_id: StepId) -> None:
        """`cancel` of the kernels acts on whatever runs, so it is called only while the step named does."""
        with self._lock:
            if self._step_id == step_id:
                self._is_cut = True
                if self._is_running:
                    self._model.cancel()

    def _execute_checked(self, plan: StepPlan) -> StepOutcome:
        tokens: list[tuple[int, ...]] = [()] * len(plan.slices)
        logprobs: list[tuple[PositionLogprobs, ...]] = [()] * len(plan.slices)
        prompt: list[tuple[PositionLogprobs, ...]] = [()] * len(plan.slices)
        kernel_ns = sampling_ns = 0
        for parts in split_passes(plan.slices, max(self._logit_rows_max, len(plan.slices))):
            arrays = pack_step([part.piece for part in parts], rows_wanted(parts))
            started_ns = monotonic_ns()
            logits = self._compute(arrays)
            if logits is None:
                return StepCut()
            computed_ns = monotonic_ns()
            _draw(parts, logits, tokens, logprobs)
            _score(parts, logits, prompt)
            kernel_ns += computed_ns - started_ns
            sampling_ns += monotonic_ns() - computed_ns
        outcomes = tuple(map(SliceOutcome, tokens, logprobs, prompt))
        return StepDone(outcomes=outcomes, kernel_ns=kernel_ns, sampling_ns=sampling_ns)

    def _compute(self, arrays: StepArrays) -> Float32s | None:
        """None: an interrupt came before the pass or while it ran. Starting is inside the lock, so none is lost."""
        with self._lock:
            if self._is_cut:
                return None
            self._model.start(arrays)
            self._is_running = True
        try:
            logits = self._model.wait()
        except RuntimeError:
            with self._lock:
                if self._is_cut:
                    return None
            raise
        finally:
            with self._lock:
                self._is_running = False
        with self._lock:
            return None if self._is_cut else logits


def _draw(
    parts: Sequence[Part],
    logits: Float32s,
    tokens: list[tuple[int, ...]],
    logprobs: list[tuple[PositionLogprobs, ...]],
) -> None:
    """Fills in the drawn tokens: the first rows of the logits, one for each part that draws."""
    drawing = [part for part in parts if part.sampling is not None]
    rows = [part.sampling for part in drawing if part.sampling is not None]
    for part, (token, reported) in zip(drawing, sample_rows(logits[: len(rows)], rows), strict=True):
        tokens[part.slice_index] = (token,)
        if reported is not None:
            logprobs[part.slice_index] = (reported,)


def _score(parts: Sequence[Part], logits: Float32s, prompt: list[tuple[PositionLogprobs, ...]]) -> None:
    """Appends prompt log-probabilities: the rows after those that were drawn from."""
    begin = sum(part.sampling is not None for part in parts)
    for part in parts:
        end = begin + len(part.targets)
        if end > begin:
            prompt[part.slice_index] += prompt_logprobs(logits[begin:end], part.targets, part.num_top)
        begin = end
