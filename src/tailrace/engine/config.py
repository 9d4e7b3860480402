"""The `[engine]` section: what the scheduler may be told. Computed defaults are resolved here, never written back."""

from typing import Annotated, Literal

import msgspec

from tailrace.engine.step import ExecutorLimits
from tailrace.errors import ConfigError

SEQUENCES_MAX_DEFAULT = 64
"""Past 64 sequences the decode step of a small model is bound by KV reads: throughput stops growing, ITL does not."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the native engine batches. None means: computed from what the executor can do."""

    sequences_max: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Sequences that run at once (vLLM: --max-num-seqs). None: 64, fewer if the KV pool has fewer blocks."""
    token_budget: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Tokens a step may compute (vLLM: --max-num-batched-tokens). None: the largest listed step size."""
    itl_target_ms: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Step time to keep while sequences decode: prefill chunks are sized for it. None: no time budget."""
    prefix_caching: bool = True
    """Keep full KV blocks findable after use, and let equal prompts wait for one computation of them."""
    batching: Literal["continuous", "static"] = "continuous"
    """static admits only into an empty batch: the baseline that continuous batching is measured against."""
    waiting_max: Annotated[int, msgspec.Meta(ge=1)] = 1024
    """Sequences that may wait inside the engine; beyond it a submit is refused (429)."""
    overtakes_max: Annotated[int, msgspec.Meta(ge=0)] = 16
    """Sequences that may be admitted past one that does not fit yet; then nothing behind it is, until it runs."""


class ResolvedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`EngineConfig` with every value known."""

    sequences_max: int
    token_budget: int
    itl_target_ns: int | None
    prefix_caching: bool
    batching: Literal["continuous", "static"]
    waiting_max: int
    overtakes_max: int
    step_sizes: tuple[int, ...]
    """Token counts a step with an unfinished prefill chunk may have: the listed ones within the budget, and the budget.

    A budget that is not listed is one more shape, reached exactly whenever work abounds; warm it with the others."""


def resolve_config(config: EngineConfig, limits: ExecutorLimits) -> ResolvedConfig:
    """Raises ConfigError when the values contradict each other or the executor's limits."""
    assert limits.scratch_tokens_max >= limits.context_tokens_max, "limits: the scratch must hold one whole context"
    sequences_max = config.sequences_max or min(SEQUENCES_MAX_DEFAULT, limits.num_blocks)
    token_budget = config.token_budget or max(limits.step_sizes[-1], sequences_max)
    if token_budget < sequences_max:
        raise ConfigError(
            f"engine.token_budget is {token_budget} but engine.sequences_max is {sequences_max}: every running "
            f"sequence decodes one token a step, so set the budget to at least {sequences_max}",
            param="engine.token_budget",
        )
    return ResolvedConfig(
        sequences_max=sequences_max,
        token_budget=token_budget,
        itl_target_ns=None if config.itl_target_ms is None else round(config.itl_target_ms * 1e6),
        prefix_caching=config.prefix_caching,
        batching=config.batching,
        waiting_max=config.waiting_max,
        overtakes_max=config.overtakes_max,
        step_sizes=(*(size for size in limits.step_sizes if size < token_budget), token_budget),
    )
