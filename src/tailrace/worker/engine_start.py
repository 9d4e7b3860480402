"""Before hop 9: from an `EngineSpec` to a scheduler and an executor that are ready, phase by phase.

Phases (`Progress.phase`, `Ready.startup_ms`): load, compile, allocate, warm_up. Imports the kernels only when asked.
"""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple, assert_never

from tailrace.clock import NS_PER_MS, monotonic_ns
from tailrace.cost.step_time import PRIOR, StepCoefficients, StepFeatures, StepTimeModel
from tailrace.engine.budget import features_of
from tailrace.engine.config import EngineConfig, ResolvedConfig
from tailrace.engine.scheduler import Scheduler
from tailrace.engine.step import Executor, ExecutorLimits, StepPlan
from tailrace.errors import LABEL_TO_ERROR, StartFailed
from tailrace.executor.modeled import Fault, ModeledExecutor
from tailrace.worker.channel import EngineSpec, MemoryPlan, ModeledFaults, ModeledSpec, OpenVinoSpec, Ready

STEP_TIMEOUT_RATIO = 10.0
"""A step may take so many times the prediction for the largest one: a neighbour that takes nine tenths of the cores is
slow, not hung."""

OnPhase = Callable[[str, str], None]
"""(phase, message)"""


class StartedEngine(NamedTuple):
    scheduler: Scheduler
    executor: Executor
    ready: Ready


class _Built(NamedTuple):
    executor: Executor
    step_time: StepTimeModel
    memory: MemoryPlan
    num_threads: int


class PhaseTimer:
    """Tells each phase when it begins and keeps how long it took."""

    def __init__(self, on_phase: OnPhase) -> None:
        self._on_phase = on_phase
        self._phase: str | None = None
        self._since_ns = 0
        self.startup_ms: dict[str, float] = {}

    def begin(self, phase: str, message: str) -> None:
        self.end()
        self._on_phase(phase, message)
        self._phase, self._since_ns = phase, monotonic_ns()

    def end(self) -> None:
        if self._phase is not None:
            took_ms = (monotonic_ns() - self._since_ns) / NS_PER_MS
            self.startup_ms[self._phase] = self.startup_ms.get(self._phase, 0.0) + took_ms
        self._phase = None


def start_engine(spec: EngineSpec, on_phase: OnPhase) -> StartedEngine:
    """Raises ModelRefused, ModelSourceError, ConfigError, StartFailed, and what `on_phase` raises."""
    timer = PhaseTimer(on_phase)
    match spec.executor:
        case ModeledSpec():
            built = _build_modeled(spec.executor, spec.end_token_ids, timer)
        case OpenVinoSpec():
            built = _build_openvino(spec.executor, spec.engine, timer)
        case _:
            assert_never(spec.executor)
    scheduler = Scheduler(spec.engine, built.executor.limits, frozenset(spec.end_token_ids), built.step_time)
    timer.end()
    config, limits = scheduler.config, built.executor.limits
    ready = Ready(
        memory=built.memory,
        context_tokens_max=limits.context_tokens_max,
        sequences_max=config.sequences_max,
        token_budget=config.token_budget,
        itl_target_ms=None if config.itl_target_ns is None else config.itl_target_ns / NS_PER_MS,
        step_timeout_ms=max(spec.step_timeout_ms_min, step_timeout_ms(built.step_time, config, limits)),
        num_threads=built.num_threads,
        startup_ms=timer.startup_ms,
    )
    return StartedEngine(scheduler, built.executor, ready)


def step_timeout_ms(step_time: StepTimeModel, config: ResolvedConfig, limits: ExecutorLimits) -> int:
    """Bound on a step, from the prediction for the largest one: every sequence decodes over a full pool while one chunk
    takes the whole budget at the end of the longest context."""
    context, budget = limits.context_tokens_max, config.token_budget
    largest = StepFeatures(
        tokens=budget,
        kv_read=limits.num_blocks * limits.tokens_per_block,
        kv_repacked=limits.scratch_tokens_max,
        query_kv=budget * context,
        rows=config.sequences_max,
        changed=True,
    )
    return round(step_time.predict_ns(largest) * STEP_TIMEOUT_RATIO / NS_PER_MS)


