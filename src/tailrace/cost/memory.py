"""Where the bytes go: weights, KV pool, scratch. Pure; formulas are checked against the compiled kernels in tests.

KV layouts of one head and layer in a block of 32 tokens (compiled ports of OpenVINO 2026.4.1; D = head_dim)::

    type        keys               values             bytes
    f32         32 x D x 4         32 x D x 4         256 D
    bf16, f16   32 x D x 2         32 x D x 2         128 D
    u8          40 x D             32 x (D + 8)       72 D + 256     keys by channel: 8 rows of scales and zero points
    u4          48 x D / 2         32 x (D + 16) / 2  40 D + 256
"""

import msgspec

from tailrace.cost.shape import ModelShape
from tailrace.errors import ConfigError

TOKENS_PER_BLOCK = 32
"""The kernels' block, as in `engine.step` (which lies above this folder; a test holds them equal)."""
GIB = 1024**3
MIB = 1024**2

_HEAD_BLOCK_BYTES = {"f32": (256, 0), "bf16": (128, 0), "f16": (128, 0), "u8": (72, 256), "u4": (40, 256)}
"""Factor of head_dim and constant, from the table above."""

SCRATCH_BYTES_DEFAULT = 256 * MIB
"""For repacking past KV: 21 chunks of 8,192 tokens at once for a 135M model in f32, two of 32k for an 8B in bf16."""
KV_BYTES_DEFAULT = 2 * GIB
"""Zeroing it takes under two seconds at start; larger pools are asked for."""
KV_CONTEXTS_DEFAULT = 4
"""For a larger model the default pool holds at least this many full contexts, if half of the free memory does."""
KV_RATIO_DEFAULT = 0.5
EXPLAINED_TOKENS = (512, 2048)
"""Lengths of the sequences that a plan is explained with, beside the whole context."""
LOGIT_ROWS_MAX = 256
"""Rows of logits that a pass asks for, beyond one a slice: prompt log-probabilities go in several passes."""


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where the bytes go, as printed at start."""

    weights_bytes: int
    kv_pool_bytes: int
    scratch_bytes: int
    available_bytes: int
    """What the machine or its cgroup leaves to this process."""
    kv_bytes_per_token: int
    num_blocks: int
    kv_dtype: str
    kv_tokens: int


class KvMemory(msgspec.Struct, frozen=True):
    """A wish for the size of the pool: bytes, or a ratio of what is left after weights and scratch. One is None."""

    num_bytes: int | None = None
    ratio: float | None = None


_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def parse_kv_memory(text: str) -> KvMemory:
    """`2GiB`, `500MB`, `1073741824`, or a ratio above 0 and up to 1 such as `0.5`. Raises ConfigError."""
    number = text.strip().rstrip("bBiIkKmMgGtT").strip()
    unit = text.strip()[len(number) :].strip().lower()
    problem = ConfigError(
        f"executor.kv_memory is {text!r}: give bytes (2GiB, 500MB, 1073741824) or a ratio of the memory left (0.5)",
        param="executor.kv_memory",
    )
    if not number.replace(".", "", 1).isdecimal() or not number.isascii() or len(number) > 20 or unit not in _UNITS:
        raise problem
    value = float(number)
    if unit == "" and 0 < value <= 1:
        return KvMemory(ratio=value)
    if value * _UNITS[unit] < MIB:
        raise problem
    return KvMemory(num_bytes=int(value * _UNITS[unit]))


def kv_block_bytes(shape: ModelShape, kv_dtype: str) -> int:
    """Bytes of one block of 32 tokens over all layers."""
    factor, constant = _HEAD_BLOCK_BYTES[kv_dtype]
    return shape.num_layers * shape.num_kv_heads * (factor * shape.head_dim + constant)


def kv_bytes_per_token(shape: ModelShape, kv_dtype: str) -> int:
    """Rounded up."""
    return -(-kv_block_bytes(shape, kv_dtype) // TOKENS_PER_BLOCK)


def scratch_bytes_per_token(shape: ModelShape, element_bytes: int) -> int:
    """One layer's keys and values of one token, as a slice of several tokens repacks its context.

    A step needs that for (multi-token slices) x (longest context among them): the kernels pad all to the longest.
    `element_bytes` is the inference type's: 4 for f32, 2 for bf16 and f16.
    """
    return 2 * shape.num_kv_heads * shape.head_dim * element_bytes


def scratch_tokens_max(shape: ModelShape, context_tokens_max: int, element_bytes: int, scratch_bytes: int) -> int:
    """Bound on (multi-token slices) x (longest context): what `scratch_bytes` holds, at least one whole context."""
    return max(context_tokens_max, scratch_bytes // scratch_bytes_per_token(shape, element_bytes))


def step_bytes(shape: ModelShape, *, tokens_max: int, rows_max: int, scratch_tokens: int, element_bytes: int) -> int:
    """Upper estimate of what a step allocates besides weights and KV: repacked past, activations, logits (f32).

    Activations: the widest stretch of a layer holds the residual, the normed input and the two halves of the MLP.
    """
    activations = tokens_max * (2 * shape.hidden_size + 3 * shape.intermediate_size) * 4
    logits = 2 * rows_max * shape.vocab_size * 4  # the output and one row-wise copy for the draws
    return scratch_tokens * scratch_bytes_per_token(shape, element_bytes) + activations + logits


def default_kv_bytes(left_bytes: int, shape: ModelShape, kv_dtype: str, context_tokens_max: int) -> int:
    """The pool when nothing is asked for."""
    contexts = KV_CONTEXTS_DEFAULT * context_tokens_max * kv_bytes_per_token(shape, kv_dtype)
    return min(max(KV_BYTES_DEFAULT, contexts), int(left_bytes * KV_RATIO_DEFAULT))


def plan_memory(
    *,
    available_bytes: int,
    weights_bytes: int,
    scratch_bytes: int,
    shape: ModelShape,
    kv_dtype: str,
    context_tokens_max: int,
    kv_memory: KvMemory | None,
    block_bytes: int | None = None,
) -> MemoryPlan:
    """The split of `available_bytes`, which is what the process may use with weights and all. `block_bytes` is the
    compiled model's, where there is one (some models cache more heads than their configuration says).

    Raises ConfigError when not even one block is left, or when the bytes asked for are not there.
    """
    left = available_bytes - weights_bytes - scratch_bytes
    match kv_memory:
        case None:
            pool = default_kv_bytes(left, shape, kv_dtype, context_tokens_max)
        case KvMemory(num_bytes=int(asked)):
            pool = asked
        case KvMemory(ratio=float(ratio)):
            pool = int(left * ratio)
        case _:
            raise AssertionError("a KV memory wish has bytes or a ratio")
    block = block_bytes or kv_block_bytes(shape, kv_dtype)
    num_blocks = max(pool, 0) // block
    if num_blocks < 1 or pool > left:
        raise ConfigError(
            f"no room for the KV pool: {format_bytes(available_bytes)} available, {format_bytes(weights_bytes)} "
            f"weights, {format_bytes(scratch_bytes)} scratch, so {format_bytes(max(left, 0))} left, "
            f"{format_bytes(max(pool, block))} wanted; lower executor.kv_memory, take a smaller model "
            "or give the process more memory",
            param="executor.kv_memory",
        )
    return MemoryPlan(
        weights_bytes=weights_bytes,
        kv_pool_bytes=num_blocks * block,
        scratch_bytes=scratch_bytes,
        available_bytes=available_bytes,
        kv_bytes_per_token=-(-block // TOKENS_PER_BLOCK),
        num_blocks=num_blocks,
        kv_dtype=kv_dtype,
        kv_tokens=num_blocks * TOKENS_PER_BLOCK,
    )


def sequences_that_fit(plan: MemoryPlan, tokens: int) -> int:
    """How many sequences of `tokens` tokens (prompt and answer) the pool holds when nothing is shared."""
    return plan.num_blocks // -(-tokens // TOKENS_PER_BLOCK)


def fits_by_length(plan: MemoryPlan, context_tokens_max: int) -> list[tuple[int, int]]:
    """(tokens, sequences that fit) for the lengths a plan is explained with, the whole context last."""
    lengths = [*(tokens for tokens in EXPLAINED_TOKENS if tokens < context_tokens_max), context_tokens_max]
    return [(tokens, sequences_that_fit(plan, tokens)) for tokens in lengths]


def format_bytes(num_bytes: int) -> str:
    """`1.50 GiB`, `23.4 MiB`, `512 B`."""
    for unit, size, digits in (("GiB", GIB, 2), ("MiB", MIB, 1), ("KiB", 1024, 1)):
        if num_bytes >= size:
            return f"{num_bytes / size:.{digits}f} {unit}"
    return f"{num_bytes} B"
