"""A random two-layer Llama as a GGUF file with a byte-level tokenizer: the whole conversion runs on it in seconds."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from tailrace.model.pieces import byte_alphabet

HIDDEN, HEADS, KV_HEADS, LAYERS, FEED_FORWARD, CONTEXT = 64, 2, 1, 2, 96, 512
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ALPHABET = sorted(byte_alphabet(), key=lambda char: byte_alphabet()[char])
MERGES = [("h", "e"), ("l", "l"), ("Ġ", "w")]
TOKENS = [*SPECIALS, *ALPHABET, *(first + second for first, second in MERGES)]


def write_tiny_gguf(
    path: Path,
    *,
    arch: str = "llama",
    quantization: GGMLQuantizationType = GGMLQuantizationType.Q4_1,
    without: tuple[str, ...] = (),
    more_tensors: dict[str, tuple[int, ...]] | None = None,
    seed: int = 0,
    **keys: Any,
) -> Path:
    """`keys` override or add keys of the architecture, dots written as `__` (rope__scaling__type="yarn")."""
    writer = GGUFWriter(path, arch)
    values: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "feed_forward_length": FEED_FORWARD,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": HIDDEN // HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **{key.replace("__", "."): value for key, value in keys.items() if not key.startswith("tokenizer__")},
    }
    for key, value in values.items():
        _add(writer, f"{arch}.{key}", value)
    writer.add_file_type(3)
    _add_tokenizer(writer, keys)
    for name, tensor in _tensors(seed, more_tensors or {}).items():
        if name in without:
            continue
        kind = GGMLQuantizationType.F32 if tensor.ndim == 1 else quantization
        data = quantize(tensor, kind) if kind != GGMLQuantizationType.F32 else tensor
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: GGUFWriter, keys: dict[str, Any]) -> None:
    if keys.get("tokenizer__model") == "llama":
        _add_sentencepiece(writer)
        return
    writer.add_tokenizer_model(keys.get("tokenizer__model", "gpt2"))
    writer.add_tokenizer_pre(keys.get("tokenizer__pre", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)))
    writer.add_token_merges([" ".join(merge) for merge in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(keys.get("tokenizer__add_bos", False))
    writer.add_chat_template("{% for m in messages %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}")


def _add_sentencepiece(writer: GGUFWriter) -> None:
    pieces = ["▁", "h", "e", "▁h", "he", "▁he"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    tokens = [*tokens[: len(TOKENS) - len(pieces)], *pieces][: len(TOKENS)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * (len(tokens) - len(pieces)) + [-float(i) for i in range(len(pieces))])
    writer.add_token_types([2, 3, 3] + [6] * (len(tokens) - len(pieces) - 3) + [1] * len(pieces))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _tensors(seed: int, more: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    kv = HIDDEN // HEADS * KV_HEADS
    block = {
        "attn_norm.weight": (HIDDEN,),
        "ffn_norm.weight": (HIDDEN,),
        "attn_q.weight": (HIDDEN, HIDDEN),
        "attn_k.weight": (kv, HIDDEN),
        "attn_v.weight": (kv, HIDDEN),
        "attn_output.weight": (HIDDEN, HIDDEN),
        "ffn_gate.weight": (FEED_FORWARD, HIDDEN),
        "ffn_up.weight": (FEED_FORWARD, HIDDEN),
        "ffn_down.weight": (HIDDEN, FEED_FORWARD),
    }
    shapes = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in block.items()}
    shapes |= more
    return {
        name: (
            np.ones(shape, dtype=np.float32)
            if len(shape) == 1
            else (random.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)
        )
        for name, shape in shapes.items()
    }


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case str():
            writer.add_string(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case _:
            writer.add_array(key, value)
