"""Absent values become computed ones, each with its reason; values that contradict the machine are refused."""

import subprocess
import sys

import msgspec
import pytest

from tailrace.cost.hardware import HardwareFacts
from tailrace.cost.memory import KvMemory
from tailrace.errors import ConfigError, ModelRefused
from tailrace.executor.settings import ExecutorSettings, resolve_settings

FACTS = HardwareFacts(
    architecture="x86_64",
    isa_flags=frozenset({"avx2"}),
    num_cpus_online=4,
    cpu_ids=(0, 1, 2, 3),
    num_cores=4,
    memory_total_bytes=16 << 30,
    memory_available_bytes=12 << 30,
)


def test_every_default_has_a_reason() -> None:
    resolved = resolve_settings(ExecutorSettings(), FACTS)
    assert resolved.kv_dtype.value == "f16"
    assert resolved.inference_dtype.value == "f32"
    assert resolved.threads.value == 4
    assert resolved.pin_threads.value
    assert resolved.kv_memory.value is None
    for name in resolved.__struct_fields__:
        assert getattr(resolved, name).reason


def test_what_is_configured_is_kept() -> None:
    settings = ExecutorSettings(kv_memory="0.25", kv_dtype="u4", threads=3)
    resolved = resolve_settings(settings, FACTS)
    assert resolved.kv_memory.value == KvMemory(ratio=0.25)
    assert (resolved.kv_dtype.value, resolved.threads.value) == ("u4", 3)
    assert not resolved.pin_threads.value, "pinned threads of two workers would meet on the same cores"


@pytest.mark.parametrize(
    ("changes", "isa_flags"),
    [
        ({"architecture": "riscv64"}, {"avx2"}),
        ({"architecture": "x86_64"}, {"sse2"}),
        ({"architecture": "aarch64"}, {"asimd"}),
    ],
)
def test_a_machine_without_kernels_is_refused_with_another_engine(changes: dict[str, str], isa_flags: set[str]) -> None:
    facts = msgspec.structs.replace(FACTS, isa_flags=frozenset(isa_flags), **changes)
    with pytest.raises(ModelRefused, match=r"llama\.cpp"):
        resolve_settings(ExecutorSettings(), facts)


@pytest.mark.parametrize("text", ['{"kv_dtype": "q8"}', '{"threads": 0}', '{"kv_memory": 5}', '{"kv_type": "u8"}'])
def test_wrong_sections_do_not_decode(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=ExecutorSettings)


def test_a_wrong_size_is_refused_when_resolved() -> None:
    with pytest.raises(ConfigError, match="2GiB"):
        resolve_settings(ExecutorSettings(kv_memory="lots"), FACTS)


def test_the_section_is_decoded_without_the_kernels() -> None:
    """The app process has no use for 300 MB of kernels."""
    code = "import sys, tailrace.executor.settings, tailrace.executor.machine; sys.exit('openvino' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
