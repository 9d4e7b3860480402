"""A report over a file of a million rows: time and memory of reading it and computing all. Prints one JSON object.

Targets: at most 20 s, at most 2 GiB. The report is made in a process of its own, whose peak memory is the figure.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from common import NS_PER_MS, report, say, target
from tailrace.measure.build import build_report
from tailrace.measure.record import Outcome, RequestRecord
from tailrace.measure.rows import encode_record, read_rows, write_rows
from tailrace.measure.run_info import RunInfo
from tailrace.measure.slo import parse_slo

CHUNKS = 32
RATE_PER_S = 200.0
SEVERAL_TOKENS_RATIO = 0.1
"""Of chunks, that carry more than one token: without any ITL would be the chunk gap, and half of the work left out."""


def records(num: int) -> Iterator[bytes]:
    """Poisson arrivals, 1 % refused, lognormal gaps."""
    rng = np.random.default_rng(7)
    scheduled = np.cumsum(rng.exponential(1e9 / RATE_PER_S, num)).astype(np.int64).tolist()
    for number, at_ns in enumerate(scheduled):
        gaps = (rng.lognormal(3, 0.3, CHUNKS) * NS_PER_MS).astype(np.int64)
        tokens = (1 + (rng.random(CHUNKS) < SEVERAL_TOKENS_RATIO)).tolist()
        refused = number % 100 == 0
        yield encode_record(
            RequestRecord(
                request_id=f"request-{number:07d}",
                outcome=Outcome.REFUSED if refused else Outcome.OK,
                scheduled_ns=at_ns,
                issued_ns=at_ns + 50_000,
                connected_ns=at_ns + 60_000,
                sent_ns=at_ns + 90_000,
                headers_ns=at_ns + 1_000_000,
                ended_ns=at_ns + (1_000_000 if refused else int(gaps.sum()) + 100_000),
                first_answer_ns=None if refused else at_ns + int(gaps[0]),
                chunk_gaps_ns=[] if refused else gaps.tolist(),
                chunk_tokens=[] if refused else tokens,
                num_prompt_tokens=256,
                num_prompt_tokens_asked=256,
                num_cached_tokens=0,
                num_output_tokens=None if refused else sum(tokens),
                num_output_tokens_asked=sum(tokens),
                message="no room" if refused else "",
            )
        )


def header(num: int) -> RunInfo:
    seconds = num / RATE_PER_S
    return RunInfo(
        run_id="bench",
        started_at="",
        url="",
        model="",
        api="chat",
        arrivals=f"poisson:{RATE_PER_S:g}",
        workload="",
        workload_sha256="",
        schedule_sha256="",
        seed=7,
        slo=parse_slo("ttft_ms_p99<=500, itl_ms_p99<=60"),
        origin_ns=0,
        window_start_ns=0,
        window_end_ns=int(seconds * 1e9),
        timeout_ns=60_000_000_000,
        offered_per_s=RATE_PER_S,
    )


def child(path: Path) -> None:
    started = time.perf_counter()
    info, table = read_rows(path)
    read = time.perf_counter()
    built = msgspec.json.encode(build_report(info, table))
    done = time.perf_counter()
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    figures = {"read_s": read - started, "build_s": done - read, "peak_bytes": peak_bytes, "report_bytes": len(built)}
    sys.stdout.buffer.write(msgspec.json.encode(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the file")
    parser.add_argument("--quick", action="store_true", help="tiny inputs, to see that it runs")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.child)
        return
    num = 2_000 if options.quick else options.rows
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl.gz"
        say(f"writing {num:,} rows")
        write_rows(path, header(num), records(num))
        file_bytes = os.path.getsize(path)
        say("making the report")
        command = [sys.executable, __file__, "--child", str(path)]
        figures = msgspec.json.decode(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    seconds = figures["read_s"] + figures["build_s"]
    report(
        "report_rows",
        parameters={"rows": num, "chunks_a_row": CHUNKS, "chunks_of_several_tokens_ratio": SEVERAL_TOKENS_RATIO},
        results={**figures, "file_bytes": file_bytes},
        targets=[
            target(f"report over {num:,} rows, s", seconds, at_most=20),
            target(f"report over {num:,} rows, peak memory, GiB", figures["peak_bytes"] / 2**30, at_most=2),
        ],
    )


if __name__ == "__main__":
    main()
