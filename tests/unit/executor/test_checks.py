"""A plan that the kernels would crash on, or run wrongly, never reaches them."""

from typing import Any

import msgspec
import pytest

from tailrace.engine.step import ExecutorLimits, SamplingRow, Slice, StepPlan
from tailrace.executor.checks import find_problem
from tailrace.request import SamplingParams, SequenceId, StepId

LIMITS = ExecutorLimits(num_blocks=8, context_tokens_max=200, step_sizes=(64,), scratch_tokens_max=250)
VOCAB_SIZE = 100
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
PENALISED = SamplingParams(max_tokens=1, repetition_penalty=1.1)


def piece(**changes: Any) -> Slice:
    """Tokens 30..69 of a sequence, in the last places of what is allowed."""
    good = Slice(
        sequence_id=SequenceId(1),
        start=30,
        token_ids=[0, VOCAB_SIZE - 1] * 20,
        block_ids=[7, 0, 3],
        sampling=SamplingRow(params=GREEDY, choice=0, position=70),
    )
    return msgspec.structs.replace(good, **changes)


def row(**changes: Any) -> SamplingRow:
    return SamplingRow(**{"params": GREEDY, "choice": 0, "position": 70} | changes)


def problem_of(*slices: Slice, copies: tuple[tuple[int, int], ...] = ()) -> str | None:
    return find_problem(StepPlan(step_id=StepId(1), slices=slices, block_copies=copies), LIMITS, VOCAB_SIZE)


GOOD = {
    "plain": piece(),
    "no draw": piece(sampling=None),
    "a table with blocks to spare": piece(block_ids=[7, 0, 3, 5, 6]),
    "spare table entries are not read": piece(block_ids=[7, 0, 3, 99]),
    "any sequence type": piece(block_ids=(7, 0, 3), token_ids=range(40)),
    "scored": piece(num_prompt_logprobs=0, prompt_targets=[1] * 39),
    "history": piece(sampling=row(params=PENALISED, history=[1, 2], num_prompt_tokens=2)),
    "the whole context": piece(start=199, token_ids=[1], block_ids=range(7), sampling=row(position=200)),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_slices_pass(name: str) -> None:
    assert problem_of(GOOD[name]) is None


BAD = {
    "negative start": (piece(start=-1), "from position -1"),
    "no tokens": (piece(token_ids=[]), "0 tokens"),
    "too long": (piece(start=161, block_ids=range(8)), "limit is 200"),
    "negative token": (piece(token_ids=[-1]), "vocabulary"),
    "token past the vocabulary": (piece(token_ids=[VOCAB_SIZE]), "vocabulary"),
    "short table": (piece(block_ids=[7, 0]), "2 blocks for 70 tokens"),
    "negative block": (piece(block_ids=[7, -1, 3]), "outside 0..7"),
    "block past the pool": (piece(block_ids=[7, 8, 3]), "outside 0..7"),
    "block twice": (piece(block_ids=[7, 3, 3]), "twice"),
    "other position": (piece(sampling=row(position=69)), "draws position 69"),
    "mask past the vocabulary": (piece(sampling=row(masked_ids=(VOCAB_SIZE,))), "masked or biased"),
    "bias past the vocabulary": (
        piece(sampling=row(params=SamplingParams(max_tokens=1, logit_bias={VOCAB_SIZE: 1.0}))),
        "masked or biased",
    ),
    "no history": (piece(sampling=row(params=PENALISED)), "without the history"),
    "history past the vocabulary": (piece(sampling=row(params=PENALISED, history=[VOCAB_SIZE])), "history"),
    "prompt longer than history": (
        piece(sampling=row(params=PENALISED, history=[1], num_prompt_tokens=2)),
        "history",
    ),
    "targets unasked": (piece(prompt_targets=[1]), "targets without"),
    "too many targets": (piece(num_prompt_logprobs=1, prompt_targets=[1] * 41), "41 prompt targets"),
    "target past the vocabulary": (piece(num_prompt_logprobs=1, prompt_targets=[VOCAB_SIZE]), "target"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_slice_is_named_with_its_sequence(name: str) -> None:
    slice_, words = BAD[name]
    problem = problem_of(piece(sequence_id=SequenceId(2), start=0, token_ids=[1], block_ids=[1], sampling=None), slice_)
    assert problem is not None
    assert problem.startswith("sequence 1: ")
    assert words in problem


@pytest.mark.parametrize(
    ("copies", "words"),
    [
        (((0, 8),), "outside"),
        (((8, 0),), "outside"),
        (((-1, 0),), "outside"),
        (((1, 2), (3, 2)), "two copies go to one block"),
        (((1, 2), (2, 3)), "another one writes"),
        (((1, 1),), "another one writes"),
    ],
)
def test_bad_copies_are_refused(copies: tuple[tuple[int, int], ...], words: str) -> None:
    problem = problem_of(piece(), copies=copies)
    assert problem is not None
    assert words in problem


def test_copies_may_share_a_source() -> None:
    assert problem_of(piece(), copies=((1, 2), (1, 4))) is None


def test_an_empty_plan_is_refused() -> None:
    assert problem_of() == "the plan has no slices"


def one_token(sequence: int, start: int, blocks: list[int]) -> Slice:
    return piece(
        sequence_id=SequenceId(sequence), start=start, token_ids=[1], block_ids=blocks, sampling=row(position=start + 1)
    )


def test_a_block_has_one_writer_and_any_number_of_readers() -> None:
    assert problem_of(one_token(1, 32, [0, 1]), one_token(2, 40, [0, 2])) is None
    problem = problem_of(one_token(1, 32, [0, 1]), one_token(2, 40, [0, 1]))
    assert problem is not None
    assert "block 1 has two writers" in problem


def test_a_sequence_is_in_a_plan_once() -> None:
    assert problem_of(one_token(1, 32, [0, 1]), one_token(1, 32, [0, 2])) == "two slices of one sequence"


def test_the_scratch_bound_counts_slices_of_several_tokens_times_the_longest() -> None:
    def chunk(sequence: int, end: int, block: int) -> Slice:
        return piece(
            sequence_id=SequenceId(sequence), start=end - 2, token_ids=[1, 2], sampling=None,
            block_ids=range(block, block + -(-end // 32)),
        )  # fmt: skip

    assert problem_of(chunk(1, 125, 0), chunk(2, 60, 4)) is None  # 2 x 125
    problem = problem_of(chunk(1, 126, 0), chunk(2, 60, 4))
    assert problem is not None
    assert "252 scratch tokens, the limit is 250" in problem
    row_of_another = one_token(3, 199, [0, 1, 2, 3, 4, 5, 6])
    assert problem_of(chunk(1, 125, 0), chunk(2, 60, 4), row_of_another) is None, "one row repacks nothing"
