"""Passes hold every token and every target of a plan once, in order, within the bound on rows of logits."""

from hypothesis import given
from hypothesis import strategies as st

from tailrace.engine.step import SamplingRow, Slice
from tailrace.executor.passes import rows_wanted, split_passes
from tailrace.request import SamplingParams, SequenceId

PARAMS = SamplingParams(max_tokens=1)


@st.composite
def slices(draw: st.DrawFn) -> list[Slice]:
    made = []
    for index in range(draw(st.integers(1, 6))):
        num_tokens = draw(st.integers(1, 30))
        start = draw(st.integers(0, 100))
        is_scored, is_last = draw(st.booleans()), draw(st.booleans())
        tokens = [index * 1000 + start + i for i in range(num_tokens)]
        made.append(
            Slice(
                sequence_id=SequenceId(index),
                start=start,
                token_ids=tokens,
                block_ids=range(10),
                sampling=SamplingRow(params=PARAMS, choice=0, position=start + num_tokens) if is_last else None,
                num_prompt_logprobs=3 if is_scored else None,
                prompt_targets=[token + 1 for token in tokens[: num_tokens - is_last]] if is_scored else (),
            )
        )
    return made


@given(slices(), st.integers(6, 40))
def test_passes_hold_each_token_and_target_once_within_the_bound(plan: list[Slice], rows_max: int) -> None:
    passes = split_passes(plan, rows_max)
    for parts in passes:
        assert parts
        assert len({part.slice_index for part in parts}) == len(parts)
        rows = rows_wanted(parts)
        assert len(rows) <= rows_max
        tokens = [token for part in parts for token in part.piece.token_ids]
        drawn = [part for part in parts if part.sampling is not None]
        for row, part in zip(rows, drawn, strict=False):
            assert tokens[row] == part.piece.token_ids[-1]
        targets = [target for part in parts for target in part.targets]
        assert [tokens[row] + 1 for row in rows[len(drawn) :]] == targets
    for index, piece in enumerate(plan):
        parts = [part for each in passes for part in each if part.slice_index == index]
        assert [token for part in parts for token in part.piece.token_ids] == list(piece.token_ids)
        assert [target for part in parts for target in part.targets] == list(piece.prompt_targets)
        assert [part.sampling for part in parts] == [None] * (len(parts) - 1) + [piece.sampling]
        past = piece.start
        for part in parts:
            assert part.piece.past == past
            past += len(part.piece.token_ids)


@given(slices())
def test_a_step_without_scores_is_one_pass(plan: list[Slice]) -> None:
    if all(piece.num_prompt_logprobs is None for piece in plan):
        assert len(split_passes(plan, len(plan))) == 1