def _build_modeled(spec: ModeledSpec, end_token_ids: tuple[int, ...], timer: PhaseTimer) -> _Built:
    timer.begin("load", "a modeled executor: no model, no kernels")
    if spec.faults.start_label is not None:
        raise LABEL_TO_ERROR.get(spec.faults.start_label, StartFailed)("the modeled start fails, as configured")
    limits = ExecutorLimits(
        num_blocks=spec.num_blocks,
        context_tokens_max=spec.context_tokens_max,
        step_sizes=spec.step_sizes,
        scratch_tokens_max=max(2 * spec.context_tokens_max, spec.step_sizes[-1]),
    )
    prior = StepCoefficients(spec.step_fixed_ms * NS_PER_MS, spec.token_us * 1_000, 0.0, 0.0, 0.0, 0.0, 0.0)
    executor = ModeledExecutor(
        limits,
        spec.vocab_size,
        duration_ns=StepTimeModel(prior).predict_ns,
        end_token_ids=end_token_ids,
        end_ratio=spec.end_ratio,
        faults=lambda plan: _modeled_fault(plan, spec.faults),
        real_time=True,
    )
    memory = MemoryPlan(
        weights_bytes=0,
        kv_pool_bytes=0,
        scratch_bytes=0,
        available_bytes=0,
        kv_bytes_per_token=0,
        num_blocks=spec.num_blocks,
        kv_dtype="none",
        kv_tokens=spec.num_blocks * limits.tokens_per_block,
    )
    return _Built(executor, StepTimeModel(prior), memory, num_threads=1)


def _modeled_fault(plan: StepPlan, faults: ModeledFaults) -> Fault | None:
    first_tokens = {piece.token_ids[0]: piece.sequence_id for piece in plan.slices if piece.start == 0}
    if faults.die_token in first_tokens:
        os.kill(os.getpid(), signal.SIGKILL)
    if faults.hang_token in first_tokens:
        threading.Event().wait()
    if faults.fail_token is not None and faults.fail_token in first_tokens:
        return Fault(failing=frozenset({first_tokens[faults.fail_token]}), message="the modeled step failed")
    return None


def _build_openvino(spec: OpenVinoSpec, engine: EngineConfig, timer: PhaseTimer) -> _Built:
    # Here, because the modeled engine must start in a tenth of a second and the kernels take longer to import.
    from tailrace.executor.start import start_executor

    observations: list[tuple[StepFeatures, int]] = []

    def observe(plan: StepPlan, duration_ns: int) -> None:
        before = observations[-1][0].tokens if observations else 0
        observations.append((features_of(plan, before), duration_ns))

    started = start_executor(
        Path(spec.model_xml),
        spec.shape,
        spec.settings,
        token_budget=engine.token_budget,
        sequences_max=engine.sequences_max,
        on_phase=timer.begin,
        observe=observe,
    )
    return _Built(started.executor, calibrated_step_time(observations), started.memory, started.num_threads)


def calibrated_step_time(observations: Sequence[tuple[StepFeatures, int]]) -> StepTimeModel:
    """A step-time model that knows this machine and model, from warm-up steps (features, nanoseconds).

    The prior is scaled as a whole first: warm-up has no long contexts, and the terms it never excites (KV read,
    repacked) are about as many times slower or faster as the others.
    """
    prior = StepTimeModel()
    ratios = [duration_ns / max(1, prior.predict_ns(features)) for features, duration_ns in observations]
    if not ratios:
        return prior
    ratio = median(ratios)
    scaled = StepTimeModel(StepCoefficients(*(value * ratio for value in PRIOR)))
    for features, duration_ns in observations:
        scaled.observe(features, duration_ns)
    return scaled
