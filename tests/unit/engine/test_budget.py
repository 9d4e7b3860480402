from collections.abc import Callable

from tailrace.cost.step_time import StepCoefficients, StepFeatures, StepTimeModel
from tailrace.engine.budget import CHUNK_TOKENS_MIN, StepBudget, chunk_tokens, features_of
from tailrace.engine.step import SamplingRow, Slice, StepPlan
from tailrace.request import SamplingParams, SequenceId, StepId

SIZES = (16, 64, 128)


def at_most(limit: int) -> Callable[[int], bool]:
    return lambda chunk: chunk <= limit


def chunk(needed: int, used: int, *, limit: int = 10_000, must_progress: bool = False) -> int:
    return chunk_tokens(needed, used, SIZES[-1], SIZES, at_most(limit), must_progress)


def test_the_last_chunk_is_taken_whole() -> None:
    assert chunk(50, 3) == 50


def test_another_chunk_brings_the_total_to_the_largest_listed_size_that_fits() -> None:
    assert chunk(500, 3) == 125
    assert chunk(500, 3, limit=100) == 61
    assert chunk(50, 3, limit=30) == 13
    assert chunk(50, 15, limit=5) == 1


def test_without_room_or_time_the_chunk_waits() -> None:
    assert chunk(50, 128) == 0
    assert chunk(50, 3, limit=5) == 0


def test_progress_takes_the_smallest_chunk_that_is_worth_it() -> None:
    assert chunk(500, 3, limit=0, must_progress=True) == 13 >= CHUNK_TOKENS_MIN
    assert chunk(500, 0, limit=0, must_progress=True) == 16
    assert chunk(500, 10, limit=0, must_progress=True) == 54
    assert chunk(7, 3, limit=0, must_progress=True) == 7
    assert chunk(500, 127, limit=0, must_progress=True) == 1


def test_progress_takes_one_token_when_more_would_break_the_target_and_one_does_not() -> None:
    assert chunk(500, 3, limit=5, must_progress=True) == 1
    step = budget(itl_target_ns=20_000_000, step_time=StepTimeModel(StepCoefficients(0, 1e6, 1e3, 1e4, 0, 0, 0)))
    step.add_rows(4, 400)
    assert step.fit_chunk(2_000, 100) == 1, "a chunk of 12 repacks 2,000 tokens for 20 ms, a row reads them for 2"


def budget(**changes: object) -> StepBudget:
    values: dict[str, object] = {
        "tokens_max": 128,
        "step_sizes": SIZES,
        "scratch_tokens_max": 10_000,
        "itl_target_ns": None,
        "step_time": StepTimeModel(),
        "tokens_before": 0,
    }
    return StepBudget(**(values | changes))  # type: ignore[arg-type]


def test_after_a_trimmed_chunk_the_step_is_full() -> None:
    step = budget()
    step.add_chunk(0, 16, is_last=False)
    assert step.is_full
    assert step.fit_chunk(0, 1) == 0


def test_the_scratch_counts_every_slice_at_the_longest_context() -> None:
    step = budget(scratch_tokens_max=100)
    step.add_chunk(30, 20, is_last=True)
    assert step.fit_chunk(0, 50) == 50
    assert step.fit_chunk(0, 51) == 44, "two slices at 51 need 102; 44 bring the step to 64"
    step.add_chunk(0, 50, is_last=True)
    assert step.fit_chunk(0, 2) == 0
    assert step.fit_chunk(5, 1) == 1, "a single row repacks nothing"


def test_the_time_budget_applies_only_while_rows_decode() -> None:
    model = StepTimeModel(StepCoefficients(0, 1e6, 0, 0, 0, 0, 0))
    assert budget(itl_target_ns=20_000_000, step_time=model).fit_chunk(0, 100) == 100
    step = budget(itl_target_ns=20_000_000, step_time=model)
    step.add_rows(4, 400)
    assert step.fit_chunk(0, 100) == 12


def test_features_of_a_plan_equal_those_of_the_budget_it_was_made_with() -> None:
    step = budget(tokens_before=7)
    step.add_rows(1, 11)
    step.add_chunk(6, 3, is_last=True)
    step.add_chunk(2, 2, is_last=False)
    row = SamplingRow(params=SamplingParams(max_tokens=1), choice=0, position=11)
    slices = (
        Slice(sequence_id=SequenceId(0), start=10, token_ids=[1], block_ids=[0], sampling=row),
        Slice(sequence_id=SequenceId(1), start=6, token_ids=[1, 2, 3], block_ids=[1], sampling=row),
        Slice(sequence_id=SequenceId(2), start=2, token_ids=[1, 2], block_ids=[2]),
    )
    plan = StepPlan(step_id=StepId(1), slices=slices)
    assert features_of(plan, 7) == step.features() == StepFeatures(6, 11, 8, (7 + 8 + 9) + (3 + 4), 2, True)
