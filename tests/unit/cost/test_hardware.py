"""Decisions about threads and types, from facts alone."""

import msgspec
import pytest
from shapes import SMOLLM2

from tailrace.cost.hardware import HardwareFacts, check_kernels, decide_inference_dtype, decide_kv_dtype, decide_threads
from tailrace.cost.memory import GIB
from tailrace.errors import ConfigError

FACTS = HardwareFacts(
    architecture="x86_64",
    isa_flags=frozenset({"avx2"}),
    num_cpus_online=8,
    cpu_ids=tuple(range(8)),
    num_cores=4,
    memory_total_bytes=16 * GIB,
    memory_available_bytes=12 * GIB,
)
WITH_BF16 = msgspec.structs.replace(FACTS, isa_flags=frozenset({"avx2", "avx512_bf16"}))


def facts(**changes: object) -> HardwareFacts:
    return msgspec.structs.replace(FACTS, **changes)


@pytest.mark.parametrize(
    ("changes", "threads"),
    [
        ({}, 4),
        ({"cpu_ids": (0, 1), "num_cores": 2}, 2),
        ({"cpu_quota": 2.0}, 2),
        ({"cpu_quota": 2.9}, 2),
        ({"cpu_quota": 0.5}, 1),
        ({"cpu_quota": 64.0}, 4),
    ],
)
def test_threads_are_cores_within_affinity_and_quota(changes: dict[str, object], threads: int) -> None:
    decision = decide_threads(None, facts(**changes))
    assert decision.value == threads
    assert decision.reason


def test_threads_asked_for_are_kept_up_to_the_processors() -> None:
    assert decide_threads(8, FACTS).value == 8
    with pytest.raises(ConfigError, match="8 processors"):
        decide_threads(9, FACTS)


def test_bf16_needs_a_processor_that_has_it() -> None:
    assert decide_kv_dtype(None, WITH_BF16).value == "bf16"
    assert decide_kv_dtype("bf16", WITH_BF16).value == "bf16"
    assert decide_kv_dtype(None, facts(isa_flags=frozenset({"amx_bf16"}))).value == "bf16"
    assert decide_kv_dtype(None, FACTS).value == "f16"
    with pytest.raises(ConfigError, match="use f16"):
        decide_kv_dtype("bf16", FACTS)


def test_u8_is_taken_when_memory_binds() -> None:
    def decide(available: int) -> str:
        machine = facts(memory_available_bytes=available)
        return decide_kv_dtype(None, machine, shape=SMOLLM2, weights_bytes=135_000_000).value

    assert decide(12 * GIB) == "f16"
    # Half of (available - 2.5 x weights) holds two contexts of 8,192 x 23,040 bytes from 1.09e9 bytes on.
    assert decide(1_100_000_000) == "f16"
    assert decide(1_080_000_000) == "u8"
    assert decide(0) == "u8"


def test_a_shorter_context_needs_less_memory() -> None:
    machine = facts(memory_available_bytes=900_000_000)
    decision = decide_kv_dtype(None, machine, shape=SMOLLM2, weights_bytes=135_000_000, context_tokens_max=2048)
    assert decision.value == "f16"


def test_what_is_asked_for_wins_over_memory() -> None:
    machine = facts(memory_available_bytes=0)
    assert decide_kv_dtype("f32", machine, shape=SMOLLM2).value == "f32"


def test_an_f32_cache_makes_inference_f32() -> None:
    assert decide_inference_dtype("f32", WITH_BF16).value == "f32"
    assert decide_inference_dtype("u8", WITH_BF16).value == "bf16"
    assert decide_inference_dtype("u8", FACTS).value == "f32"


def test_available_memory_is_within_the_cgroup() -> None:
    assert facts(cgroup_memory_max_bytes=4 * GIB, cgroup_memory_used_bytes=GIB).available_bytes == 3 * GIB
    assert facts(cgroup_memory_max_bytes=64 * GIB, cgroup_memory_used_bytes=GIB).available_bytes == 12 * GIB
    assert facts(cgroup_memory_max_bytes=GIB, cgroup_memory_used_bytes=2 * GIB).available_bytes == 0
    assert FACTS.available_bytes == 12 * GIB


def test_kernels_are_for_avx2_and_sve() -> None:
    assert check_kernels(FACTS) is None
    assert check_kernels(facts(architecture="aarch64", isa_flags=frozenset({"sve"}))) is None
    assert check_kernels(facts(isa_flags=frozenset({"sse4_2"}))) is not None
    assert check_kernels(facts(architecture="aarch64", isa_flags=frozenset({"asimd"}))) is not None
