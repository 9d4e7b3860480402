"""How late the load generator sends: 200 requests a second of 1 kB prompts, the null server on another processor.

Lag counts from the scheduled instant to the instant the request is issued. Beside it: the time until all of its bytes
are with the kernel, TTFT against a server that answers at once, and receipt of a chunk against its writing.
Prints one JSON object.
"""

import os
from typing import Any

from common import arguments, report, say, summary, target
from load import null_server, send, send_lags_ms

RATE_PER_S = 200
OUTPUT_TOKENS = 16


def main() -> None:
    args = arguments(__doc__ or "", rounds=(int, 3, "runs"), seconds=(float, 20.0, "length of a run's window"))
    rounds, seconds = (1, 2.0) if args.quick else (args.rounds, args.seconds)
    cpus = sorted(os.sched_getaffinity(0))
    runs: list[dict[str, Any]] = []
    with null_server(cpu=cpus[-1] if len(cpus) > 1 else None) as served:
        if len(cpus) > 1:
            os.sched_setaffinity(0, set(cpus[:-1]))
        for number in range(rounds):
            runs.append(one_run(served.url, seconds))
            say(f"run {number + 1} of {rounds}: send lag p99 {runs[-1]['send_lag_ms']['p99']:.3f} ms")
    ranked = sorted(run["send_lag_ms"]["p99"] for run in runs)
    report(
        "send_lag",
        parameters={
            "rate_per_s": RATE_PER_S,
            "prompt_bytes": 1_000,
            "output_tokens": OUTPUT_TOKENS,
            "seconds": seconds,
        },
        results={"runs": runs, "num_streams": served.num_streams, "num_chunks": served.num_chunks},
        targets=[
            target("send lag p99 at 200 requests/s, ms (median of the runs)", ranked[len(ranked) // 2], at_most=1.0)
        ],
    )


def one_run(url: str, seconds: float) -> dict[str, Any]:
    result, records = send(
        url, f"poisson:{RATE_PER_S}", num_output_tokens=OUTPUT_TOKENS, duration_s=seconds, warmup_s=1.0
    )
    ok = [record for record in records if record.sent_ns is not None and record.chunk_gaps_ns]
    finished = result.finished[0]
    return {
        "num_requests": len(records),
        "num_failed": sum(record.outcome != "ok" for record in records),
        "send_lag_ms": summary(send_lags_ms(records)),
        "sent_ms": summary([(record.sent_ns - record.scheduled_ns) / 1e6 for record in ok if record.sent_ns]),
        "ttft_ms": summary([record.chunk_gaps_ns[0] / 1e6 for record in ok]),
        "chunk_lag_ms": summary([lag_ns / 1e6 for lag_ns in finished.chunk_lag_ns]),
        "loop_lag_ms": summary([lag_ns / 1e6 for lag_ns in finished.loop_lag_ns]),
        "gc_pause_ms_max": max(finished.gc_pauses_ns, default=0) / 1e6,
        "cpu_ratio": finished.cpu_ratio,
        "steal_ratio": finished.steal_ratio,
    }


if __name__ == "__main__":
    main()
