"""The geometry of a model: every memory and time formula starts here. Pure."""

import msgspec


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Of a decoder with plain attention (MHA, GQA, MQA). Sizes in elements unless the name says otherwise."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_tokens_max: int
    """What the model was trained for."""
    num_parameters: int
    tied_embeddings: bool = False
