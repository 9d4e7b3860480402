"""First steps before ready: kernels compile for each new token count, and the step-time model learns the machine.

The first step of all costs the most (136 ms measured), each new token count 3 to 16 ms once.
"""

from collections.abc import Callable, Sequence

from tailrace.clock import NS_PER_S
from tailrace.engine.step import TOKENS_PER_BLOCK, Executor, SamplingRow, Slice, StepDone, StepPlan
from tailrace.errors import StartFailed
from tailrace.request import SamplingParams, SequenceId, StepId

WARM_UP_NS_MAX = 5 * NS_PER_S
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)

Observe = Callable[[StepPlan, int], None]
"""Called with each plan but the first, and its duration in nanoseconds."""


def warm_up(
    executor: Executor, step_sizes: Sequence[int], *, observe: Observe, duration_max_ns: int = WARM_UP_NS_MAX
) -> tuple[int, ...]:
    """Runs one-token steps and the smallest size, then the others from the largest. Returns the sizes run, ascending.

    A size whose predicted duration does not fit the time left is left out; predicted from the time a token took in the
    size before, which is an upper bound (the fixed part of a step weighs less in a larger one). Uses the pool's first
    blocks, so run it before any sequence does. Raises StartFailed when a step fails.
    """
    smallest = min(step_sizes)
    others = sorted(set(step_sizes) - {smallest}, reverse=True)
    spent_ns = _run(executor, prefill_plan(1))
    token_ns = 0
    done = []
    for size in (1, 1, smallest, smallest, *others):
        plan = prefill_plan(size)
        if not _fits(executor, plan) or spent_ns + size * token_ns > duration_max_ns:
            continue
        duration_ns = _run(executor, plan)
        observe(plan, duration_ns)
        spent_ns += duration_ns
        token_ns = duration_ns // size if size > 1 else 0
        done.append(size)
    return tuple(sorted(set(done)))


def prefill_plan(num_tokens: int) -> StepPlan:
    """One sequence's first `num_tokens` tokens, in the first blocks of the pool, drawing one token."""
    piece = Slice(
        sequence_id=SequenceId(0),
        start=0,
        token_ids=[0] * num_tokens,
        block_ids=range(-(-num_tokens // TOKENS_PER_BLOCK)),
        sampling=SamplingRow(params=_GREEDY, choice=0, position=num_tokens),
    )
    return StepPlan(step_id=StepId(0), slices=(piece,))


def _fits(executor: Executor, plan: StepPlan) -> bool:
    limits = executor.limits
    return plan.num_tokens <= limits.context_tokens_max and len(plan.slices[0].block_ids) <= limits.num_blocks


def _run(executor: Executor, plan: StepPlan) -> int:
    outcome = executor.execute(plan)
    if not isinstance(outcome, StepDone):
        raise StartFailed(f"a warm-up step of {plan.num_tokens} tokens did not run: {outcome}")
    return outcome.kernel_ns + outcome.sampling_ns
