import threading

import pytest

from tailrace.engine.step import ExecutorLimits, SamplingRow, Slice, StepCut, StepDone, StepFailed, StepPlan
from tailrace.executor.modeled import Fault, ModeledExecutor
from tailrace.request import SamplingParams, SequenceId, StepId

LIMITS = ExecutorLimits(
    num_blocks=16, context_tokens_max=40, step_sizes=(16,), scratch_tokens_max=80, tokens_per_block=4
)
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def make(**changes: object) -> ModeledExecutor:
    return ModeledExecutor(LIMITS, 500, **changes)  # type: ignore[arg-type]


def piece(
    tokens: list[int],
    blocks: list[int],
    *,
    start: int = 0,
    number: int = 0,
    params: SamplingParams | None = GREEDY,
    masked: tuple[int, ...] = (),
    choice: int = 0,
    history: list[int] | None = None,
) -> Slice:
    row = None
    if params is not None:
        row = SamplingRow(
            params=params, choice=choice, position=start + len(tokens), masked_ids=masked, history=history
        )
    return Slice(sequence_id=SequenceId(number), start=start, token_ids=tokens, block_ids=blocks, sampling=row)


def run(executor: ModeledExecutor, *slices: Slice, copies: tuple[tuple[int, int], ...] = ()) -> list[tuple[int, ...]]:
    outcome = executor.execute(StepPlan(step_id=StepId(1), slices=slices, block_copies=copies))
    assert isinstance(outcome, StepDone)
    return [one.token_ids for one in outcome.outcomes]


PROMPT = [7, 8, 9, 10, 11, 12]


def alone() -> tuple[int, ...]:
    return run(make(), piece(PROMPT, [0, 1]))[0]


def test_chunks_and_block_numbers_do_not_change_the_token() -> None:
    executor = make()
    run(executor, piece(PROMPT[:3], [9, 4], params=None))
    run(executor, piece(PROMPT[3:5], [9, 4], start=3, params=None))
    assert run(executor, piece(PROMPT[5:], [9, 4], start=5))[0] == alone()


def test_a_batch_does_not_change_the_token() -> None:
    assert run(make(), piece([1, 2, 3], [5], number=1), piece(PROMPT, [0, 1]))[1] == alone()


def test_a_gap_is_refused() -> None:
    with pytest.raises(AssertionError, match="gap"):
        run(make(), piece(PROMPT[2:], [0, 1], start=2))


def test_a_table_that_does_not_cover_the_slice_is_refused() -> None:
    with pytest.raises(AssertionError, match="cover"):
        run(make(), piece(PROMPT, [0]))


def test_a_block_outside_the_pool_is_refused() -> None:
    for block in (16, -1):
        with pytest.raises(AssertionError, match="outside the pool"):
            run(make(), piece(PROMPT, [0, block]))


def test_the_scratch_bound_is_refused() -> None:
    with pytest.raises(AssertionError, match="scratch"):
        run(
            make(),
            piece(list(range(30)), list(range(8))),
            piece([1, 2], [8], number=1),
            piece([1, 2], [9], number=2),
        )


def test_a_block_that_somebody_else_overwrote_changes_the_token() -> None:
    executor = make()
    run(executor, piece(PROMPT[:5], [0, 1], params=None))
    run(executor, piece([1, 2, 3, 4], [0], number=1))
    assert run(executor, piece(PROMPT[5:], [0, 1], start=5))[0] != alone()


def test_two_sequences_of_one_step_that_write_one_block_show() -> None:
    tokens = run(make(), piece(PROMPT, [0, 1]), piece([1, 2, 3, 4, 5, 6], [2, 1], number=1))
    assert tokens[0] != alone()


def test_a_table_in_the_wrong_order_changes_the_token() -> None:
    executor = make()
    run(executor, piece([*PROMPT, 13, 14], [0, 1], params=None))
    right = run(executor, piece([15], [0, 1, 2], start=8))
    assert run(executor, piece([15], [1, 0, 3], start=8)) != right


def test_a_shared_prefix_and_a_copied_block_give_the_token_of_the_whole() -> None:
    executor = make()
    run(executor, piece(PROMPT, [0, 1]))
    assert run(executor, piece(PROMPT[5:], [0, 7], start=5, number=1), copies=((1, 7),))[0] == alone()


