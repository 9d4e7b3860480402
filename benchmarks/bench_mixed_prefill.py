"""Eight streams decode while a prompt of 4,000 tokens arrives: what the eight feel, with and without an ITL target.

The gap between two tokens of a stream that overlaps the prefill is the figure; the long prompt's TTFT is its price.
"""

import asyncio

import numpy as np

from common import Timeline, arguments, random_prompt, report, run_request, say, summary, target
from engines import running_engine
from tailrace.request import RequestId
from tailrace.worker.engine_client import EngineClient

NUM_STREAMS = 8
STREAM_PROMPT_TOKENS = 64
STREAM_TOKENS_MAX = 6_000
SKIPPED_GAPS = 4
"""The first gaps of a stream still overlap the other streams' prefill."""


async def measure(model: str, itl_target_ms: float | None, long_tokens: int, rounds: int) -> dict[str, object]:
    rng = np.random.default_rng(1)
    during: list[float] = []
    before: list[float] = []
    ttfts: list[float] = []
    async with running_engine(model, itl_target_ms=itl_target_ms) as engine:
        for i in range(rounds):
            streams = await start_streams(engine, rng, i)
            long = await run_request(engine, f"long-{i}", random_prompt(rng, long_tokens), max_tokens=2)
            for j in range(NUM_STREAMS):
                engine.cancel(RequestId(f"stream-{i}-{j}"))
            timelines: list[Timeline] = await asyncio.gather(*streams)
            ttfts.append(long.ttft_ms)
            for timeline in timelines:
                during += timeline.gaps_ms(after_ns=long.sent_ns, before_ns=long.token_ns[0])
                before += timeline.gaps_ms(before_ns=long.sent_ns)[SKIPPED_GAPS:-1]
            say(f"target {itl_target_ms} ms, round {i}: gap {summary(during)}, TTFT {ttfts[-1]:.0f} ms")
    return {
        "itl_target_ms": itl_target_ms,
        "gap_ms_during_prefill": summary(during),
        "gap_ms_before": summary(before),
        "long_prompt_ttft_ms": summary(ttfts),
    }


async def start_streams(
    engine: EngineClient, rng: np.random.Generator, round_number: int
) -> "list[asyncio.Task[Timeline]]":
    """Returns once all of them decode and the step-time model has seen some of their steps."""
    streams = [
        asyncio.create_task(
            run_request(
                engine,
                f"stream-{round_number}-{j}",
                random_prompt(rng, STREAM_PROMPT_TOKENS),
                max_tokens=STREAM_TOKENS_MAX,
            )
        )
        for j in range(NUM_STREAMS)
    ]
    while engine.stats.num_running < NUM_STREAMS:
        await asyncio.sleep(0.02)
    await asyncio.sleep(2.0)
    return streams


def main() -> None:
    options = arguments(__doc__.splitlines()[0], itl_target_ms=(float, 60.0, "the target that is judged"))
    long_tokens, rounds = (256, 1) if options.quick else (4_000, 1)
    wanted = options.itl_target_ms
    rows = [
        asyncio.run(measure(options.model, itl_target_ms, long_tokens, rounds))
        for itl_target_ms in (wanted, 2 * wanted, None)
    ]
    judged = rows[0]["gap_ms_during_prefill"]
    assert isinstance(judged, dict)
    report(
        "mixed_prefill",
        parameters={
            "model": options.model,
            "streams": NUM_STREAMS,
            "long_prompt_tokens": long_tokens,
            "rounds": rounds,
        },
        results=rows,
        targets=[target(f"gap p99 / ITL target of {wanted:g} ms", judged["p99"] / wanted, at_most=1.3)],
    )


if __name__ == "__main__":
    main()
