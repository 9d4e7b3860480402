"""TTFT of a request with 900 shared and 60 own prompt tokens: prefix in the KV cache (warm) against none (cold)."""

import asyncio

import numpy as np

from common import arguments, random_prompt, report, run_request, say, summary, target
from engines import running_engine

SHARED_TOKENS, OWN_TOKENS = 900, 60


async def measure(model: str, rounds: int, shared_tokens: int) -> dict[str, list[float]]:
    """Cold and warm take turns: each round brings a prefix nobody had, and asks with it twice."""
    rng = np.random.default_rng(0)
    times: dict[str, list[float]] = {"cold": [], "warm": [], "cached_tokens": []}
    async with running_engine(model) as engine:
        for i in range(rounds):
            prefix = random_prompt(rng, shared_tokens)
            for kind in ("cold", "warm"):
                prompt = prefix + random_prompt(rng, OWN_TOKENS)
                timeline = await run_request(engine, f"{kind}-{i}", prompt, max_tokens=2)
                times[kind].append(timeline.ttft_ms)
            times["cached_tokens"].append(timeline.num_cached_tokens)
            say(f"round {i}: cold {times['cold'][-1]:.0f} ms, warm {times['warm'][-1]:.0f} ms")
    return times


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    rounds, shared_tokens = (2, 96) if options.quick else (15, SHARED_TOKENS)
    times = asyncio.run(measure(options.model, rounds, shared_tokens))
    ratio = float(np.median(np.array(times["warm"]) / np.array(times["cold"])))
    report(
        "prefix_hit",
        parameters={"model": options.model, "shared_tokens": shared_tokens, "own_tokens": OWN_TOKENS, "rounds": rounds},
        results={name: summary(values) for name, values in times.items()},
        targets=[target("TTFT warm / cold, median of paired rounds", ratio, at_most=0.25)],
    )


if __name__ == "__main__":
    main()
