"""From a converted model to an executor that is ready: load, compile, allocate, warm up. The engine process calls it.

The pool is sized last, from what the weights turned out to hold in memory: kernels repack them in the first step.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tailrace.cost.memory import (
    LOGIT_ROWS_MAX,
    SCRATCH_BYTES_DEFAULT,
    TOKENS_PER_BLOCK,
    MemoryPlan,
    fits_by_length,
    format_bytes,
    plan_memory,
    scratch_tokens_max,
    step_bytes,
)
from tailrace.cost.shape import ModelShape
from tailrace.engine.config import SEQUENCES_MAX_DEFAULT
from tailrace.engine.step import ExecutorLimits
from tailrace.errors import ConfigError, ModelSourceError
from tailrace.executor.machine import read_hardware, read_resident_bytes
from tailrace.executor.openvino import OpenVinoExecutor
from tailrace.executor.process import bound_library_memory
from tailrace.executor.settings import ExecutorSettings, ResolvedExecutor, resolve_settings, step_tokens_max
from tailrace.executor.warm_up import Observe, warm_up
from tailrace.model.paged import PagedModel, Piece, pack_step, read_paged

_SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Doubling: trimming a chunk to a listed size leaves out half at most, and warming them all costs twice the largest.
Three sizes more, between these, made a start a second longer on two cores."""
_FIRST_STEP_TOKENS = 32

OnPhase = Callable[[str, str], None]
"""(phase, message), as each begins: load, compile, allocate, warm_up."""


class StartedExecutor(NamedTuple):
    executor: OpenVinoExecutor
    memory: MemoryPlan
    resolved: ResolvedExecutor
    num_threads: int
    warm_sizes: tuple[int, ...]


def list_step_sizes(tokens_max: int) -> tuple[int, ...]:
    """Ascending, the last is `tokens_max`."""
    return (*(size for size in _SIZES if size < tokens_max), tokens_max)


def start_executor(
    xml: Path,
    shape: ModelShape,
    settings: ExecutorSettings,
    *,
    token_budget: int | None = None,
    sequences_max: int | None = None,
    on_phase: OnPhase,
    observe: Observe,
) -> StartedExecutor:
    """The executor with its pool written and its step sizes warm. None takes the defaults above; without a context of
    its own the model's is cut to what the pool holds.

    Raises ModelSourceError (files), ModelRefused (kernels), ConfigError (memory or a setting), StartFailed (warm-up).
    """
    bound_library_memory()
    facts = read_hardware()
    resident_bytes = read_resident_bytes()
    context = settings.context_tokens_max or shape.context_tokens_max
    resolved = resolve_settings(
        settings, facts, shape=shape, weights_bytes=_weights_on_disk(xml), context_tokens_max=context
    )
    model = _load(xml, resolved, on_phase)
    weights_bytes = max(0, read_resident_bytes() - resident_bytes)

    rows_max = sequences_max or SEQUENCES_MAX_DEFAULT
    step_tokens = step_tokens_max(facts, token_budget, rows_max)
    memory, scratch_tokens = _plan(
        model, shape, resolved, facts.available_bytes, weights_bytes, context, step_tokens, rows_max
    )
    if settings.context_tokens_max is not None:
        _check_context(memory, settings.context_tokens_max)
    on_phase("allocate", describe_memory(memory, context))
    model.allocate(memory.num_blocks)
    limits = ExecutorLimits(
        num_blocks=memory.num_blocks,
        context_tokens_max=min(context, memory.kv_tokens),
        step_sizes=list_step_sizes(step_tokens),
        scratch_tokens_max=scratch_tokens,
    )
    executor = OpenVinoExecutor(model, limits)
    on_phase("warm_up", f"steps of {', '.join(map(str, limits.step_sizes))} tokens, at most 5 s")
    warm_sizes = warm_up(executor, limits.step_sizes, observe=observe)
    return StartedExecutor(executor, memory, resolved, model.num_threads, warm_sizes)


def _plan(
    model: PagedModel,
    shape: ModelShape,
    resolved: ResolvedExecutor,
    available_bytes: int,
    weights_bytes: int,
    context_tokens_max: int,
    step_tokens: int,
    rows_max: int,
) -> tuple[MemoryPlan, int]:
    """The memory plan from what the compiled model says of itself, and the bound on repacked past, in tokens."""
    element_bytes = 2 if model.inference_dtype in ("bf16", "f16") else 4
    scratch_tokens = scratch_tokens_max(shape, context_tokens_max, element_bytes, SCRATCH_BYTES_DEFAULT)
    memory = plan_memory(
        available_bytes=available_bytes,
        weights_bytes=weights_bytes,
        scratch_bytes=step_bytes(
            shape,
            tokens_max=step_tokens,
            rows_max=max(LOGIT_ROWS_MAX, rows_max),
            scratch_tokens=scratch_tokens,
            element_bytes=element_bytes,
        ),
        shape=shape,
        kv_dtype=model.kv_dtype,
        context_tokens_max=context_tokens_max,
        kv_memory=resolved.kv_memory.value,
        block_bytes=model.block_bytes,
    )
    return memory, scratch_tokens


def _check_context(memory: MemoryPlan, context_tokens_max: int) -> None:
    """A context that was asked for must fit, where one that was not is cut."""
    if memory.kv_tokens < context_tokens_max:
        raise ConfigError(
            f"the KV pool of {format_bytes(memory.kv_pool_bytes)} holds {memory.kv_tokens} tokens, fewer than one "
            f"context of {context_tokens_max}: raise executor.kv_memory, set executor.kv_dtype to u8 or lower "
            "context_tokens_max",
            param="executor.kv_memory",
        )


def describe_memory(memory: MemoryPlan, context_tokens_max: int) -> str:
    """One line of the plan, with how many sequences of some lengths fit."""
    fits = ", ".join(f"{num} of {tokens} tokens" for tokens, num in fits_by_length(memory, context_tokens_max))
    return (
        f"{format_bytes(memory.available_bytes)} available: weights {format_bytes(memory.weights_bytes)}, "
        f"scratch {format_bytes(memory.scratch_bytes)}, KV pool {format_bytes(memory.kv_pool_bytes)} in "
        f"{memory.kv_dtype} = {memory.num_blocks} blocks = {memory.kv_tokens} tokens; sequences that fit: {fits}"
    )


def _weights_on_disk(xml: Path) -> int:
    try:
        return xml.with_suffix(".bin").stat().st_size
    except OSError as error:
        raise ModelSourceError(
            f"the weights beside {xml.name} cannot be read ({error.strerror}); convert again"
        ) from error


def _load(xml: Path, resolved: ResolvedExecutor, on_phase: OnPhase) -> PagedModel:
    """Compiled, with its first step behind it: from then on the weights hold what they hold."""
    on_phase("load", f"{xml.parent.name}/{xml.name}")
    graph = read_paged(xml)
    on_phase(
        "compile",
        f"{resolved.inference_dtype.value} inference, {resolved.kv_dtype.value} KV ({resolved.kv_dtype.reason}), "
        f"{resolved.threads.value} threads ({resolved.threads.reason})",
    )
    model = PagedModel(
        graph,
        kv_dtype=resolved.kv_dtype.value,
        inference_dtype=resolved.inference_dtype.value,
        num_threads=resolved.threads.value,
        pin_threads=resolved.pin_threads.value,
    )
    model.allocate(_FIRST_STEP_TOKENS // TOKENS_PER_BLOCK)
    model.step(pack_step([Piece([0] * _FIRST_STEP_TOKENS, 0, [0])], [0]))
    return model