def test_draws_depend_on_seed_choice_and_position_when_the_temperature_is_not_zero() -> None:
    def draw(seed: int, choice: int, temperature: float = 1.0) -> tuple[int, ...]:
        params = SamplingParams(max_tokens=1, temperature=temperature, seed=seed)
        return run(make(), piece(PROMPT, [0, 1], params=params, choice=choice))[0]

    assert draw(1, 0) == draw(1, 0)
    assert len({draw(seed, 0) for seed in range(20)}) > 1
    assert len({draw(1, choice) for choice in range(20)}) > 1
    assert draw(1, 0, 0.0) == draw(2, 3, 0.0) == alone()


def test_masks_bias_and_penalties_reach_the_draw() -> None:
    (token,) = alone()
    assert run(make(), piece(PROMPT, [0, 1], masked=(token,)))[0] != (token,)
    biased = SamplingParams(max_tokens=1, temperature=0.0, logit_bias={42: 100.0})
    assert run(make(), piece(PROMPT, [0, 1], params=biased))[0] == (42,)
    penalised = SamplingParams(max_tokens=1, temperature=0.0, frequency_penalty=2.0)
    assert run(make(), piece(PROMPT, [0, 1], params=penalised, history=[*PROMPT, token, token, token]))[0] != (token,)


def test_an_end_token_comes_as_often_as_told() -> None:
    never, always = make(end_token_ids=(3,), end_ratio=0.0), make(end_token_ids=(3,), end_ratio=1.0)
    assert run(never, piece(PROMPT, [0, 1]))[0] == alone()
    assert run(always, piece(PROMPT, [0, 1]))[0] == (3,)


def test_log_probabilities_are_of_a_distribution_best_first() -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, num_logprobs=5)
    outcome = make().execute(StepPlan(step_id=StepId(1), slices=(piece(PROMPT, [0, 1], params=params),)))
    assert isinstance(outcome, StepDone)
    (row,) = outcome.outcomes[0].logprobs
    values = [one.logprob for one in row.top]
    assert values == sorted(values, reverse=True)
    assert max(values) < 0
    assert row.chosen == row.top[0]


def test_prompt_log_probabilities_are_of_the_targets() -> None:
    asked = Slice(
        sequence_id=SequenceId(0),
        start=0,
        token_ids=PROMPT,
        block_ids=[0, 1],
        num_prompt_logprobs=1,
        prompt_targets=PROMPT[1:],
    )
    outcome = make().execute(StepPlan(step_id=StepId(1), slices=(asked,)))
    assert isinstance(outcome, StepDone)
    assert [row.chosen.token_id for row in outcome.outcomes[0].prompt_logprobs] == PROMPT[1:]


def test_a_fault_fails_the_steps_with_the_sequence_named_and_no_other() -> None:
    executor = make(faults=lambda _: Fault(failing=frozenset({SequenceId(1)}), message="boom"))
    assert run(executor, piece(PROMPT, [0, 1]))[0] == alone()
    outcome = executor.execute(StepPlan(step_id=StepId(2), slices=(piece([1], [5], number=1),)))
    assert outcome == StepFailed("boom")


def test_a_delay_is_in_the_virtual_duration() -> None:
    plain, slow = make(), make(faults=lambda _: Fault(delay_ns=10**12))
    plan = StepPlan(step_id=StepId(1), slices=(piece(PROMPT, [0, 1]),))
    first, second = plain.execute(plan), slow.execute(plan)
    assert isinstance(first, StepDone)
    assert isinstance(second, StepDone)
    assert second.kernel_ns == first.kernel_ns + 10**12


def test_a_step_in_real_time_ends_when_it_is_interrupted_by_its_own_number() -> None:
    """A step of a thousand seconds: only the interrupt can end it."""
    started = threading.Event()

    def duration_ns(_: object) -> int:
        started.set()
        return 10**12

    executor = make(real_time=True, duration_ns=duration_ns)
    outcomes: list[object] = []
    plan = StepPlan(step_id=StepId(5), slices=(piece(PROMPT, [0, 1]),))
    thread = threading.Thread(target=lambda: outcomes.append(executor.execute(plan)))
    thread.start()
    assert started.wait(10)
    executor.interrupt(StepId(4))
    assert thread.is_alive()
    executor.interrupt(StepId(5))
    thread.join(10)
    assert outcomes == [StepCut()]


def test_an_interrupt_between_steps_does_nothing() -> None:
    executor = make()
    executor.interrupt(StepId(1))
    assert run(executor, piece(PROMPT, [0, 1]))[0] == alone()
