"""`config show` and the start-up text say what was decided, and why."""

from pathlib import Path

import msgspec
import pytest
from shapes import SMOLLM2

from tailrace import config
from tailrace.cli import compose, explain
from tailrace.cli.start_text import address_lines, start_text
from tailrace.cost.hardware import HardwareFacts
from tailrace.cost.memory import MemoryPlan
from tailrace.errors import ConfigError, ModelRefused
from tailrace.model.manifest import GateFigures, ModelManifest
from tailrace.worker.channel import Ready

GIB = 1024**3
FACTS = HardwareFacts(
    architecture="x86_64",
    isa_flags=frozenset({"avx2", "fma", "f16c"}),
    num_cpus_online=8,
    cpu_ids=tuple(range(8)),
    num_cores=4,
    cpu_quota=2.0,
    memory_total_bytes=32 * GIB,
    memory_available_bytes=24 * GIB,
)
MANIFEST = ModelManifest(
    format_version=1,
    name="small",
    source="small.gguf",
    source_hash="5" * 64,
    content_hash="abcdef0123456789" * 4,
    weights_format="int8",
    weights_bytes=135_000_000,
    shape=SMOLLM2,
    end_token_ids=(2,),
    gate=GateFigures(
        kl_paged_against_stateful=1e-9, kl_decode_production={"f16": 1e-6}, kl_weights_against_source=0.0048
    ),
    created_at="2026-01-02T03:04:05+00:00",
)


def table(*assignments: str, manifest: ModelManifest | None = MANIFEST) -> dict[str, config.ConfigRow]:
    settings = compose.load_settings(None, ["model.cache_dir=cache", *assignments])
    rows = config.rows(settings.configuration, explain.resolved(settings, FACTS, manifest))
    return {f"{row.section}.{row.key}": row for row in rows}


def test_every_value_left_out_is_computed_or_says_what_will_decide() -> None:
    rows = table()
    assert (rows["executor.threads"].value, rows["executor.threads"].origin) == (2, "computed")
    assert "cgroup" in (rows["executor.threads"].reason or "")
    assert rows["executor.kv_dtype"].value == "f16"
    assert rows["executor.context_tokens_max"].value == 8192
    assert rows["model.weights"].value == "int8"
    assert "0.0048" in (rows["model.weights"].reason or "")
    assert rows["worker.served_model_name"].value == "small"
    assert rows["engine.token_budget"].value == 256
    for key in ("executor.kv_memory", "engine.token_budget", "engine.itl_target_ms"):
        assert rows[key].reason, key


def test_a_given_value_keeps_its_origin() -> None:
    rows = table("executor.threads=3", "worker.served_model_name=mine", "executor.context_tokens_max=100")
    assert (rows["executor.threads"].value, rows["executor.threads"].origin) == (3, "--set")
    assert (rows["worker.served_model_name"].value, rows["worker.served_model_name"].origin) == ("mine", "--set")
    assert rows["executor.context_tokens_max"].value == 100


def test_without_a_model_what_depends_on_it_stays_open() -> None:
    rows = table(manifest=None)
    assert rows["executor.context_tokens_max"].value is None
    assert rows["executor.kv_dtype"].value == "f16"


def test_a_setting_that_the_machine_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="bf16"):
        table("executor.kv_dtype=bf16")


def test_rows_are_json() -> None:
    assert msgspec.json.encode(list(table().values()))


def test_sections_are_named_after_folders() -> None:
    package = Path(compose.__file__).parents[1]
    for name, section in compose.SECTION_TYPES.items():
        assert section.__module__.startswith(f"tailrace.{name}.")
        assert (package / name).is_dir()


READY = Ready(
    memory=MemoryPlan(
        weights_bytes=GIB // 4,
        kv_pool_bytes=2 * GIB,
        scratch_bytes=GIB // 8,
        available_bytes=8 * GIB,
        kv_bytes_per_token=23_040,
        num_blocks=2912,
        kv_dtype="f16",
        kv_tokens=2912 * 32,
    ),
    context_tokens_max=8192,
    sequences_max=64,
    token_budget=256,
    itl_target_ms=None,
    step_timeout_ms=10_000,
    num_threads=2,
    startup_ms={},
)


def test_the_start_text_has_the_plan_the_weights_and_a_command_to_try() -> None:
    text = start_text(MANIFEST, READY, "http://127.0.0.1:8000", "small", needs_key=False)
    assert "weights int8, KL 0.0048" in text
    assert "KV pool 2.00 GiB" in text
    assert "2,912 blocks, 93,184 tokens, f16 (KL 1e-06 against f32)" in text
    assert "182 of 512, 45 of 2,048, 11 of 8,192 tokens" in text
    assert "2 threads" in text
    assert "curl http://127.0.0.1:8000/v1/chat/completions -H" in text
    assert "Authorization" not in text


def test_a_kv_type_that_decodes_wrongly_is_refused_with_the_figure() -> None:
    gate = msgspec.structs.replace(MANIFEST.gate, kl_decode_production={"f16": 1e-6, "u8": 1.4})
    manifest = msgspec.structs.replace(MANIFEST, gate=gate)
    compose.check_kv_dtype(manifest, "f16")
    compose.check_kv_dtype(manifest, "f32")  # not tried: the gate's own reference
    with pytest.raises(ModelRefused, match=r"u8 KV cache \(KL 1\.4"):
        compose.check_kv_dtype(manifest, "u8")


def test_the_command_to_try_is_quoted_for_a_shell_and_shows_no_key() -> None:
    line = address_lines("http://h:1", "it's", needs_key=True)[1]
    assert "it'\\''s" in line
    assert "Bearer KEY" in line


def test_the_budget_holds_one_token_a_sequence() -> None:
    assert table("engine.sequences_max=300")["engine.token_budget"].value == 300
