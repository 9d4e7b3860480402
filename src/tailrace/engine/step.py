"""Hop 9-11: the values between scheduler and executor.

`plan_step(now_ns) -> StepPlan`, `executor.execute(plan) -> StepOutcome`, `commit_step(plan, outcome, now_ns)`.
The scheduler knows no model and the executor knows no requests: this file is all they share.

A slice is a run of consecutive tokens of one sequence::

    token position   0 ........ start ............ start + n        context
                     |-- in KV --|---- computed ----|
    block_ids        [b0][b1]...                  [bk]              covers start + n tokens, 32 a block
                                                  ^ logits of this row draw the token at position start + n

The values made for every row of every step have `gc=False`: they are never part of a reference cycle, and a thousand
of them a step would otherwise keep the garbage collector busy.
"""

from collections.abc import Sequence as Seq
from typing import Protocol

import msgspec

from tailrace.request import FinishReason, PositionLogprobs, SamplingParams, SequenceId, StepId

TOKENS_PER_BLOCK = 32
"""A property of the kernels, not of the cache shape (OpenVINO PagedAttention)."""


class SamplingRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """All that one draw depends on, besides the logits."""

    params: SamplingParams
    choice: int
    position: int
    """Of the token to be drawn, counted from the start of the prompt."""
    masked_ids: tuple[int, ...] = ()
    """Tokens that may not be drawn now (end tokens before `min_tokens`)."""
    history: Seq[int] | None = None
    """Prompt then output tokens, only when `params.needs_history`; read during the step, not kept."""
    num_prompt_tokens: int = 0


class Slice(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Tokens of one sequence to be computed in one step."""

    sequence_id: SequenceId
    start: int
    """Tokens of this sequence already in the KV cache."""
    token_ids: Seq[int]
    block_ids: Seq[int]
    """The sequence's block table, at least ceil((start + n) / 32) long; read during the step, not kept."""
    sampling: SamplingRow | None = None
    """Draw one token from the last row's logits; None when more of the prompt is to come."""
    num_prompt_logprobs: int | None = None
    """Report the log-probability of token `i + 1` from row `i`, for the slice's rows with a successor in the prompt."""
    prompt_targets: Seq[int] = ()
    """With `num_prompt_logprobs`: the token that follows each row (len <= len(token_ids))."""


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One forward pass. `block_copies` (source, destination) are done first: copy-on-write."""

    step_id: StepId
    slices: tuple[Slice, ...]
    block_copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(piece.token_ids) for piece in self.slices)


class SliceOutcome(msgspec.Struct, frozen=True, gc=False):
    token_ids: tuple[int, ...] = ()
    """The drawn token (1..k+1 with speculation); empty when the slice asked for none."""
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()


class StepDone(msgspec.Struct, frozen=True, kw_only=True):
    """`outcomes[i]` belongs to `plan.slices[i]`. The executor measures the durations (virtual in the modeled one)."""

    outcomes: tuple[SliceOutcome, ...]
    kernel_ns: int = 0
    sampling_ns: int = 0


class StepCut(msgspec.Struct, frozen=True):
    """The step was interrupted: nothing it wrote counts, every slice is rolled back."""


class StepFailed(msgspec.Struct, frozen=True):
    """The step raised; nothing it wrote counts."""

    message: str


StepOutcome = StepDone | StepCut | StepFailed


class SequenceEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What a step, a cancel or a deadline did to one sequence. `finish_reason` set: it was the last event of it."""

    sequence_id: SequenceId
    token_ids: tuple[int, ...] = ()
    """Tokens drawn. An end or stop token is among them, with `finish_reason` stop: it counts in the usage, and is not
    text."""
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    """Of the prompt rows that this step computed, in order; one event may carry them without a token."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the KV cache; on the first event with a token."""
    finish_reason: FinishReason | None = None
    error_label: str | None = None
    """A label of `errors.ERROR_TABLE` when `finish_reason` is cancelled, deadline or error."""
    error_message: str | None = None


class ExecutorLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What an executor can do; the scheduler plans within it, the executor asserts it."""

    num_blocks: int
    context_tokens_max: int
    step_sizes: tuple[int, ...]
    """Ascending token counts that a step with an unfinished prefill chunk may have: each new count compiles kernels."""
    scratch_tokens_max: int
    """Bound on (multi-token slices) x (longest context among them): the kernels repack that much past KV."""
    tokens_per_block: int = TOKENS_PER_BLOCK


class Executor(Protocol):
    """Runs plans one at a time. Never sees a request."""

    @property
    def limits(self) -> ExecutorLimits: ...

    def execute(self, plan: StepPlan) -> StepOutcome:
        """Copies blocks, computes the slices, draws the tokens asked for."""
        ...

    def interrupt(self, step_id: StepId) -> None:
        """From any thread: cut the step named if it runs right now, else do nothing."""
        ...


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges are of now, totals since the engine started."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_blocks_held: int = 0
    """Referenced by a sequence; free and cached blocks are not."""
    num_blocks_cached: int = 0
    preemptions_total: int = 0
    prefix_query_tokens_total: int = 0
    prefix_hit_tokens_total: int = 0
    """Prompt tokens taken from earlier requests' blocks; forks and recomputation are counted apart."""
    fork_tokens_total: int = 0
    recompute_tokens_total: int = 0
    """Tokens computed again after a preemption."""
    steps_cut_total: int = 0
    steps_failed_total: int = 0
    itl_budget_overruns_total: int = 0
    """Steps with decoding rows that took longer than the ITL target."""
    late_finishes_total: int = 0
    """Finishes that came after the sequence had ended by itself."""
