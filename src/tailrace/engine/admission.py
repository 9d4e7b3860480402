"""Whether a waiting sequence can run now, with which blocks, or for whom it should wait. Decides, changes nothing."""

from typing import NamedTuple

from tailrace.engine.blocks import BlockPool
from tailrace.engine.prefix import PrefixesInProgress, extend_keys
from tailrace.engine.sequence import Sequence, SequenceState
from tailrace.engine.step import ExecutorLimits
from tailrace.errors import ContextExceeded, InvalidRequest, KvExhausted


class Admission(NamedTuple):
    """The sequence fits: `shared` blocks by reference, `num_new` of its own, computing starts at `start`."""

    shared: list[int]
    copy_source: int | None
    """Block to be copied into the first new one before the sequence computes."""
    num_new: int
    start: int
    is_fork: bool = False


class WaitFor(NamedTuple):
    """A running sequence is computing what this one needs; it is worth waiting until it has `num_tokens`."""

    leader: Sequence
    num_tokens: int


def find_source(
    sequence: Sequence,
    pool: BlockPool,
    in_progress: PrefixesInProgress,
    *,
    tokens_per_block: int,
    prefix_caching: bool,
    may_wait: bool,
) -> Admission | WaitFor:
    """Where its first tokens can come from: a fork, the prefix cache, somebody who computes them now, or nowhere."""
    found: Admission | WaitFor | None = None
    if not sequence.wants_prompt_logprobs:
        found = _find_fork(sequence, tokens_per_block, may_wait)
        # A preempted choice may find blocks of its own output too: then the cache saves more than the prompt.
        if prefix_caching and (found is None or sequence.num_output_tokens > 0):
            cached = _find_prefix(sequence, pool, in_progress, tokens_per_block, may_wait)
            found = cached if found is None or _starts_later(cached, found) else found
    return found or Admission([], None, 0, 0)


def _starts_later(one: Admission | WaitFor | None, other: Admission | WaitFor) -> bool:
    return isinstance(one, Admission) and isinstance(other, Admission) and one.start > other.start


def size_admission(
    sequence: Sequence, source: Admission, pool: BlockPool, *, tokens_per_block: int, num_running: int
) -> Admission | None:
    """With the number of new blocks; None when there are not enough now.

    Blocks for all its tokens are taken at once, so a prefill never stops half-way for memory. One block of headroom is
    left to each running sequence: who is admitted into the last block is preempted in the next step. With nothing
    running there is no headroom, so whatever fits alone is admitted.
    """
    num_new = -(-len(sequence.token_ids) // tokens_per_block) - len(source.shared)
    if num_new + pool.count_unreferenced(source.shared) + num_running > pool.num_available:
        return None
    return source._replace(num_new=num_new)


def _find_fork(sequence: Sequence, tokens_per_block: int, may_wait: bool) -> Admission | WaitFor | None:
    """Another choice of the same prompt that runs: take over its prompt, or wait until it has computed it.

    Only the last prompt token is computed again, because its logits are needed::

        prompt of 70   | block 0 | block 1 | 64..69 |
        fork             shared    shared    copied, 69 computed again
    """
    num_prompt = sequence.num_prompt_tokens
    computing: Sequence | None = None
    for sibling in sequence.prompt_group:
        if sibling.state is not SequenceState.RUNNING:
            continue
        if sibling.num_computed >= num_prompt:
            last, offset = divmod(num_prompt - 1, tokens_per_block)
            source = sibling.block_ids[last] if offset else None
            return Admission(sibling.block_ids[:last], source, 0, num_prompt - 1, is_fork=True)
        computing = computing or sibling
    if computing is not None and may_wait:
        return WaitFor(computing, num_prompt)
    return None


def _find_prefix(
    sequence: Sequence, pool: BlockPool, in_progress: PrefixesInProgress, tokens_per_block: int, may_wait: bool
) -> Admission | WaitFor | None:
    """Full blocks found in the pool, but for the one with the last token: its logits are needed, so it is computed."""
    num_tokens = len(sequence.token_ids)
    keys = extend_keys(sequence, num_tokens // tokens_per_block, tokens_per_block)
    num_wanted = (num_tokens - 1) // tokens_per_block
    hits = pool.find(keys[:num_wanted])
    leader = in_progress.find_leader(sequence, len(hits), num_wanted) if may_wait else None
    if leader is not None:
        return WaitFor(leader[0], leader[1] * tokens_per_block)
    return Admission(hits, None, 0, len(hits) * tokens_per_block) if hits else None


def check_fits(sequence: Sequence, limits: ExecutorLimits) -> None:
    """Raises InvalidRequest, ContextExceeded or KvExhausted for a sequence that could never run, even alone."""
    num_prompt, context = sequence.num_prompt_tokens, limits.context_tokens_max
    if num_prompt == 0:
        raise InvalidRequest("the prompt has no tokens: send at least one", param="prompt")
    if num_prompt >= context:
        raise ContextExceeded(
            f"the prompt has {num_prompt} tokens and the context holds {context}, the answer included: shorten the "
            "prompt or raise context_tokens_max",
            param="prompt",
        )
    computed_max = min(num_prompt + sequence.params.max_tokens, context) - 1  # the last token drawn is not computed
    num_blocks = -(-computed_max // limits.tokens_per_block)
    if num_blocks > limits.num_blocks:
        raise KvExhausted(
            f"prompt and answer may need {num_blocks} KV blocks and the pool has {limits.num_blocks}: lower max_tokens "
            "or raise kv_memory",
            param="max_tokens",
        )
