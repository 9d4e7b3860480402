"""Whether to interrupt the step that runs now, because its work lost its caller. Pure; the engine process asks."""

from collections.abc import Set as AbstractSet

from tailrace.engine.step import StepPlan
from tailrace.request import SequenceId

CUT_COST_NS = 10_000_000
"""What a cut costs: `InferRequest.cancel` took effect within about 8 ms (measured), and the step is planned again."""


def cancelled_ratio(plan: StepPlan, cancelled: AbstractSet[SequenceId]) -> float:
    """Share of the plan's tokens that belong to the sequences named, 0 to 1."""
    total = plan.num_tokens
    lost = sum(len(piece.token_ids) for piece in plan.slices if piece.sequence_id in cancelled)
    return lost / total if total else 0.0


def should_cut(
    *,
    plan: StepPlan,
    cancelled: AbstractSet[SequenceId],
    predicted_ns: int,
    elapsed_ns: int,
    last_step_was_cut: bool,
) -> bool:
    """Cut only when most of what remains serves cancelled work and enough remains to pay for it.

    Never twice in a row: a cut takes one step from everybody else in it, so a caller who connects and leaves in a loop
    could otherwise keep the honest ones from ever finishing a step.
    """
    if last_step_was_cut or predicted_ns - elapsed_ns <= CUT_COST_NS:
        return False
    return cancelled_ratio(plan, cancelled) > 0.5
