"""The executors under test, made alike: 64 blocks, contexts up to 512 tokens, a vocabulary of 500."""

from collections.abc import Callable
from typing import NamedTuple

from tailrace.engine.step import Executor, ExecutorLimits

VOCAB_SIZE = 500
LIMITS = ExecutorLimits(num_blocks=64, context_tokens_max=512, step_sizes=(64, 128, 512), scratch_tokens_max=2048)


class Implementation(NamedTuple):
    make: Callable[[], Executor]
    """With a pool that no sequence has used."""
    make_slow: Callable[[], Executor]
    """Whose steps take long enough to be interrupted."""
