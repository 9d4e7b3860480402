"""Decode throughput of our executor against OpenVINO GenAI's ContinuousBatchingPipeline: same IR, same KV precision.

Both live in one process and take turns, step by step, so that a noisy neighbour slows both. Our steps go through plan
checks, kernels and sampling (`OpenVinoExecutor.execute`); theirs through `pipeline.step()`. All KV pages are written
before timing (see `OurDecode`; theirs by their prefill). `shared`: all sequences have one prefix; `distinct`: none.
"""

import time
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai

from common import arguments, random_prompt, report, say, summary, target
from engines import prepared_model, production_kv_dtype, running_executor
from tailrace.cost.memory import kv_block_bytes
from tailrace.engine.step import SamplingRow, Slice, StepDone, StepPlan
from tailrace.executor.openvino import OpenVinoExecutor
from tailrace.request import SamplingParams, SequenceId, StepId

BATCHED_TOKENS_MAX = 2048
WARM_STEPS = 3
CHUNK_TOKENS = 256
DECODE_TOKENS_MAX = 160
"""A sequence stays within its own blocks: past that many tokens it starts again at the end of its context."""
GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)


class OurDecode:
    """`num` sequences of `context` tokens; each step computes one token of each and draws the next.

    The first sequence's KV is really computed; without a shared prefix its blocks are copied to the others, so every
    page that a step reads holds real keys and values of its own.
    """

    def __init__(self, executor: OpenVinoExecutor, num: int, context: int, shared: bool) -> None:
        self.executor, self.context = executor, context
        blocks_each = -(-(context + DECODE_TOKENS_MAX) // 32)
        prefix = context // 32 if shared else 0
        own = blocks_each - prefix
        self.tables = [[*range(prefix), *range(prefix + i * own, prefix + (i + 1) * own)] for i in range(num)]
        self.tokens = [100 + i for i in range(num)]
        self.length = context
        self.num_steps = 0
        self._write_context(random_prompt(np.random.default_rng(0), context), prefix)

    def _write_context(self, prompt: list[int], prefix: int) -> None:
        for start in range(0, len(prompt), CHUNK_TOKENS):
            self._run(self._slice(0, start, prompt[start : start + CHUNK_TOKENS], draws=False))
        copies = [
            (source, target_block)
            for table in self.tables[1:]
            for source, target_block in zip(self.tables[0][prefix:], table[prefix:], strict=True)
        ]
        self._run(self._slice(0, self.length - 1, prompt[-1:], draws=False), copies=tuple(copies))

    def _slice(self, i: int, start: int, token_ids: list[int], *, draws: bool) -> Slice:
        row = SamplingRow(params=GREEDY, choice=0, position=start + len(token_ids)) if draws else None
        return Slice(
            sequence_id=SequenceId(i), start=start, token_ids=token_ids, block_ids=self.tables[i], sampling=row
        )

    def _run(self, *slices: Slice, copies: tuple[tuple[int, int], ...] = ()) -> StepDone:
        plan = StepPlan(step_id=StepId(self.num_steps), slices=slices, block_copies=copies)
        outcome = self.executor.execute(plan)
        assert isinstance(outcome, StepDone), outcome
        self.num_steps += 1
        return outcome

    def step(self) -> float:
        started = time.perf_counter()
        done = self._run(*(self._slice(i, self.length, [token], draws=True) for i, token in enumerate(self.tokens)))
        self.tokens = [each.token_ids[0] for each in done.outcomes]
        elapsed = time.perf_counter() - started
        self.length = self.context + (self.length + 1 - self.context) % DECODE_TOKENS_MAX
        return elapsed


class TheirDecode:
    """Sequences of the GenAI pipeline: prefilled, then stepped. `context`: what they hold when timing starts."""

    def __init__(self, pipeline: genai.ContinuousBatchingPipeline, prompts: list[list[int]], num_steps: int) -> None:
        self.pipeline = pipeline
        prefill_steps = 2 + sum(map(len, prompts)) // BATCHED_TOKENS_MAX + len(prompts)
        config = genai.GenerationConfig(max_new_tokens=num_steps + prefill_steps, ignore_eos=True, do_sample=False)
        self.drawn: list[int] = []
        self.handles = []
        for i, prompt in enumerate(prompts):
            self.handles.append(pipeline.add_request(i, ov.Tensor(np.array([prompt], dtype=np.int64)), config))
            self.drawn.append(0)
            if i == 0:
                self._until_all_started()  # the first one writes the prefix that the others then find
        self._until_all_started()
        self.context = round(float(np.mean([len(p) + n for p, n in zip(prompts, self.drawn, strict=True)])))

    def _until_all_started(self) -> None:
        while not all(self.drawn):
            self.step()

    def step(self) -> float:
        started = time.perf_counter()
        self.pipeline.step()
        elapsed = time.perf_counter() - started
        for i, handle in enumerate(self.handles):
            if handle.can_read():
                self.drawn[i] += sum(len(each.generated_ids) for each in handle.read().values())
        return elapsed

    def end(self) -> None:
        for handle in self.handles:
            handle.cancel()
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()


def their_pipeline(
    directory: Path, num_blocks: int, kv_dtype: str, num_threads: int
) -> genai.ContinuousBatchingPipeline:
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = num_blocks
    scheduler.max_num_seqs = 64
    scheduler.max_num_batched_tokens = BATCHED_TOKENS_MAX
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    properties = {"KV_CACHE_PRECISION": kv_dtype, "INFERENCE_NUM_THREADS": num_threads}
    return genai.ContinuousBatchingPipeline(str(directory), scheduler, "CPU", properties)


def compare(
    executor: OpenVinoExecutor,
    pipeline: genai.ContinuousBatchingPipeline,
    num: int,
    context: int,
    shared: bool,
    steps: int,
) -> dict[str, object]:
    rng = np.random.default_rng(num + shared)
    prefix = random_prompt(rng, context - 8)
    prompts = [(prefix if shared else random_prompt(rng, context - 8)) + random_prompt(rng, 8) for _ in range(num)]
    theirs = TheirDecode(pipeline, prompts, steps + WARM_STEPS)
    ours = OurDecode(executor, num, theirs.context, shared)
    timed: dict[str, list[float]] = {"ours": [], "theirs": []}
    for i in range(steps + WARM_STEPS):
        for name, side in (("ours", ours), ("theirs", theirs)) if i % 2 else (("theirs", theirs), ("ours", ours)):
            elapsed = side.step()
            if i >= WARM_STEPS:
                timed[name].append(1e3 * elapsed)
    theirs.end()
    medians = {name: float(np.median(values)) for name, values in timed.items()}
    result = {
        "sequences": num,
        "prefix": "shared" if shared else "distinct",
        "context_tokens": theirs.context,
        "ours_ms": summary(timed["ours"]),
        "theirs_ms": summary(timed["theirs"]),
        "ours_tokens_per_s": round(num * 1e3 / medians["ours"], 1),
        "theirs_tokens_per_s": round(num * 1e3 / medians["theirs"], 1),
        "ratio": round(medians["theirs"] / medians["ours"], 3),
    }
    say(f"{num} {result['prefix']}: ratio {result['ratio']}")
    return result


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    context, counts = (64, (1, 2)) if options.quick else (1024, (1, 8, 32, 64))
    model = prepared_model(options.model)
    num_blocks = max(counts) * (-(-(context + DECODE_TOKENS_MAX) // 32) + 2) + 64
    kv_bytes = num_blocks * kv_block_bytes(model.manifest.shape, production_kv_dtype())
    started = running_executor(options.model, kv_bytes=kv_bytes, sequences_max=max(counts))
    pipeline = their_pipeline(model.directory, num_blocks, started.memory.kv_dtype, started.num_threads)
    rows = []
    for num in counts:
        steps = 3 if options.quick else {1: 120, 8: 60, 32: 30}.get(num, 20)
        for shared in (True, False):
            rows.append(compare(started.executor, pipeline, num, context, shared, steps))
    targets = [
        target(
            f"sequences {row['sequences']}, {row['prefix']}: tokens/s, ours / GenAI",
            row["ratio"],
            at_least=1.15 if row["sequences"] in (32, 64) and row["prefix"] == "shared" else 1.0,
        )
        for row in rows
    ]
    parameters = {
        "model": options.model,
        "weights": model.manifest.weights_format,
        "kv_dtype": started.memory.kv_dtype,
        "num_threads": started.num_threads,
        "sampling": "greedy",
    }
    report("decode_step", parameters=parameters, results=rows, targets=targets)


if __name__ == "__main__":
    main()
