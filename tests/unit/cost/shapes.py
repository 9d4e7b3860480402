"""Shapes of known models."""

from tailrace.cost.shape import ModelShape

SMOLLM2 = ModelShape(
    architecture="llama",
    num_layers=30,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=49152,
    context_tokens_max=8192,
    num_parameters=134_515_008,
)
