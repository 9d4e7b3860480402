"""Which GGUF files the native engine runs, their geometry, and their weights as a GGUF file of F16 tensors.

The reader behind it (openvino-genai) drops what it does not know without a word: scaled RoPE, softcaps, tensors with
other names. So everything known to matter is checked here, and the rest is refused.
"""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tailrace.cost.shape import ModelShape
from tailrace.errors import ModelRefused, ModelSourceError
from tailrace.model.gguf_file import GgufFile, GgufTensor, read_rows

_BLOCK = ("attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_EXTRA_BLOCK_TENSORS = {
    "llama": (),
    "qwen2": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    "qwen3": ("attn_q_norm.weight", "attn_k_norm.weight"),
}
_F32, _F16 = 0, 1
"""ggml's numbers of these tensor types; F16 is also the file type "mostly F16"."""
_ALIGNMENT = 32
"""The format's default, written out without a key."""


def check_gguf(source: GgufFile) -> None:
    """Raises ModelRefused for what would be run wrongly or not at all, ModelSourceError for missing parts."""
    keys, name = source.keys, source.path.name
    arch = keys.get("general.architecture")
    if arch not in _EXTRA_BLOCK_TENSORS:
        known = ", ".join(_EXTRA_BLOCK_TENSORS)
        raise _refused(name, f"has the architecture {arch!r}, and its GGUF reader knows {known}")
    if keys.get("split.count", 1) not in (0, 1):
        raise ModelRefused(f"{name} is one part of a split model; join the parts with llama-gguf-split --merge first")
    _check_rope(source, arch)
    if keys.get(f"{arch}.expert_count", 0):
        raise _refused(name, "is a mixture of experts, which its GGUF reader does not know")
    for key in (f"{arch}.attn_logit_softcapping", f"{arch}.final_logit_softcapping"):
        if keys.get(key):
            raise _refused(name, f"caps its logits ({key}), which the kernels do not do")
    window = keys.get(f"{arch}.attention.sliding_window")
    if window and window < keys.get(f"{arch}.context_length", 0):
        raise _refused(name, f"attends to a sliding window of {window} tokens, which its GGUF reader drops")
    _check_tensors(source, arch)


def _check_rope(source: GgufFile, arch: str) -> None:
    keys, name = source.keys, source.path.name
    scaling = keys.get(f"{arch}.rope.scaling.type", "none")
    factor = keys.get(f"{arch}.rope.scaling.factor", keys.get(f"{arch}.rope.scale_linear", 1.0))
    factors = any(tensor.name.startswith("rope_f") for tensor in source.tensors)
    if scaling not in ("none", "") or factor not in (0.0, 1.0) or factors:
        raise _refused(name, "scales its rotary positions (RoPE), which its GGUF reader would drop")
    shape = gguf_shape(source)
    rotated = keys.get(f"{arch}.rope.dimension_count", shape.head_dim)
    if rotated != shape.head_dim:
        raise _refused(name, f"rotates {rotated} of {shape.head_dim} dimensions, which its GGUF reader does not know")


def _check_tensors(source: GgufFile, arch: str) -> None:
    blocks = [f"{part}.weight" for part in _BLOCK] + list(_EXTRA_BLOCK_TENSORS[arch])
    num_layers = _count(source, f"{arch}.block_count")
    if num_layers * len(blocks) > len(source.tensors):  # before names are made for as many layers as a header may claim
        raise ModelSourceError(
            f"{source.path} has {len(source.tensors)} tensors, too few for {num_layers} layers; get the file again"
        )
    wanted = {f"blk.{i}.{part}" for i in range(num_layers) for part in blocks}
    wanted |= {"token_embd.weight", "output_norm.weight"}
    present = {tensor.name for tensor in source.tensors}
    missing, unknown = sorted(wanted - present), sorted(present - wanted - {"output.weight"})
    if missing:
        raise ModelSourceError(f"{source.path} lacks {len(missing)} tensors, {missing[0]} first; get the file again")
    if unknown:
        raise _refused(source.path.name, f"has tensors that its GGUF reader would leave out ({unknown[0]})")


