"""Every plan before it reaches the kernels, which check nothing: a block that does not exist ends the process. Pure.

A plan that fails here is a bug of whoever made it; saying so fails one step instead of every stream.
"""

from collections.abc import Iterable, Sequence

from tailrace.engine.step import ExecutorLimits, SamplingRow, Slice, StepPlan


def find_problem(plan: StepPlan, limits: ExecutorLimits, vocab_size: int) -> str | None:
    """The first thing wrong with the plan, None if nothing is. Tens of microseconds for a long context."""
    if not plan.slices:
        return "the plan has no slices"
    problem = _copies_problem(plan.block_copies, limits.num_blocks)
    if problem is not None:
        return problem
    for piece in plan.slices:
        problem = _slice_problem(piece, limits, vocab_size)
        if problem is not None:
            return f"sequence {piece.sequence_id}: {problem}"
    return _writers_problem(plan, limits) or _scratch_problem(plan, limits)


def _copies_problem(copies: Sequence[tuple[int, int]], num_blocks: int) -> str | None:
    sources, destinations = [source for source, _ in copies], [destination for _, destination in copies]
    if not _inside(sources, num_blocks) or not _inside(destinations, num_blocks):
        return f"a copy names a block outside 0..{num_blocks - 1}"
    if len(set(destinations)) < len(destinations):
        return "two copies go to one block"
    if not set(destinations).isdisjoint(sources):
        return "a copy reads a block that another one writes"
    return None


def _slice_problem(piece: Slice, limits: ExecutorLimits, vocab_size: int) -> str | None:
    num_tokens = len(piece.token_ids)
    end = piece.start + num_tokens
    if num_tokens == 0 or piece.start < 0:
        return f"{num_tokens} tokens from position {piece.start}"
    if end > limits.context_tokens_max:
        return f"its context grows to {end} tokens, the limit is {limits.context_tokens_max}"
    if not _inside(piece.token_ids, vocab_size):
        return f"a token is outside the vocabulary of {vocab_size}"
    num_blocks = -(-end // limits.tokens_per_block)
    if len(piece.block_ids) < num_blocks:
        return f"{len(piece.block_ids)} blocks for {end} tokens"
    table = piece.block_ids[:num_blocks]
    if not _inside(table, limits.num_blocks):
        return f"a block is outside 0..{limits.num_blocks - 1}"
    if len(set(table)) < num_blocks:
        return "its table names a block twice"
    return _prompt_problem(piece, vocab_size) or _row_problem(piece.sampling, end, vocab_size)


def _prompt_problem(piece: Slice, vocab_size: int) -> str | None:
    if piece.num_prompt_logprobs is None:
        return "targets without num_prompt_logprobs" if len(piece.prompt_targets) else None
    if piece.num_prompt_logprobs < 0 or len(piece.prompt_targets) > len(piece.token_ids):
        return f"{len(piece.prompt_targets)} prompt targets for {len(piece.token_ids)} tokens"
    return None if _inside(piece.prompt_targets, vocab_size) else "a prompt target is outside the vocabulary"


def _row_problem(row: SamplingRow | None, end: int, vocab_size: int) -> str | None:
    if row is None:
        return None
    if row.position != end:
        return f"draws position {row.position} from logits of position {end - 1}"
    if not _inside(row.masked_ids, vocab_size) or not _inside(row.params.logit_bias, vocab_size):
        return "a masked or biased token is outside the vocabulary"
    if row.params.needs_history:
        if row.history is None:
            return "penalties without the history"
        if not _inside(row.history, vocab_size) or not 0 <= row.num_prompt_tokens <= len(row.history):
            return "the history is not of this vocabulary or shorter than its prompt"
    return None


def _writers_problem(plan: StepPlan, limits: ExecutorLimits) -> str | None:
    """Within a step slices run in no order: a block has one writer, and so has a sequence."""
    if len({piece.sequence_id for piece in plan.slices}) < len(plan.slices):
        return "two slices of one sequence"
    written: set[int] = set()
    for piece in plan.slices:
        first = piece.start // limits.tokens_per_block
        last = (piece.start + len(piece.token_ids) - 1) // limits.tokens_per_block
        for block in piece.block_ids[first : last + 1]:
            if block in written:
                return f"sequence {piece.sequence_id}: block {block} has two writers"
            written.add(block)
    return None


def _scratch_problem(plan: StepPlan, limits: ExecutorLimits) -> str | None:
    ends = [piece.start + len(piece.token_ids) for piece in plan.slices if len(piece.token_ids) > 1]
    scratch = len(ends) * max(ends, default=0)
    if scratch > limits.scratch_tokens_max:
        return f"{len(ends)} slices of several tokens over {max(ends)}: {scratch} scratch tokens, the limit is " + str(
            limits.scratch_tokens_max
        )
    return None


def _inside(values: Iterable[int], size: int) -> bool:
    """Whether all are in 0..size - 1. True for none."""
    return min(values, default=0) >= 0 and max(values, default=0) < size
