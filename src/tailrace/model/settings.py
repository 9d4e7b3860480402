"""The section `[model]`: how the model served is prepared."""

from typing import Literal

import msgspec


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    weights: Literal["f16", "int8"] | None = None
    """Format of the weights of a converted GGUF file. Computed: int8 below 1e9 parameters (speed at a KL of about
    0.006), else f16. An OpenVINO IR is always used as it is."""
    cache_dir: str | None = None
    """Where prepared models are kept. Computed: `tailrace` below XDG_CACHE_HOME, else below ~/.cache."""
    chat_template: str | None = None
    """Jinja text, or the path of a file with it, to use instead of the model's own (vLLM: --chat-template)."""
