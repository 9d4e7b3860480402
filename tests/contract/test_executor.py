"""What every `Executor` promises, over all of them: text does not depend on scheduling, bad plans do not run, a cut
hits the step it names."""

import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from executors import LIMITS, VOCAB_SIZE, Implementation

from tailrace.engine.step import Executor, SamplingRow, Slice, StepCut, StepDone, StepFailed, StepPlan
from tailrace.request import SamplingParams, SequenceId, StepId

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=1, temperature=0.9, top_p=0.95, seed=11)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist()


def make_slice(
    tokens: Sequence[int],
    blocks: Sequence[int],
    *,
    start: int = 0,
    sequence: int = 1,
    params: SamplingParams | None = GREEDY,
    **more: Any,
) -> Slice:
    end = start + len(tokens)
    row = None if params is None else SamplingRow(params=params, choice=0, position=end)
    return Slice(
        sequence_id=SequenceId(sequence), start=start, token_ids=tokens, block_ids=blocks, sampling=row, **more
    )


def make_plan(*slices: Slice, step: int = 1, copies: tuple[tuple[int, int], ...] = ()) -> StepPlan:
    return StepPlan(step_id=StepId(step), slices=slices, block_copies=copies)


def run(executor: Executor, *slices: Slice, copies: tuple[tuple[int, int], ...] = ()) -> StepDone:
    outcome = executor.execute(make_plan(*slices, copies=copies))
    assert isinstance(outcome, StepDone), outcome
    assert len(outcome.outcomes) == len(slices)
    return outcome


def drawn(outcome: StepDone, index: int = 0) -> int:
    (token,) = outcome.outcomes[index].token_ids
    return token


def generate(
    executor: Executor,
    tokens: Sequence[int],
    blocks: Sequence[int],
    *,
    chunks: Sequence[int] = (),
    num_tokens: int = 8,
    params: SamplingParams = GREEDY,
) -> list[int]:
    """The answer of one sequence alone, its prompt cut after each of `chunks` tokens."""
    start = 0
    for size in chunks:
        outcome = run(executor, make_slice(tokens[start : start + size], blocks, start=start, params=None))
        assert outcome.outcomes[0].token_ids == ()
        start += size
    answer = [drawn(run(executor, make_slice(tokens[start:], blocks, start=start, params=params)))]
    while len(answer) < num_tokens:
        start = len(tokens) + len(answer) - 1
        answer.append(drawn(run(executor, make_slice(answer[-1:], blocks, start=start, params=params))))
    return answer


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize("chunks", [(32,), (1,), (31, 2), (64, 10), (7, 7, 7, 40)])
def test_the_answer_does_not_depend_on_chunks_or_blocks(
    implementation: Implementation, chunks: Sequence[int], params: SamplingParams
) -> None:
    tokens = prompt(1, 90)
    whole = generate(implementation.make(), tokens, [0, 1, 2, 3], params=params)
    chunked = generate(implementation.make(), tokens, [40, 3, 63, 17, 5], chunks=chunks, params=params)
    assert chunked == whole
    assert len(set(whole)) > 1


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_the_answer_does_not_depend_on_the_batch(implementation: Implementation, params: SamplingParams) -> None:
    prompts = [prompt(2, 40), prompt(3, 65), prompt(4, 1)]
    tables = [[0, 1, 2], [10, 20, 30], [5, 6, 7]]
    alone = [
        generate(implementation.make(), tokens, table, params=params)
        for tokens, table in zip(prompts, tables, strict=True)
    ]
    executor = implementation.make()
    answers: list[list[int]] = [[], [], []]
    for _ in range(8):
        slices = []
        for index, (tokens, table, answer) in enumerate(zip(prompts, tables, answers, strict=True)):
            start = len(tokens) + len(answer) - 1 if answer else 0
            new = answer[-1:] or tokens
            slices.append(make_slice(new, table, start=start, sequence=index, params=params))
        outcome = run(executor, *slices)
        for index, answer in enumerate(answers):
            answer.append(drawn(outcome, index))
    assert answers == alone


def test_the_answer_depends_on_every_block(implementation: Implementation) -> None:
    """What makes the tests above able to fail: other tokens in an old block are other KV."""
    tokens = prompt(5, 80)
    whole = generate(implementation.make(), tokens, [0, 1, 2])
    answers = []
    for changed in (0, 32, 64):
        other = tokens[:changed] + prompt(changed, 16) + tokens[changed + 16 :]
        answers.append(generate(implementation.make(), other, [0, 1, 2]))
    assert whole not in answers


def test_a_shared_prefix_gives_the_answer_of_a_whole_prefill(implementation: Implementation) -> None:
    shared, own = prompt(6, 64), prompt(7, 20)
    alone = generate(implementation.make(), shared + own, [0, 1, 2])
    executor = implementation.make()
    run(executor, make_slice(shared, [8, 9], params=None))
    first = make_slice(own, [8, 9, 10], start=64, sequence=1)
    second = make_slice(own, [8, 9, 11], start=64, sequence=2)
    outcome = run(executor, first, second)
    assert drawn(outcome, 0) == drawn(outcome, 1) == alone[0]


