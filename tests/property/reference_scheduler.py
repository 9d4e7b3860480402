"""The obvious scheduler: one sequence at a time, first come first served, whole prompt, then one token a step.

No batch, no sharing, no preemption. The real one must give the same texts, and when nothing is contended the same
order.
"""

from tailrace.engine.sequence import Sequence
from tailrace.engine.step import Executor, SamplingRow, Slice, StepDone, StepPlan
from tailrace.request import FinishReason, SequenceId, StepId


def run_alone(
    sequence: Sequence, executor: Executor, end_token_ids: frozenset[int]
) -> tuple[list[int], FinishReason | None]:
    """Output tokens of one sequence that has the whole pool, and why it ended."""
    params, token_ids, limits = sequence.params, list(sequence.token_ids), executor.limits
    prompt, computed = len(token_ids), 0
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else end_token_ids)
    blocks = list(range(limits.num_blocks))
    while True:
        masked = tuple(sorted(stops)) if len(token_ids) - prompt < params.min_tokens else ()
        row = SamplingRow(
            params=params,
            choice=sequence.choice,
            position=len(token_ids),
            masked_ids=masked,
            history=token_ids,
            num_prompt_tokens=prompt,
        )
        piece = Slice(
            sequence_id=SequenceId(0), start=computed, token_ids=token_ids[computed:], block_ids=blocks, sampling=row
        )
        outcome = executor.execute(StepPlan(step_id=StepId(computed), slices=(piece,)))
        assert isinstance(outcome, StepDone)
        computed = len(token_ids)
        token_ids += outcome.outcomes[0].token_ids
        if token_ids[-1] in stops:
            return token_ids[prompt:], FinishReason.STOP
        if len(token_ids) == prompt + params.max_tokens or len(token_ids) == limits.context_tokens_max:
            return token_ids[prompt:], FinishReason.LENGTH


def run_in_order(
    sequences: list[Sequence], executor: Executor, end_token_ids: frozenset[int]
) -> list[tuple[SequenceId, list[int]]]:
    """All of them, by (class, arrival, id)."""
    ordered = sorted(sequences, key=lambda one: (one.priority, one.arrival_ns, one.sequence_id))
    return [(one.sequence_id, run_alone(one, executor, end_token_ids)[0]) for one in ordered]
