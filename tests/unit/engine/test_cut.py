import pytest

from tailrace.engine.cut import CUT_COST_NS, cancelled_ratio, should_cut
from tailrace.engine.step import Slice, StepPlan
from tailrace.request import SequenceId, StepId


def plan(*num_tokens: int) -> StepPlan:
    slices = tuple(
        Slice(sequence_id=SequenceId(number), start=0, token_ids=[5] * count, block_ids=[number])
        for number, count in enumerate(num_tokens)
    )
    return StepPlan(step_id=StepId(1), slices=slices)


def decide(*, cancelled: set[int], elapsed_ns: int = 0, last_step_was_cut: bool = False) -> bool:
    return should_cut(
        plan=plan(100, 1, 1),
        cancelled={SequenceId(number) for number in cancelled},
        predicted_ns=20 * CUT_COST_NS,
        elapsed_ns=elapsed_ns,
        last_step_was_cut=last_step_was_cut,
    )


def test_a_step_that_mostly_serves_cancelled_work_is_cut() -> None:
    assert decide(cancelled={0})


@pytest.mark.parametrize("cancelled", [set(), {1}, {1, 2}, {9}])
def test_a_step_that_mostly_serves_others_is_not(cancelled: set[int]) -> None:
    assert not decide(cancelled=cancelled)


def test_never_twice_in_a_row() -> None:
    assert not decide(cancelled={0}, last_step_was_cut=True)


def test_a_step_about_to_end_is_left_alone() -> None:
    assert not decide(cancelled={0}, elapsed_ns=19 * CUT_COST_NS)
    assert not decide(cancelled={0}, elapsed_ns=50 * CUT_COST_NS)


def test_the_ratio_counts_tokens_not_sequences() -> None:
    assert cancelled_ratio(plan(6, 2), {SequenceId(1)}) == 0.25
    assert cancelled_ratio(plan(6, 2), set()) == 0.0