def test_a_fork_through_a_copied_block_goes_on_as_the_original(implementation: Implementation) -> None:
    tokens = prompt(8, 50)
    alone = generate(implementation.make(), tokens, [0, 1])
    executor = implementation.make()
    first = drawn(run(executor, make_slice(tokens, [4, 5])))
    # The original writes token 51 into block 5; the fork reads its copy, block 6, and writes the same token there.
    both = run(
        executor,
        make_slice([first], [4, 5], start=50, sequence=1),
        make_slice([first], [4, 6], start=50, sequence=2),
        copies=((5, 6),),
    )
    assert drawn(both, 0) == drawn(both, 1) == alone[1]
    # A fork that goes another way leaves the original alone.
    apart = run(
        executor,
        make_slice([alone[1]], [4, 5], start=51, sequence=1),
        make_slice([(alone[1] + 1) % VOCAB_SIZE], [4, 6], start=51, sequence=2),
    )
    assert drawn(apart, 0) == alone[2]
    assert drawn(run(executor, make_slice([alone[2]], [4, 5], start=52))) == alone[3]


def test_tokens_written_by_mistake_are_overwritten(implementation: Implementation) -> None:
    """A cut or failed step leaves garbage behind `start`; computing from there again must not see it."""
    tokens = prompt(9, 70)
    alone = generate(implementation.make(), tokens, [0, 1, 2])
    executor = implementation.make()
    run(executor, make_slice(tokens[:40], [0, 1], params=None))
    run(executor, make_slice(prompt(10, 30), [0, 1, 2], start=40, params=None))
    assert drawn(run(executor, make_slice(tokens[40:], [0, 1, 2], start=40))) == alone[0]


def test_outcomes_align_with_slices(executor: Executor) -> None:
    reported = msgspec.structs.replace(GREEDY, num_logprobs=2)
    tokens = prompt(11, 12)
    outcome = run(
        executor,
        make_slice(tokens, [0], sequence=1, params=None),
        make_slice(tokens, [1], sequence=2, params=reported),
        make_slice(tokens, [2], sequence=3),
        make_slice(tokens[:8], [3], sequence=4, params=None, num_prompt_logprobs=1, prompt_targets=tokens[1:9]),
    )
    silent, with_logprobs, plain, scored = outcome.outcomes
    assert (silent.token_ids, silent.logprobs, silent.prompt_logprobs) == ((), (), ())
    assert with_logprobs.token_ids == plain.token_ids
    assert plain.logprobs == ()
    (position,) = with_logprobs.logprobs
    assert position.chosen.token_id == with_logprobs.token_ids[0]
    assert position.top[0].token_id == position.chosen.token_id
    assert len(position.top) == 2
    assert scored.token_ids == ()
    assert [each.chosen.token_id for each in scored.prompt_logprobs] == tokens[1:9]
    assert all(len(each.top) == 1 and each.chosen.logprob <= 0 for each in scored.prompt_logprobs)


def test_prompt_logprobs_do_not_depend_on_chunks(implementation: Implementation) -> None:
    tokens = prompt(12, 50)
    whole = run(
        implementation.make(),
        make_slice(tokens, [0, 1], num_prompt_logprobs=0, prompt_targets=tokens[1:]),
    ).outcomes[0]
    executor = implementation.make()
    scored = []
    for start, end in ((0, 20), (20, 33), (33, 50)):
        piece = make_slice(
            tokens[start:end],
            [0, 1],
            start=start,
            params=GREEDY if end == 50 else None,
            num_prompt_logprobs=0,
            prompt_targets=tokens[start + 1 : end + 1],
        )
        outcome = run(executor, piece).outcomes[0]
        scored.extend(each.chosen.logprob for each in outcome.prompt_logprobs)
    assert scored == pytest.approx([each.chosen.logprob for each in whole.prompt_logprobs], abs=1e-3)
    assert outcome.token_ids == whole.token_ids


def test_masked_tokens_are_not_drawn(executor: Executor) -> None:
    tokens = prompt(13, 30)
    best = drawn(run(executor, make_slice(tokens, [0])))
    row = SamplingRow(params=GREEDY, choice=0, position=30, masked_ids=(best,))
    masked = msgspec.structs.replace(make_slice(tokens, [0]), sampling=row)
    assert drawn(run(executor, masked)) != best


