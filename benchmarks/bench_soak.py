"""Whether memory grows: steps of random shapes after warm-up, resident memory before and after. Prints one JSON object.

Warm-up is that of a start, then a tenth as many random steps again: the kernels' caches are bounded, but start empty.

Sequences come, decode, take random chunks and go; the sampling settings are random too. Growth is between the median of
the first tenth of the steps and that of the last tenth, so that one late allocation does not decide.
"""

import random
import statistics
from typing import Any

from common import arguments, report, target
from engines import prepared_model, running_executor
from tailrace.engine.step import TOKENS_PER_BLOCK, Executor, SamplingRow, Slice, StepDone, StepPlan
from tailrace.executor.machine import read_resident_bytes
from tailrace.request import SamplingParams, SequenceId, StepId

SEQUENCES_MAX = 8
CONTEXT_TOKENS_MAX = 512
CHUNK_TOKENS_MAX = 64
POOL_BYTES = 256 * 1024**2
SETTINGS = (
    SamplingParams(max_tokens=1, temperature=0.0),
    SamplingParams(max_tokens=1, temperature=0.8, top_p=0.95),
    SamplingParams(max_tokens=1, top_k=40, num_logprobs=5),
)


class RandomSteps:
    """Plans of 1 to `SEQUENCES_MAX` slices over fixed block tables; sequence i owns its own part of the pool."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._random = random.Random(seed)
        self._vocab_size = vocab_size
        self._lengths = [0] * SEQUENCES_MAX
        self._num_steps = 0

    def next_plan(self) -> StepPlan:
        self._num_steps += 1
        chosen = self._random.sample(range(SEQUENCES_MAX), self._random.randint(1, SEQUENCES_MAX))
        return StepPlan(step_id=StepId(self._num_steps), slices=tuple(self._slice(index) for index in chosen))

    def _slice(self, index: int) -> Slice:
        is_chunk = self._lengths[index] == 0 or self._random.random() < 0.2
        num_tokens = self._random.randint(1, CHUNK_TOKENS_MAX) if is_chunk else 1
        if self._lengths[index] + num_tokens > CONTEXT_TOKENS_MAX:
            self._lengths[index] = 0
        start = self._lengths[index]
        self._lengths[index] += num_tokens
        num_blocks = CONTEXT_TOKENS_MAX // TOKENS_PER_BLOCK
        return Slice(
            sequence_id=SequenceId(index),
            start=start,
            token_ids=[self._random.randrange(self._vocab_size) for _ in range(num_tokens)],
            block_ids=range(index * num_blocks, (index + 1) * num_blocks),
            sampling=SamplingRow(params=self._random.choice(SETTINGS), choice=0, position=start + num_tokens),
        )


def resident_by_step(executor: Executor, vocab_size: int, num_steps: int, seed: int) -> list[int]:
    """Resident bytes after each step."""
    steps = RandomSteps(seed, vocab_size)
    resident: list[int] = []
    for _ in range(num_steps):
        outcome = executor.execute(steps.next_plan())
        assert isinstance(outcome, StepDone), outcome
        resident.append(read_resident_bytes())
    return resident


def growth(resident: list[int]) -> dict[str, Any]:
    tenth = max(1, len(resident) // 10)
    tenths = [round(statistics.median(resident[i : i + tenth])) for i in range(0, len(resident), tenth)]
    return {
        "resident_bytes_by_tenth": tenths,
        "growth_bytes": tenths[-1] - tenths[0],
        "growth_ratio": tenths[-1] / tenths[0] - 1,
    }


def main() -> None:
    options = arguments(
        "resident memory over steps of random shapes",
        steps=(int, 2000, "steps after warm-up"),
        seed=(int, 0, "of the shapes"),
    )
    num_steps = 30 if options.quick else options.steps
    vocab_size = prepared_model(options.model).manifest.shape.vocab_size
    executor = running_executor(options.model, kv_bytes=POOL_BYTES, sequences_max=SEQUENCES_MAX).executor
    resident_by_step(executor, vocab_size, num_steps // 10, options.seed + 1)  # fills the kernels' caches
    resident = resident_by_step(executor, vocab_size, num_steps, options.seed)
    results = growth(resident)
    report(
        "soak",
        parameters={"model": options.model, "steps": num_steps, "seed": options.seed},
        results=results,
        targets=[target("growth of resident memory, ratio", results["growth_ratio"], at_most=0.01)],
    )


if __name__ == "__main__":
    main()
