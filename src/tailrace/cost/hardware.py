"""What the machine can do, and what follows from it: threads, KV type. Pure: `executor.machine` reads the facts."""

from typing import Generic, Literal, TypeVar

import msgspec

from tailrace.cost.memory import KV_RATIO_DEFAULT, format_bytes, kv_bytes_per_token
from tailrace.cost.shape import ModelShape
from tailrace.errors import ConfigError

KvDtype = Literal["bf16", "f16", "u8", "u4", "f32"]
InferenceDtype = Literal["bf16", "f32"]

_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
_WEIGHTS_IN_MEMORY = 2.5
"""Resident bytes after the first step, relative to the weights on disk: the plugin keeps a repacked copy
(654 MB for 269 MB of f16 weights, measured)."""
_CONTEXTS_IN_16_BITS_MIN = 2
"""Memory binds when the pool holds fewer full contexts than this in 16 bits."""

T = TypeVar("T")


class Decision(msgspec.Struct, Generic[T], frozen=True):
    """A value and the sentence that explains it."""

    value: T
    reason: str


class HardwareFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Of the machine and of the cgroup that this process is in."""

    architecture: str
    """As `uname -m`: x86_64, aarch64."""
    isa_flags: frozenset[str]
    """As /proc/cpuinfo spells them."""
    num_cpus_online: int
    cpu_ids: tuple[int, ...]
    """Logical processors that this process may run on."""
    num_cores: int
    """Physical cores among `cpu_ids`: two hyperthreads are one."""
    cpu_quota: float | None = None
    """Processors' worth of time that the cgroup allows; None: no limit."""
    memory_total_bytes: int
    memory_available_bytes: int
    cgroup_memory_max_bytes: int | None = None
    cgroup_memory_used_bytes: int | None = None
    """Without file pages that the kernel would give back."""

    @property
    def available_bytes(self) -> int:
        """What this process may still take."""
        if self.cgroup_memory_max_bytes is None:
            return self.memory_available_bytes
        left = self.cgroup_memory_max_bytes - (self.cgroup_memory_used_bytes or 0)
        return max(0, min(self.memory_available_bytes, left))

    @property
    def has_bf16(self) -> bool:
        return not _BF16_FLAGS.isdisjoint(self.isa_flags)


def check_kernels(facts: HardwareFacts) -> str | None:
    """Why the native kernels do not run here; None: they do."""
    if facts.architecture in ("x86_64", "AMD64"):
        return None if "avx2" in facts.isa_flags else "this processor has no AVX2"
    if facts.architecture in ("aarch64", "arm64"):
        return None if "sve" in facts.isa_flags else "paged attention on ARM needs SVE"
    return f"the kernels do not run on {facts.architecture}"


def decide_threads(asked: int | None, facts: HardwareFacts) -> Decision[int]:
    """Physical cores within affinity and quota: kernels ignore a quota, and one throttled thread stalls the step."""
    if asked is not None:
        if asked > len(facts.cpu_ids):
            raise ConfigError(
                f"executor.threads is {asked} but this process may run on {len(facts.cpu_ids)} processors",
                param="executor.threads",
            )
        return Decision(asked, "as configured")
    if facts.cpu_quota is not None and facts.cpu_quota < facts.num_cores:
        return Decision(max(1, int(facts.cpu_quota)), f"the cgroup allows {facts.cpu_quota:g} processors")
    if len(facts.cpu_ids) < facts.num_cpus_online:
        return Decision(facts.num_cores, f"cores of the {len(facts.cpu_ids)} processors that affinity allows")
    return Decision(facts.num_cores, "one for each physical core")


def decide_kv_dtype(
    asked: KvDtype | None,
    facts: HardwareFacts,
    *,
    shape: ModelShape | None = None,
    weights_bytes: int = 0,
    context_tokens_max: int | None = None,
) -> Decision[KvDtype]:
    """16 bits for speed, u8 when memory binds. Without a `shape` memory is not looked at.

    Raises ConfigError when the processor cannot run what is asked for: the CPU plugin would refuse it at compilation.
    """
    if asked is not None:
        if asked == "bf16" and not facts.has_bf16:
            raise ConfigError(
                "executor.kv_dtype is bf16 but this processor has neither AVX512-BF16 nor AMX: "
                "use f16 (the same bytes, fast here) or u8 (0.59 of the bytes)",
                param="executor.kv_dtype",
            )
        return Decision(asked, "as configured")
    fast: KvDtype = "bf16" if facts.has_bf16 else "f16"
    why = "the processor computes in bf16" if facts.has_bf16 else "16 bits without bf16 instructions"
    if shape is None:
        return Decision(fast, why)
    left = int((facts.available_bytes - weights_bytes * _WEIGHTS_IN_MEMORY) * KV_RATIO_DEFAULT)
    context = (context_tokens_max or shape.context_tokens_max) * kv_bytes_per_token(shape, fast)
    if left < _CONTEXTS_IN_16_BITS_MIN * context:
        return Decision(
            "u8",
            f"memory binds: {format_bytes(max(left, 0))} hold fewer than {_CONTEXTS_IN_16_BITS_MIN} contexts in {fast}",
        )
    return Decision(fast, why)


def decide_inference_dtype(kv_dtype: KvDtype, facts: HardwareFacts) -> Decision[InferenceDtype]:
    """bf16 where the processor computes in it, except that an f32 cache needs f32 inference."""
    if kv_dtype == "f32":
        return Decision("f32", "an f32 KV cache needs f32 inference")
    if facts.has_bf16:
        return Decision("bf16", "the processor computes in bf16")
    return Decision("f32", "no bf16 instructions")
