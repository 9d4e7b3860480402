"""The `[executor]` section and what its absent values become. Imports no kernels: the app process decodes it."""

from typing import Annotated

import msgspec

from tailrace.cost.hardware import (
    Decision,
    HardwareFacts,
    InferenceDtype,
    KvDtype,
    check_kernels,
    decide_inference_dtype,
    decide_kv_dtype,
    decide_threads,
)
from tailrace.cost.memory import KV_BYTES_DEFAULT, KV_RATIO_DEFAULT, KvMemory, format_bytes, parse_kv_memory
from tailrace.cost.shape import ModelShape
from tailrace.errors import ModelRefused

STEP_TOKENS_DEFAULT = {True: 512, False: 256}
"""Largest listed step, with and without bf16 instructions: 0.15 and 0.6 s of a 135M model on two cores (3,500 and 450
tokens/s measured). Larger ones gained no throughput."""


class ExecutorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the native engine uses the machine. None means: computed from the machine."""

    kv_memory: str | None = None
    """Size of the KV pool: bytes (`2GiB`, `500MB`) or a ratio of what is left after weights and scratch (`0.5`)
    (vLLM: --gpu-memory-utilization, VLLM_CPU_KVCACHE_SPACE). None: 2 GiB or four full contexts, at most half of what
    is left."""
    kv_dtype: KvDtype | None = None
    """Type of the KV cache (vLLM: --kv-cache-dtype, llama.cpp: --cache-type-k). None: bf16 where the processor has it,
    else f16; u8 (0.59 of the bytes, same quality) when memory binds. u4 (0.34 of the bytes) costs a KL of 1e-2."""
    context_tokens_max: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Tokens a sequence may reach, prompt and answer (vLLM: --max-model-len, llama.cpp: --ctx-size). None: what the
    model was trained for, less if the KV pool holds less."""
    threads: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Threads of the kernels (llama.cpp: --threads). None: physical cores within affinity and cgroup quota."""


class ResolvedExecutor(msgspec.Struct, frozen=True, kw_only=True):
    """Every value known, each with its reason."""

    kv_memory: Decision[KvMemory | None]
    """None: `cost.memory.default_kv_bytes`, once the weights are loaded."""
    kv_dtype: Decision[KvDtype]
    inference_dtype: Decision[InferenceDtype]
    threads: Decision[int]
    pin_threads: Decision[bool]


def resolve_settings(
    settings: ExecutorSettings,
    facts: HardwareFacts,
    *,
    shape: ModelShape | None = None,
    weights_bytes: int = 0,
    context_tokens_max: int | None = None,
) -> ResolvedExecutor:
    """`shape` and `weights_bytes` (on disk) let memory decide the KV type; without them it is the fast one.

    Raises ConfigError when a value contradicts the machine, ModelRefused when the kernels do not run on it.
    """
    problem = check_kernels(facts)
    if problem is not None:
        raise ModelRefused(f"the native engine does not run here: {problem}; use `llama.cpp`")
    kv_dtype = decide_kv_dtype(
        settings.kv_dtype, facts, shape=shape, weights_bytes=weights_bytes, context_tokens_max=context_tokens_max
    )
    threads = decide_threads(settings.threads, facts)
    return ResolvedExecutor(
        kv_memory=_kv_memory(settings.kv_memory),
        kv_dtype=kv_dtype,
        inference_dtype=decide_inference_dtype(kv_dtype.value, facts),
        threads=threads,
        pin_threads=_pinning(threads.value, facts),
    )


def _kv_memory(text: str | None) -> Decision[KvMemory | None]:
    if text is None:
        ratio = f"{KV_RATIO_DEFAULT:.0%}"
        return Decision(None, f"{format_bytes(KV_BYTES_DEFAULT)} or four contexts, at most {ratio} of what is left")
    return Decision(parse_kv_memory(text), "as configured")


def _pinning(threads: int, facts: HardwareFacts) -> Decision[bool]:
    """Two workers that pin would choose the same cores, so only the one that has the machine to itself does."""
    alone = threads >= facts.num_cores and len(facts.cpu_ids) == facts.num_cpus_online and facts.cpu_quota is None
    return Decision(alone, "all cores are this engine's" if alone else "other work may share the cores")


def step_tokens_max(facts: HardwareFacts, token_budget: int | None, sequences_max: int) -> int:
    """Tokens of the largest step: the budget asked for or a bearable one, and a token for each sequence."""
    return max(token_budget or STEP_TOKENS_DEFAULT[facts.has_bf16], sequences_max)
