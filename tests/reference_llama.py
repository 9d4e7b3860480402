"""The forward pass of Llama, Qwen 2 and Qwen 3 in forty obvious lines of numpy, from a GGUF file's own tensors.

Independent of every library under test: it reads the weights with the `gguf` package and follows ggml's conventions
(Llama's rotary pairs are neighbours, Qwen's are half a head apart).
"""

from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

Array = np.ndarray


def reference_logits(path: Path, token_ids: list[int]) -> Array:
    """`[tokens, vocab]` in float32."""
    reader = GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    keys = {name.removeprefix(f"{arch}."): field.contents() for name, field in reader.fields.items() if arch in name}
    weights = {t.name: np.asarray(dequantize(t.data, t.tensor_type), dtype=np.float32) for t in reader.tensors}
    heads, kv_heads = keys["attention.head_count"], keys["attention.head_count_kv"]
    epsilon = keys["attention.layer_norm_rms_epsilon"]

    def norm(x: Array, name: str) -> Array:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * weights[name]

    def linear(x: Array, name: str) -> Array:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", np.float32(0))

    def rotate(x: Array) -> Array:  # [heads, tokens, dim]
        half = x.shape[-1] // 2
        angles = np.outer(np.arange(x.shape[1]), keys["rope.freq_base"] ** (-np.arange(half) / half))
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        low, high = (x[..., ::2], x[..., 1::2]) if arch == "llama" else (x[..., :half], x[..., half:])
        pairs = (low * cos - high * sin, low * sin + high * cos)
        return np.stack(pairs, axis=-1).reshape(x.shape) if arch == "llama" else np.concatenate(pairs, axis=-1)

    def split(x: Array, count: int) -> Array:
        return x.reshape(len(x), count, -1).transpose(1, 0, 2)

    x = weights["token_embd.weight"][token_ids]
    future = np.triu(np.full((len(x), len(x)), -np.inf, dtype=np.float32), 1)
    for layer in range(keys["block_count"]):
        name = f"blk.{layer}."
        y = norm(x, name + "attn_norm.weight")
        query, key = split(linear(y, name + "attn_q"), heads), split(linear(y, name + "attn_k"), kv_heads)
        if arch == "qwen3":
            query, key = norm(query, name + "attn_q_norm.weight"), norm(key, name + "attn_k_norm.weight")
        key = np.repeat(rotate(key), heads // kv_heads, axis=0)
        value = np.repeat(split(linear(y, name + "attn_v"), kv_heads), heads // kv_heads, axis=0)
        scores = rotate(query) @ key.transpose(0, 2, 1) / np.sqrt(np.float32(key.shape[-1])) + future
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = (scores / scores.sum(axis=-1, keepdims=True)) @ value
        x = x + linear(mixed.transpose(1, 0, 2).reshape(len(x), -1), name + "attn_output")
        y = norm(x, name + "ffn_norm.weight")
        gate = linear(y, name + "ffn_gate")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(y, name + "ffn_up"), name + "ffn_down")
    head = weights.get("output.weight", weights["token_embd.weight"])
    return norm(x, "output_norm.weight") @ head.T
