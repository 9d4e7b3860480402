"""Warm-up covers the listed sizes within its time, on an executor whose time is a number."""

import pytest

from tailrace.cost.step_time import StepFeatures
from tailrace.engine.step import ExecutorLimits, StepPlan
from tailrace.errors import StartFailed
from tailrace.executor.modeled import Fault, ModeledExecutor
from tailrace.executor.warm_up import warm_up

SIZES = (16, 32, 64, 128, 256)
MS = 1_000_000


def make(*, num_blocks: int = 64, context: int = 1024, faults: Fault | None = None) -> ModeledExecutor:
    """1 ms a token and 10 ms a step."""
    limits = ExecutorLimits(
        num_blocks=num_blocks, context_tokens_max=context, step_sizes=SIZES, scratch_tokens_max=context
    )

    def duration_ns(features: StepFeatures) -> int:
        return (10 + features.tokens) * MS

    return ModeledExecutor(limits, 100, duration_ns=duration_ns, faults=(lambda _: faults) if faults else None)


def observed(executor: ModeledExecutor, duration_max_ms: int) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    seen: list[tuple[int, int]] = []

    def observe(plan: StepPlan, duration_ns: int) -> None:
        seen.append((plan.num_tokens, duration_ns // MS))

    return warm_up(executor, SIZES, observe=observe, duration_max_ns=duration_max_ms * MS), seen


def test_with_time_enough_every_size_is_warm_and_observed() -> None:
    sizes, seen = observed(make(), 5000)
    assert sizes == (1, *SIZES)
    assert {size for size, _ in seen} == {1, *SIZES}
    assert all(duration == size + 10 for size, duration in seen)


@pytest.mark.parametrize("duration_max_ms", [100, 150, 300, 500])
def test_what_does_not_fit_the_time_is_left_out(duration_max_ms: int) -> None:
    sizes, seen = observed(make(), duration_max_ms)
    first_step_ms = 11
    assert first_step_ms + sum(duration for _, duration in seen) <= duration_max_ms
    assert 1 in sizes
    assert len(sizes) < len(SIZES) + 1


def test_sizes_beyond_the_pool_or_the_context_are_left_out() -> None:
    assert observed(make(num_blocks=3), 5000)[0] == (1, 16, 32, 64)
    assert observed(make(context=100), 5000)[0] == (1, 16, 32, 64)


def test_a_step_that_fails_ends_the_start() -> None:
    with pytest.raises(StartFailed, match="warm-up step of 1 token"):
        observed(make(faults=Fault(failing=frozenset())), 5000)
