"""The load generator against the null server, for benchmarks of the client itself."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tailrace.measure.record import RequestRecord
from tailrace.workload.job import BodyOptions, Endpoint, PlanSource, Realisation, SendJob
from tailrace.workload.run.null_server import MODEL
from tailrace.workload.run.senders import SendResult, run_senders
from tailrace.workload.words import WORDS

PACE_MS = 10.0
PROMPT_TOKENS = 200
"""Words of the client's own list: about 1 kB."""
_STOP_S = 30.0


class Served:
    """What a null server says when it ends."""

    url = ""
    num_streams = 0
    num_chunks = 0


@contextmanager
def null_server(pace_ms: float = PACE_MS, cpu: int | None = None) -> Iterator[Served]:
    """A null server, on one processor where named. The counts are there after the block."""
    command = [sys.executable, "-m", "tailrace.workload.run.null_server", "--pace-ms", str(pace_ms)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdin is not None
    assert server.stdout is not None
    served = Served()
    try:
        if cpu is not None:
            os.sched_setaffinity(server.pid, {cpu})
        served.url = server.stdout.readline().decode().strip()
        if not served.url:
            raise RuntimeError("the null server did not start")
        yield served
        server.stdin.close()
        counts = json.loads(server.stdout.readline())
        served.num_streams, served.num_chunks = counts["num_streams"], counts["num_chunks"]
        server.wait(_STOP_S)
    finally:
        if server.poll() is None:
            server.kill()
        server.wait()
        server.stdout.close()


def workload_toml(num_output_tokens: int, num_prompt_tokens: int = PROMPT_TOKENS) -> str:
    return (
        'name = "client"\n[[cohorts]]\n'
        f'prompt_tokens = {{ law = "constant", value = {num_prompt_tokens} }}\n'
        f'output_tokens = {{ law = "constant", value = {num_output_tokens} }}\n'
    )


def send(
    url: str, arrivals: str, *, num_output_tokens: int, duration_s: float, warmup_s: float, num_senders: int = 1
) -> tuple[SendResult, list[RequestRecord]]:
    """A run, and the records of its window."""
    source = PlanSource(
        workload_toml=workload_toml(num_output_tokens),
        arrivals=arrivals,
        seed=20261130,
        run_id="bench",
        duration_s=duration_s,
        num_requests=None,
        warmup_s=warmup_s,
    )
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            SendJob(
                source=source,
                endpoint=Endpoint(base_url=url, model=MODEL),
                realisation=Realisation(words=WORDS),
                options=BodyOptions(),
                shard=shard,
                num_shards=num_senders,
                timeout_ns=60_000_000_000,
                num_in_flight_max=10_000,
                rows_path=str(Path(folder) / f"rows-{shard}.jsonl"),
            )
            for shard in range(num_senders)
        ]
        result = asyncio.run(run_senders(jobs))
        records = _read(result.rows_paths)
    start_ns = result.origin_ns + round(warmup_s * 1e9)
    end_ns = result.origin_ns + result.window_end_ns
    return result, [record for record in records if start_ns <= record.scheduled_ns < end_ns]


def send_lags_ms(records: Sequence[RequestRecord]) -> list[float]:
    """What was never issued is late without end."""
    return [
        float("inf") if record.issued_ns is None else (record.issued_ns - record.scheduled_ns) / 1e6
        for record in records
    ]


def _read(paths: Sequence[str]) -> list[RequestRecord]:
    decode = msgspec.json.Decoder(RequestRecord).decode_lines
    return [record for path in paths for record in decode(Path(path).read_bytes())]
