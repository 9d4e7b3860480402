"""Time of `plan_step` + `commit_step` with many decoding sequences, on the modeled executor. Prints one JSON object.

Target: at 256 sequences at most 1 ms (median). Only the two calls are timed; the executor runs in between.
"""

import gc
import time

from common import NS_PER_MS, arguments, report, summary, target
from tailrace.cost.step_time import StepTimeModel
from tailrace.engine.scheduler import EngineConfig, Scheduler
from tailrace.engine.sequence import Sequence
from tailrace.engine.step import ExecutorLimits
from tailrace.executor.modeled import ModeledExecutor
from tailrace.request import RequestId, SamplingParams, SequenceId

CONTEXT = 1024
VOCAB_SIZE = 49_152


def build(num_sequences: int, prompt_tokens: int) -> tuple[Scheduler, ModeledExecutor]:
    """All sequences decode when this returns; no prompt shares a block with another."""
    limits = ExecutorLimits(
        num_blocks=num_sequences * CONTEXT // 32,
        context_tokens_max=CONTEXT,
        step_sizes=(64, 128, 256, 512, 1024),
        scratch_tokens_max=64 * CONTEXT,
    )
    executor = ModeledExecutor(limits, VOCAB_SIZE)
    config = EngineConfig(sequences_max=num_sequences, token_budget=max(1024, num_sequences))
    scheduler = Scheduler(config, limits, frozenset({0}), StepTimeModel())
    for number in range(num_sequences):
        scheduler.submit(
            Sequence(
                sequence_id=SequenceId(number),
                request_id=RequestId(str(number)),
                choice=0,
                prompt_token_ids=[(number * 7919 + position) % VOCAB_SIZE for position in range(prompt_tokens)],
                params=SamplingParams(max_tokens=CONTEXT, seed=number, ignore_eos=True),
                priority=0,
                arrival_ns=number,
            ),
            0,
        )
    while (plan := scheduler.plan_step(0)) is not None:
        scheduler.commit_step(plan, executor.execute(plan), 0)
        if len(plan.slices) == plan.num_tokens == num_sequences:
            return scheduler, executor
    raise AssertionError("the sequences ended before all of them decoded")


def measure(scheduler: Scheduler, executor: ModeledExecutor, num_steps: int) -> tuple[list[float], list[float]]:
    plans_ms, commits_ms = [], []
    for _ in range(num_steps):
        started = time.perf_counter_ns()
        plan = scheduler.plan_step(0)
        planned = time.perf_counter_ns()
        assert plan is not None
        outcome = executor.execute(plan)
        executed = time.perf_counter_ns()
        scheduler.commit_step(plan, outcome, 0)
        ended = time.perf_counter_ns()
        plans_ms.append((planned - started) / NS_PER_MS)
        commits_ms.append((ended - executed) / NS_PER_MS)
    return plans_ms, commits_ms


def main() -> None:
    options = arguments(
        "plan + commit on the modeled executor",
        sequences=(int, 256, "sequences that decode together"),
        steps=(int, 300, "steps timed"),
    )
    num_steps = 20 if options.quick else options.steps
    scheduler, executor = build(options.sequences, prompt_tokens=64)
    gc.collect()
    gc.freeze()  # as the engine process does after start, and it collects at rest only
    gc.disable()
    plans_ms, commits_ms = measure(scheduler, executor, num_steps)
    both = summary([plan + commit for plan, commit in zip(plans_ms, commits_ms, strict=True)])
    report(
        "plan_commit",
        parameters={"sequences": options.sequences, "steps": num_steps, "prompt_tokens": 64},
        results={"plan_ms": summary(plans_ms), "commit_ms": summary(commits_ms), "plan_commit_ms": both},
        targets=[target(f"plan + commit, {options.sequences} sequences, ms", both["p50"], at_most=1.0)],
    )


if __name__ == "__main__":
    main()
