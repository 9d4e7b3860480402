"""OpenVINO IR directories, as optimum-cli writes them: what is needed, what is refused, and the geometry."""

from pathlib import Path
from typing import Any

from tailrace.cost.shape import ModelShape
from tailrace.errors import ModelRefused, ModelSourceError
from tailrace.model.text import GENERATION_CONFIG_NAME, TEMPLATE_NAME, TOKENIZER_CONFIG_NAME, TOKENIZER_NAME, read_json

IR_NAME = "openvino_model.xml"
IR_WEIGHTS_NAME = "openvino_model.bin"
CONFIG_NAME = "config.json"
_NEEDED = (IR_NAME, IR_WEIGHTS_NAME, TOKENIZER_NAME, CONFIG_NAME)
_OPTIONAL = (TOKENIZER_CONFIG_NAME, GENERATION_CONFIG_NAME, TEMPLATE_NAME)
_EXPORT = "optimum-cli export openvino -m {directory} --task text-generation-with-past --weight-format int8 OUT"


def check_directory(directory: Path) -> None:
    """Raises ModelRefused for a Hugging Face checkpoint or remote code, ModelSourceError for what is no model."""
    config = read_json(directory / CONFIG_NAME)
    if "auto_map" in config:
        raise ModelRefused(
            f"{directory.name} needs code of its own (auto_map in {CONFIG_NAME}), which is never run here; if you "
            "trust it, serve it with `vllm --trust-remote-code`"
        )
    if not (directory / IR_NAME).is_file():
        if config or any(directory.glob("*.safetensors")):
            raise ModelRefused(
                f"{directory} is a Hugging Face checkpoint: export it with `{_EXPORT.format(directory=directory)}` "
                "(pip install 'tailrace[convert]') and serve OUT, or serve it with vllm"
            )
        raise ModelSourceError(f"{directory} is no model: neither {IR_NAME} nor a GGUF file; name a .gguf file itself")
    missing = [name for name in _NEEDED if not (directory / name).is_file()]
    if missing:
        raise ModelRefused(
            f"{directory} lacks {', '.join(missing)}, which `{_EXPORT.format(directory='MODEL')}` writes: "
            "export the model again"
        )
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if _text_config(config).get(key):
            raise ModelRefused(
                f"{directory.name} caps its logits ({key}), which paged attention drops: its answers would be wrong; "
                "serve it with vllm or llama.cpp"
            )


def ir_files(directory: Path) -> list[Path]:
    """The files that make up the model, in a fixed order; all exist."""
    names = [*_NEEDED, *(name for name in _OPTIONAL if (directory / name).is_file())]
    return [directory / name for name in names]


def ir_shape(directory: Path, num_parameters: int) -> ModelShape:
    """From config.json. Raises ModelSourceError when a number is missing there."""
    config = _text_config(read_json(directory / CONFIG_NAME))
    hidden = _number(config, directory, "hidden_size", "n_embd", "d_model")
    num_heads = _number(config, directory, "num_attention_heads", "n_head")
    return ModelShape(
        architecture=str(config.get("model_type", "unknown")),
        num_layers=_number(config, directory, "num_hidden_layers", "n_layer"),
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=_optional_number(config, "num_key_value_heads") or num_heads,
        head_dim=_optional_number(config, "head_dim") or hidden // num_heads,
        intermediate_size=_optional_number(config, "intermediate_size", "ffn_dim", "n_inner") or 4 * hidden,
        vocab_size=_number(config, directory, "vocab_size"),
        context_tokens_max=_number(config, directory, "max_position_embeddings", "n_positions", "max_sequence_length"),
        num_parameters=num_parameters,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def has_rope(directory: Path) -> bool:
    """Whether config.json speaks of rotary positions. Said otherwise only by models without positions (NoPE, ALiBi)."""
    config = _text_config(read_json(directory / CONFIG_NAME))
    if config.get("alibi") or config.get("position_embedding_type") in ("nope", "alibi"):
        return False
    keys = ("rope_theta", "rope_scaling", "rope_parameters", "rotary_emb_base", "rotary_pct", "rotary_dim")
    return any(config.get(key) is not None for key in keys)


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Models with several parts keep the decoder's numbers one level down."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _optional_number(config: dict[str, Any], *keys: str) -> int | None:
    found = next((config[key] for key in keys if isinstance(config.get(key), int) and config[key] > 0), None)
    return None if found is None else int(found)


def _number(config: dict[str, Any], directory: Path, *keys: str) -> int:
    value = _optional_number(config, *keys)
    if value is None:
        raise ModelSourceError(f"{directory / CONFIG_NAME} does not give {keys[0]}; export the model again")
    return value
