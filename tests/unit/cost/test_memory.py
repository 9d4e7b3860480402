"""Bytes: the formulas against measured figures, the plan against its own arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shapes import SMOLLM2

from tailrace.cost.memory import (
    GIB,
    MIB,
    TOKENS_PER_BLOCK,
    KvMemory,
    MemoryPlan,
    format_bytes,
    kv_block_bytes,
    kv_bytes_per_token,
    parse_kv_memory,
    plan_memory,
    scratch_bytes_per_token,
    scratch_tokens_max,
    sequences_that_fit,
)
from tailrace.cost.shape import ModelShape
from tailrace.engine import step
from tailrace.errors import ConfigError


@pytest.mark.parametrize(
    ("kv_dtype", "num_bytes"), [("f32", 46_080), ("bf16", 23_040), ("f16", 23_040), ("u8", 13_680), ("u4", 7_920)]
)
def test_bytes_per_token_are_those_measured(kv_dtype: str, num_bytes: int) -> None:
    assert kv_bytes_per_token(SMOLLM2, kv_dtype) == num_bytes
    assert kv_block_bytes(SMOLLM2, kv_dtype) == num_bytes * 32


def test_the_block_is_the_kernels_block() -> None:
    assert TOKENS_PER_BLOCK == step.TOKENS_PER_BLOCK


def test_scratch_is_two_gigabytes_for_16_slices_of_32k_tokens_of_an_8b_model() -> None:
    llama = ModelShape(
        architecture="llama", num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128,
        intermediate_size=14336, vocab_size=128256, context_tokens_max=131072, num_parameters=8_030_261_248,
    )  # fmt: skip
    assert 16 * 32768 * scratch_bytes_per_token(llama, 2) == pytest.approx(2.1e9, rel=0.03)


def test_the_scratch_bound_admits_one_whole_context() -> None:
    assert scratch_tokens_max(SMOLLM2, 8192, 4, MIB) == 8192
    assert scratch_tokens_max(SMOLLM2, 8192, 4, 256 * MIB) == 256 * MIB // 1536


def plan(kv_memory: KvMemory | None, *, available: int = 8 * GIB, context: int = 8192) -> MemoryPlan:
    return plan_memory(
        available_bytes=available,
        weights_bytes=GIB,
        scratch_bytes=GIB,
        shape=SMOLLM2,
        kv_dtype="f16",
        context_tokens_max=context,
        kv_memory=kv_memory,
    )


def test_a_ratio_is_of_what_is_left() -> None:
    assert plan(KvMemory(ratio=0.5)).num_blocks == 3 * GIB // (23_040 * 32)


def test_bytes_are_taken_as_asked() -> None:
    made = plan(KvMemory(num_bytes=GIB))
    assert made.num_blocks == GIB // (23_040 * 32)
    assert made.kv_pool_bytes == made.num_blocks * 23_040 * 32 <= GIB
    assert made.kv_tokens == made.num_blocks * 32


def test_the_default_is_two_gibibytes_at_most_half_of_what_is_left() -> None:
    assert plan(None).num_blocks == 2 * GIB // (23_040 * 32)
    assert plan(None, available=3 * GIB).num_blocks == GIB // 2 // (23_040 * 32)


def test_the_default_holds_four_contexts_of_a_larger_one_if_memory_does() -> None:
    assert plan(None, available=64 * GIB, context=65_536).kv_tokens >= 4 * 65_536 - 32


def test_the_compiled_block_wins_over_the_formula() -> None:
    made = plan_memory(
        available_bytes=8 * GIB, weights_bytes=0, scratch_bytes=0, shape=SMOLLM2, kv_dtype="f16",
        context_tokens_max=8192, kv_memory=KvMemory(num_bytes=GIB), block_bytes=MIB,
    )  # fmt: skip
    assert made.num_blocks == 1024
    assert made.kv_bytes_per_token == MIB // 32


@pytest.mark.parametrize("wish", [None, KvMemory(ratio=0.9), KvMemory(num_bytes=7 * GIB), KvMemory(num_bytes=MIB // 2)])
def test_no_room_is_said_with_all_numbers(wish: KvMemory | None) -> None:
    available = 8 * GIB if wish is not None and wish.num_bytes else 2 * GIB
    with pytest.raises(ConfigError, match=r"1\.00 GiB weights, 1\.00 GiB scratch") as caught:
        plan(wish, available=available)
    assert caught.value.param == "executor.kv_memory"


@given(st.integers(3 * GIB, 64 * GIB), st.none() | st.builds(KvMemory, ratio=st.floats(0.01, 1.0)))
def test_a_plan_never_exceeds_what_is_there(available: int, wish: KvMemory | None) -> None:
    made = plan(wish, available=available)
    assert made.weights_bytes + made.scratch_bytes + made.kv_pool_bytes <= available
    assert made.num_blocks >= 1


def test_sequences_that_fit_hold_whole_blocks() -> None:
    made = plan(KvMemory(num_bytes=100 * 23_040 * 32))
    assert made.num_blocks == 100
    assert [sequences_that_fit(made, tokens) for tokens in (1, 32, 33, 3200, 3201)] == [100, 100, 50, 1, 0]


@pytest.mark.parametrize(
    ("text", "wish"),
    [
        ("2GiB", KvMemory(num_bytes=2 * GIB)),
        ("2 gib", KvMemory(num_bytes=2 * GIB)),
        ("1.5GiB", KvMemory(num_bytes=3 * GIB // 2)),
        ("500MB", KvMemory(num_bytes=500_000_000)),
        ("1073741824", KvMemory(num_bytes=GIB)),
        ("1073741824B", KvMemory(num_bytes=GIB)),
        ("0.5", KvMemory(ratio=0.5)),
        ("1", KvMemory(ratio=1.0)),
    ],
)
def test_sizes_are_read(text: str, wish: KvMemory) -> None:
    assert parse_kv_memory(text) == wish


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "-1GiB", "2", "1000", "0", "0.0", "1.5", "2GiBs", "1e9", "nan", "inf", "0x10", "²GiB", "1..5GiB",
     "9" * 30, "50%", "1 0GiB"],
)  # fmt: skip
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="give bytes"):
        parse_kv_memory(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(3 * GIB // 2, "1.50 GiB"), (GIB - 1, "1024.0 MiB"), (2048, "2.0 KiB"), (5, "5 B")],
)
def test_bytes_are_printed_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