BAD_PLANS = {
    "no slices": make_plan(),
    "empty slice": make_plan(make_slice([], [0])),
    "block beyond the pool": make_plan(make_slice([1, 2], [64])),
    "negative block": make_plan(make_slice([1, 2], [-1])),
    "short table": make_plan(make_slice([1] * 33, [0])),
    "token beyond the vocabulary": make_plan(make_slice([VOCAB_SIZE], [0])),
    "negative token": make_plan(make_slice([-1], [0])),
    "context too long": make_plan(make_slice([1], list(range(17)), start=512)),
    "one sequence twice": make_plan(make_slice([1], [0]), make_slice([1], [1])),
    "copy beyond the pool": make_plan(make_slice([1], [0]), copies=((0, 64),)),
    "negative copy": make_plan(make_slice([1], [0]), copies=((-1, 1),)),
    "too much scratch": make_plan(
        *(make_slice([1] * 300, list(range(i, i + 10)), sequence=i) for i in range(0, 60, 6))
    ),
    "draw of another position": make_plan(
        msgspec.structs.replace(make_slice([1], [0]), sampling=SamplingRow(params=GREEDY, choice=0, position=5))
    ),
}


@pytest.mark.parametrize("name", BAD_PLANS)
def test_a_plan_out_of_range_is_refused_and_harms_nothing(implementation: Implementation, name: str) -> None:
    tokens = prompt(14, 40)
    alone = generate(implementation.make(), tokens, [0, 1], num_tokens=2)
    executor = implementation.make()
    first = drawn(run(executor, make_slice(tokens, [20, 21])))
    assert_refused(executor, BAD_PLANS[name])
    assert [first, drawn(run(executor, make_slice([first], [20, 21], start=40)))] == alone


def assert_refused(executor: Executor, plan: StepPlan) -> None:
    """By an assert (tests, simulator) or by a failed step (production: other streams live on)."""
    try:
        outcome = executor.execute(plan)
    except AssertionError:
        return
    assert isinstance(outcome, StepFailed)


def test_an_interrupt_of_another_step_does_nothing(executor: Executor) -> None:
    executor.interrupt(StepId(1))  # nothing runs: it must not wait for the step to come
    tokens = prompt(15, 30)
    stop = threading.Event()

    def interrupt_others() -> None:
        while not stop.is_set():
            executor.interrupt(StepId(2))
            executor.interrupt(StepId(0))

    thread = threading.Thread(target=interrupt_others)
    thread.start()
    try:
        for _ in range(20):
            run(executor, make_slice(tokens, [0]))
    finally:
        stop.set()
        thread.join()


def test_an_interrupt_cuts_the_step_it_names_and_the_next_one_runs(implementation: Implementation) -> None:
    executor = implementation.make_slow()
    long = [make_slice([7] * 500, list(range(i * 16, i * 16 + 16)), sequence=i, params=None) for i in range(4)]
    plan = make_plan(*long, step=9)
    done = threading.Event()

    def interrupt_until_done() -> None:
        while not done.wait(0.0002):
            executor.interrupt(StepId(9))

    thread = threading.Thread(target=interrupt_until_done)
    thread.start()
    try:
        outcome = executor.execute(plan)
    finally:
        done.set()
        thread.join()
    assert isinstance(outcome, StepCut)
    after = implementation.make()
    assert generate(after, prompt(1, 90), [0, 1, 2, 3], num_tokens=2) == generate(
        implementation.make(), prompt(1, 90), [5, 6, 7], num_tokens=2
    )


def test_a_cut_executor_computes_the_same_again(implementation: Implementation) -> None:
    """On the same executor, with the same blocks: what the cut step wrote does not count."""
    tokens = prompt(16, 120)
    alone = generate(implementation.make(), tokens, [0, 1, 2, 3], num_tokens=2)
    executor = implementation.make()
    stop = threading.Event()

    def interrupt_now_and_then() -> None:
        while not stop.wait(0.001):
            executor.interrupt(StepId(1))

    thread = threading.Thread(target=interrupt_now_and_then)
    thread.start()
    try:
        for _ in range(30):
            outcome = executor.execute(make_plan(make_slice(tokens, [0, 1, 2, 3])))
            assert isinstance(outcome, StepDone | StepCut)
    finally:
        stop.set()
        thread.join()
    assert generate(executor, tokens, [0, 1, 2, 3], num_tokens=2) == alone


def test_steps_of_the_size_before_a_cut_run_after_it(implementation: Implementation) -> None:
    """The kernels remember the shapes of the last step; one cut in the middle must not leave two steps mixed."""
    tokens = prompt(17, 24)
    executor = implementation.make()
    expected = drawn(run(executor, make_slice(tokens, [40])))
    big = make_slice(prompt(18, 500), list(range(16)), sequence=2, params=None)
    for delay_s in (0.0, 0.0005, 0.001, 0.002, 0.004, 0.008) * 4:
        thread = threading.Timer(delay_s, executor.interrupt, (StepId(2),))
        thread.start()
        assert isinstance(executor.execute(make_plan(big, step=2)), StepDone | StepCut)
        thread.join()
        assert drawn(run(executor, make_slice(tokens, [40]))) == expected


def test_limits_are_those_it_was_made_with(executor: Executor) -> None:
    assert executor.limits == LIMITS
