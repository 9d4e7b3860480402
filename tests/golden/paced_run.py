"""Real sender processes against `pacing_server.py`: their report beside the server's own log of the same requests.

The expected figures here are computed from the log alone, by formulas written out again, never by `tailrace.measure`.
"""

import asyncio
import http.client
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tailrace.measure.build import build_report
from tailrace.measure.record import RequestRecord
from tailrace.measure.report import Report
from tailrace.measure.run_info import RunInfo
from tailrace.measure.slo import Slo
from tailrace.measure.table import RecordTable
from tailrace.workload.job import BodyOptions, Endpoint, PlanSource, Realisation, SendJob
from tailrace.workload.run.senders import run_senders

SERVER = Path(__file__).with_name("pacing_server.py")
NS_PER_MS = 1_000_000
_TIMEOUT_NS = 60_000 * NS_PER_MS
_WORKLOAD = """
name = "paced"
[[cohorts]]
prompt_tokens = {{ law = "constant", value = 8 }}
output_tokens = {{ law = "constant", value = {num_output_tokens} }}
"""


class Emitted(msgspec.Struct, frozen=True):
    """One chunk as the server sent it: readable at some instant from `before_ns` to `after_ns`."""

    due_ns: int
    before_ns: int
    after_ns: int
    tokens: int
    kind: str


class ServedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the server saw it."""

    request_id: str
    num_asked: int | None
    num_prompt: int
    stream: bool
    read_ns: int
    headers_ns: int | None
    chunks: list[Emitted]
    done_ns: int | None

    @property
    def texts(self) -> list[Emitted]:
        """Chunks with tokens."""
        return [chunk for chunk in self.chunks if chunk.tokens > 0]


class PacedPair(msgspec.Struct, frozen=True):
    """The same request, seen from both ends."""

    record: RequestRecord
    served: ServedRequest

    @property
    def received_ns(self) -> list[int]:
        """Instants of the record's chunks."""
        at_ns, instants = self.record.scheduled_ns, []
        for gap_ns in self.record.chunk_gaps_ns:
            at_ns += gap_ns
            instants.append(at_ns)
        return instants


class PacedRun(msgspec.Struct, frozen=True):
    report: Report
    pairs: list[PacedPair]


class PacingServer:
    """The process; `run` sends to it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def set_script(self, script: dict[str, Any]) -> None:
        """Of all requests from now on; the log is empty after it."""
        self._call("PUT", "/script", json.dumps(script))

    def log(self) -> list[ServedRequest]:
        content = self._call("GET", "/log", None)
        rows = json.loads(content)["requests"]
        for row in rows:
            row["chunks"] = [dict(zip(Emitted.__struct_fields__, chunk, strict=True)) for chunk in row["chunks"]]
        return msgspec.convert(rows, list[ServedRequest])

    def run(
        self,
        script: dict[str, Any],
        *,
        num_requests: int = 6,
        arrivals: str = "constant:20",
        num_output_tokens: int = 12,
        api: str = "chat",
        chunk_usage: bool = False,
        num_senders: int = 1,
        slo: Slo | None = None,
    ) -> PacedRun:
        """One whole run through sender processes, its report, and the log of its requests in the same order."""
        self.set_script(script)
        source = PlanSource(
            workload_toml=_WORKLOAD.format(num_output_tokens=num_output_tokens),
            arrivals=arrivals,
            seed=1,
            run_id="paced",
            duration_s=None,
            num_requests=num_requests,
            warmup_s=0.0,
        )
        with tempfile.TemporaryDirectory() as folder:
            jobs = [
                SendJob(
                    source=source,
                    endpoint=Endpoint(base_url=self.url, model="paced", api=api),
                    realisation=Realisation(words=("the", "of", "and"), overhead_tokens=5),
                    options=BodyOptions(chunk_usage=chunk_usage),
                    shard=shard,
                    num_shards=num_senders,
                    timeout_ns=_TIMEOUT_NS,
                    num_in_flight_max=1_000,
                    rows_path=f"{folder}/rows-{shard}.jsonl",
                )
                for shard in range(num_senders)
            ]
            result = asyncio.run(run_senders(jobs))
            decode = msgspec.json.Decoder(RequestRecord).decode_lines
            records = [record for path in result.rows_paths for record in decode(Path(path).read_bytes())]
        info = run_info(source, self.url, result.origin_ns, result.window_end_ns, slo or Slo())
        records.sort(key=lambda record: record.scheduled_ns)
        served = {each.request_id: each for each in self.log()}
        # Of a load that goes on until the window's requests have ended, the report takes the window's.
        pairs = [PacedPair(record, served[record.request_id]) for record in records if record.request_id in served]
        inside = [pair for pair in pairs if pair.record.scheduled_ns - result.origin_ns < result.window_end_ns]
        return PacedRun(build_report(info, RecordTable.from_records(records)), inside)

    def _call(self, method: str, path: str, body: str | None) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            content = response.read()
            assert response.status == 200, content
            return content
        finally:
            connection.close()


def run_info(source: PlanSource, url: str, origin_ns: int, window_end_ns: int, slo: Slo) -> RunInfo:
    return RunInfo(
        run_id=source.run_id,
        started_at="2026-01-01T00:00:00+00:00",
        url=url,
        model="paced",
        api="chat",
        arrivals=source.arrivals,
        workload="paced",
        workload_sha256="",
        schedule_sha256="",
        seed=source.seed,
        slo=slo,
        origin_ns=origin_ns,
        window_start_ns=0,
        window_end_ns=window_end_ns,
        timeout_ns=_TIMEOUT_NS,
        offered_per_s=None,
    )


@contextmanager
def pacing_server() -> Iterator[PacingServer]:
    process = subprocess.Popen(
        [sys.executable, str(SERVER)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        word, _, port = process.stdout.readline().partition(" ")
        assert word == "listening"
        yield PacingServer(int(port))
    finally:
        process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
