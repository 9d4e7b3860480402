"""What is known about a prepared model: one `manifest.json` beside its IR in the cache."""

import msgspec

from tailrace.cost.shape import ModelShape
from tailrace.request import SamplingDefaults

MANIFEST_NAME = "manifest.json"
KL_DECODE_MAX = 0.05
"""Of decode at a KV dtype against f32: u8 costs about 1e-3 and u4 1.5e-2 on a small model; a broken combination of
layout and kernels gave 1.4."""


class GateFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Mean KL divergences in nats that the import gate measured."""

    kl_paged_against_stateful: float
    """f32 inference, prefill, chunked prefill and decode; must be below 1e-6."""
    kl_decode_production: dict[str, float]
    """By KV dtype: decode at the production precision against f32; above `KL_DECODE_MAX` it is not served."""
    kl_weights_against_source: float | None = None
    """What compressing the weights cost; None when they are as in the source."""


class ModelManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Paths are relative to the model's directory: `openvino_model.xml`, `tokenizer.json`, `chat_template.jinja`."""

    format_version: int
    name: str
    source: str
    """File or directory name it was made from, without its path."""
    source_hash: str
    """SHA-256 of the source's content."""
    content_hash: str
    """SHA-256 of source hash, weights format and converter version: the cache key."""
    weights_format: str
    """f16, int8, or as_is for an IR that was not changed."""
    weights_bytes: int
    shape: ModelShape
    end_token_ids: tuple[int, ...]
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    gate: GateFigures
    created_at: str
    """UTC, ISO 8601."""
