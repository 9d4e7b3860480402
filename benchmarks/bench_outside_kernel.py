"""Time outside the kernel call while streams are open over HTTP: from the service's own step log.

A step's share is (its whole period - its kernel time) / its period, the period being the time from its start to the
next one's: it holds plan, sampling, commit, the message to the app, and whatever the app process took from the cores.
"""

import asyncio
import json
import subprocess
import sys

import aiohttp
import numpy as np

from common import arguments, report, say, summary, target
from engines import prepared_model
from servers import TAILRACE, free_port, wait_ready

STEP_LOG_MAX = 4_096
CASES = {
    "greedy": {"temperature": 0},
    "temperature and top-p": {"temperature": 0.8, "top_p": 0.95},
}


async def stream(session: aiohttp.ClientSession, model: str, body: dict[str, object], num_tokens: int) -> int:
    body = {"model": model, "max_tokens": num_tokens, "stream": True, "ignore_eos": True, **body}
    async with session.post("/v1/completions", json=body) as response:
        response.raise_for_status()
        num = 0
        async for line in response.content:
            num += line.startswith(b"data: {")
    return num


async def measure(
    port: int, model: str, num_streams: int, num_tokens: int, fields: dict[str, object]
) -> dict[str, object]:
    timeout = aiohttp.ClientTimeout(total=900)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=timeout, connector=connector) as session:
        bodies = [{"prompt": [1000 + i] * 16, "seed": i, **fields} for i in range(num_streams)]
        before = await step_log(session)
        await asyncio.gather(*(stream(session, model, body, num_tokens) for body in bodies))
        records = (await step_log(session))[len(before) :]
    return outside(records, num_streams)


async def step_log(session: aiohttp.ClientSession) -> list[dict[str, int]]:
    """All steps so far: fewer than the log keeps."""
    async with session.get("/debug/steps") as response:
        steps: list[dict[str, int]] = (await response.json())["steps"]
    assert len(steps) < STEP_LOG_MAX, "the step log has begun to forget"
    return steps


def outside(records: list[dict[str, int]], num_streams: int) -> dict[str, object]:
    """Steps that only decode, with all streams in them, and whose successor is such a step too."""
    full = [each["num_decode_rows"] == num_streams and each["num_prefill_tokens"] == 0 for each in records]
    pairs = [(a, b) for a, b, x, y in zip(records, records[1:], full, full[1:], strict=False) if x and y]
    period = np.array([b["started_ns"] - a["started_ns"] for a, b in pairs], dtype=float)
    kernel = np.array([a["kernel_ns"] for a, _ in pairs], dtype=float)
    parts = {
        name: summary([a[f"{name}_ns"] / 1e6 for a, _ in pairs]) for name in ("plan", "kernel", "sampling", "commit")
    }
    return {
        "steps": len(pairs),
        "outside_ratio": summary(list((period - kernel) / period)),
        "outside_ratio_of_total": round(float((period - kernel).sum() / period.sum()), 5),
        "outside_ms": summary(list((period - kernel) / 1e6)),
        "period_ms": summary(list(period / 1e6)),
        "parts_ms": parts,
    }


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    counts, num_tokens = ((1, 4), 8) if options.quick else ((1, 64), 64)
    prepared_model(options.model)
    port = free_port()
    command = [TAILRACE, "serve", options.model, "--port", str(port), "--debug-steps"]
    command += ["--served-model-name", "bench", "--sequences-max", str(max(counts))]
    results = []
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=sys.stderr, stdin=subprocess.DEVNULL)
    try:
        wait_ready(port, server)
        for num in counts:
            for name, fields in CASES.items():
                row = asyncio.run(measure(port, "bench", num, num_tokens, fields))
                results.append({"streams": num, "sampling": name, **row})
                say(json.dumps(results[-1]["outside_ratio"]))
    finally:
        server.terminate()
        server.wait(timeout=60)
    by_case = {(row["streams"], row["sampling"]): row for row in results}
    many = max(counts)
    report(
        "outside_kernel",
        parameters={"model": options.model, "streams": counts, "tokens_each": num_tokens},
        results=results,
        targets=[
            target(f"{many} streams, greedy, share", by_case[many, "greedy"]["outside_ratio"]["p50"], at_most=0.03),
            target(
                f"{many} streams, temperature and top-p, share",
                by_case[many, "temperature and top-p"]["outside_ratio"]["p50"],
                at_most=0.10,
            ),
            target("1 stream, greedy, ms a step", by_case[1, "greedy"]["outside_ms"]["p50"], at_most=0.4),
        ],
    )


if __name__ == "__main__":
    main()