def gguf_shape(source: GgufFile) -> ModelShape:
    """Raises ModelSourceError when the file does not say it."""
    arch = str(source.keys.get("general.architecture"))
    hidden = _count(source, f"{arch}.embedding_length")
    num_heads = _count(source, f"{arch}.attention.head_count")
    embedding = next((tensor for tensor in source.tensors if tensor.name == "token_embd.weight"), None)
    if embedding is None:
        raise ModelSourceError(f"{source.path} lacks the tensor token_embd.weight; get the file again")
    return ModelShape(
        architecture=arch,
        num_layers=_count(source, f"{arch}.block_count"),
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=_count(source, f"{arch}.attention.head_count_kv", num_heads),
        head_dim=_count(source, f"{arch}.attention.key_length", hidden // num_heads),
        intermediate_size=_count(source, f"{arch}.feed_forward_length"),
        vocab_size=embedding.shape[0],
        context_tokens_max=_count(source, f"{arch}.context_length"),
        num_parameters=source.num_parameters,
        tied_embeddings=all(tensor.name != "output.weight" for tensor in source.tensors),
    )


def write_f16(source: GgufFile, target: Path, progress: Callable[[float], None]) -> None:
    """A copy of the file whose matrices are F16 and vectors F32; keys are kept. Memory stays at tens of megabytes.

    Raises ModelRefused for a tensor type that cannot be dequantised or a weight beyond the range of F16.
    """
    with source.path.open("rb") as original, target.open("wb") as file:
        original.seek(0)
        header = bytearray(original.read(source.keys_end))
        place = source.key_places.get("general.file_type")
        if place is not None and place[1] - place[0] == 4:
            struct.pack_into("<I", header, place[0], _F16)
        file.write(header)
        _write_table(file, source)
        done = 0
        for tensor in source.tensors:
            file.write(bytes(-file.tell() % _alignment(source)))
            _write_tensor(file, source, tensor)
            done += tensor.num_elements
            progress(done / source.num_parameters)


def _write_table(file: BinaryIO, source: GgufFile) -> None:
    offset = 0
    for tensor in source.tensors:
        name = tensor.name.encode()
        dims = tensor.shape[::-1]
        file.write(struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
        file.write(struct.pack("<IQ", _target_type(tensor), offset))
        size = tensor.num_elements * (2 if _target_type(tensor) == _F16 else 4)
        offset = -(-(offset + size) // _alignment(source)) * _alignment(source)


def _write_tensor(file: BinaryIO, source: GgufFile, tensor: GgufTensor) -> None:
    for rows in read_rows(source, tensor):
        if _target_type(tensor) == _F32:
            file.write(rows.tobytes())
            continue
        with np.errstate(over="ignore"):  # an overflow shows below
            halves = rows.astype(np.float16)
        if not np.isfinite(halves).all():
            raise _refused(source.path.name, f"has weights beyond the range of F16 ({tensor.name})")
        file.write(halves.tobytes())


def _alignment(source: GgufFile) -> int:
    return int(source.keys.get("general.alignment", _ALIGNMENT))


def _target_type(tensor: GgufTensor) -> int:
    return _F32 if len(tensor.shape) == 1 else _F16


def _count(source: GgufFile, key: str, default: int | None = None) -> int:
    value: Any = source.keys.get(key, default)
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    if isinstance(value, list):
        raise _refused(source.path.name, f"differs from layer to layer ({key})")
    if not isinstance(value, int) or not 0 < value < 2**31:
        raise ModelSourceError(f"{source.path} says {value!r} for {key}; get the file again")
    return value


def _refused(name: str, why: str) -> ModelRefused:
    return ModelRefused(f"{name} {why}; run it with llama.cpp, or export the original model with optimum-cli")
