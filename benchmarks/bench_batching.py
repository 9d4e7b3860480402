"""Static against continuous batching on requests of mixed lengths: the same requests, all at once, both policies.

Static admits only into an empty batch, so a batch lasts as long as its longest answer.
"""

import asyncio
import time

import numpy as np

from common import Timeline, arguments, random_prompt, report, run_request, say, summary, target
from engines import running_engine

SEQUENCES_MAX = 16


def requests(num: int, output_tokens_max: int) -> list[tuple[list[int], int]]:
    """Prompts of 16 to 128 tokens; answers log-uniform up to the longest, as chat traffic has few long ones."""
    rng = np.random.default_rng(7)
    lengths = np.exp(rng.uniform(np.log(8), np.log(output_tokens_max), num)).astype(int)
    return [(random_prompt(rng, int(rng.integers(16, 129))), int(length)) for length in lengths]


async def measure(model: str, batching: str, work: list[tuple[list[int], int]]) -> dict[str, object]:
    async with running_engine(model, batching=batching, sequences_max=SEQUENCES_MAX, prefix_caching=False) as engine:
        started = time.monotonic()
        timelines: list[Timeline] = await asyncio.gather(
            *(
                run_request(engine, f"r{i}", prompt, max_tokens=num_tokens)
                for i, (prompt, num_tokens) in enumerate(work)
            )
        )
        elapsed_s = time.monotonic() - started
    num_tokens = sum(len(each.token_ns) for each in timelines)
    result = {
        "batching": batching,
        "elapsed_s": round(elapsed_s, 3),
        "output_tokens": num_tokens,
        "output_tokens_per_s": round(num_tokens / elapsed_s, 2),
        "ttft_ms": summary([each.ttft_ms for each in timelines]),
        "e2e_ms": summary([(each.token_ns[-1] - each.sent_ns) / 1e6 for each in timelines]),
    }
    say(f"{batching}: {result['output_tokens_per_s']} tokens/s, TTFT p50 {result['ttft_ms']}")  # type: ignore[index]
    return result


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    num, output_tokens_max, rounds = (6, 16, 1) if options.quick else (64, 256, 3)
    work = requests(num, output_tokens_max)
    rows = [
        asyncio.run(measure(options.model, batching, work))
        for _ in range(rounds)
        for batching in ("static", "continuous")
    ]
    medians = {
        name: float(np.median([row["output_tokens_per_s"] for row in rows if row["batching"] == name]))  # type: ignore[arg-type]
        for name in ("static", "continuous")
    }
    report(
        "batching",
        parameters={
            "model": options.model,
            "requests": num,
            "output_tokens_max": output_tokens_max,
            "sequences_max": SEQUENCES_MAX,
            "rounds": rounds,
        },
        results={"median_output_tokens_per_s": medians, "runs": rows},
        targets=[
            target("continuous / static output tokens/s", medians["continuous"] / medians["static"], at_least=1.0)
        ],
    )


if __name__ == "__main__":
    main()
