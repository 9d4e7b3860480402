"""The same schedule against a server that costs nothing, before the run: what of a latency will be the client's own.

It also says how many sender processes the schedule needs: one, and more only where one comes too late.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np

from tailrace.errors import InvalidRequest, SenderFailed
from tailrace.measure.record import RequestRecord
from tailrace.measure.run_info import NullRun
from tailrace.measure.slo import Slo
from tailrace.measure.statistics import nearest_rank
from tailrace.measure.table import Floats, RecordTable
from tailrace.workload.draw import draw_plan
from tailrace.workload.job import Endpoint, PlanSource, SendJob
from tailrace.workload.run.senders import SendResult, run_senders

WINDOW_S = 6.0
ARRIVALS_MIN = 5
LIMIT_S = 15.0
"""Where long answers have not ended by then, what has come is used."""
_START_S = 30.0
LAG_RATIO_MAX = 0.02
"""Of the tightest TTFT limit: what the client may add."""
LAG_MS_WITHOUT_SLO = 2.0

_known: dict[bytes, tuple[int, NullRun | None]] = {}
"""By `_load`, in this process."""

MakeJobs = Callable[[int, str], list[SendJob]]
"""(number of senders, folder for their rows) -> jobs."""


async def null_run(jobs: list[SendJob], stop: asyncio.Event) -> NullRun | None:
    """Bounded in time. None when no request of the schedule came within it. Raises SenderFailed."""
    async with null_server() as url:
        result = await _bounded([_against(job, url) for job in jobs], stop)
    table = RecordTable.from_records(_records(result.rows_paths))
    ttft_ms, lag_ms = table.elapsed_ms("scheduled", "first"), table.elapsed_ms("scheduled", "issued")
    if not len(table):
        return None
    chunk_lag_ms = np.array([ns for each in result.finished for ns in each.chunk_lag_ns]) / 1e6
    return NullRun(
        num_requests=len(table),
        ttft_ms_p99=_p99(ttft_ms),
        send_lag_ms_p99=_p99(lag_ms),
        chunk_lag_ms_p99=_p99(chunk_lag_ms),
    )


async def calibrated(
    make_jobs: MakeJobs, num_senders: int | None, slo: Slo, stop: asyncio.Event
) -> tuple[int, NullRun | None]:
    """Senders to use, and the null run with that number. `num_senders` None: 1, 2, 4, ... until they keep the schedule.

    Runs of one command that are the same load to the client share one null run: each of them still times its own
    sends and its own loop, and a null run takes seconds.
    """
    key = _load(make_jobs(1, "null")[0], num_senders, slo)
    found = _known.get(key) or await _search(make_jobs, num_senders, slo, stop)
    if not stop.is_set():
        _known[key] = found
    return found


async def _search(
    make_jobs: MakeJobs, num_senders: int | None, slo: Slo, stop: asyncio.Event
) -> tuple[int, NullRun | None]:
    number, most = num_senders or 1, len(os.sched_getaffinity(0))
    while True:
        measured = await null_run(make_jobs(number, f"null-{number}"), stop)
        enough = num_senders is not None or measured is None or keeps_schedule(measured, slo)
        if enough or stop.is_set() or number >= most:
            return number, measured
        number = min(2 * number, most)


def _load(job: SendJob, num_senders: int | None, slo: Slo) -> bytes:
    """Equal for runs that differ in their draw and their text only."""
    source = msgspec.structs.replace(job.source, seed=0, run_id="")
    same = msgspec.structs.replace(job, source=source, rows_path="")
    return msgspec.json.encode((same, num_senders, slo))


def keeps_schedule(measured: NullRun, slo: Slo) -> bool:
    """Whether requests go out within 2 % of the tightest TTFT limit."""
    limit_ms = slo.limit_ms("ttft_ms")
    allowed_ms = LAG_MS_WITHOUT_SLO if limit_ms is None else LAG_RATIO_MAX * limit_ms
    return measured.send_lag_ms_p99 <= allowed_ms


@asynccontextmanager
async def null_server() -> AsyncIterator[str]:
    """Its address. It is a process of its own and ends with the block. Raises SenderFailed."""
    command = [sys.executable, "-m", "tailrace.workload.run.null_server"]
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, process_group=0)
    except OSError as error:
        raise SenderFailed(f"the null server cannot be started: {error}") from error
    assert process.stdin is not None, "a pipe was asked for"
    assert process.stdout is not None, "a pipe was asked for"
    try:
        async with asyncio.timeout(_START_S):
            line = await asyncio.to_thread(process.stdout.readline)
        if not line.startswith(b"http"):
            raise SenderFailed("the null server did not start; --no-calibrate goes without it")
        yield line.decode().strip()
    except TimeoutError as error:
        process.kill()
        raise SenderFailed(
            f"the null server did not start in {_START_S:g} s; --no-calibrate goes without it"
        ) from error
    finally:
        process.stdin.close()
        try:
            await asyncio.to_thread(process.wait, 5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)
        process.stdout.close()


def _against(job: SendJob, url: str) -> SendJob:
    """The job, bounded in time and sent to the null server. No key and no header leaves for it."""
    endpoint = Endpoint(base_url=url, model="null", api=job.endpoint.api)
    source = null_source(job.source)
    return msgspec.structs.replace(job, endpoint=endpoint, source=source, keep_text=False)


def null_source(source: PlanSource) -> PlanSource:
    """The first seconds of a schedule. One with hardly an arrival in them gives way to one a second (or its own mean
    rate): a client that keeps that keeps the rarer one too."""
    duration_s = WINDOW_S if source.duration_s is None else min(WINDOW_S, source.duration_s)
    begun = msgspec.structs.replace(source, warmup_s=0.0, duration_s=duration_s, num_requests=None)
    offered_per_s = draw_plan(source).offered_per_s
    if offered_per_s is None or _num_arrivals(begun) >= ARRIVALS_MIN:
        return begun
    return msgspec.structs.replace(begun, arrivals=f"constant:{max(1.0, offered_per_s):g}", duration_s=WINDOW_S)


def _num_arrivals(source: PlanSource) -> int:
    """Of the open schedule's beginning, counted up to ARRIVALS_MIN."""
    try:
        plan = draw_plan(source)
    except InvalidRequest:
        return 0  # a trace without an arrival in it
    assert plan.window_end_ns is not None, "a window by time"
    num = ARRIVALS_MIN if plan.num_sessions is None else min(ARRIVALS_MIN, plan.num_sessions)
    return sum((plan.scheduled_ns(index) or 0) < plan.window_end_ns for index in range(num))


async def _bounded(jobs: list[SendJob], stop: asyncio.Event) -> SendResult:
    """Ends at LIMIT_S or with `stop`, whatever is still under way."""
    over = asyncio.Event()

    async def end() -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), LIMIT_S)
        over.set()

    ending = asyncio.create_task(end())
    try:
        return await run_senders(jobs, stop=over)
    finally:
        ending.cancel()


def _records(paths: list[str]) -> list[RequestRecord]:
    decode = msgspec.json.Decoder(RequestRecord).decode_lines
    return [record for path in paths for record in decode(Path(path).read_bytes())]


def _p99(values: Floats) -> float:
    """Nearest rank of what is known; 0 of nothing: no lag was seen."""
    ordered = np.sort(values[~np.isnan(values)])
    return nearest_rank(ordered, 0.99) if len(ordered) else 0.0
