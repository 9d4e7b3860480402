"""One measured run, from a request to a file of rows: connect, calibrate, warm up, send, merge.

Every report is computed from the rows afterwards (`measure.rows`, `measure.build`); nothing here judges.
"""

import asyncio
import datetime
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import msgspec

from tailrace.clock import NS_PER_MS, NS_PER_S, monotonic_ns
from tailrace.measure.rows import write_rows
from tailrace.measure.run_info import NullRun, RunInfo
from tailrace.workload.arrivals import Trace, parse_arrivals
from tailrace.workload.definition import Workload, decode_workload
from tailrace.workload.draw import draw_plan
from tailrace.workload.job import Endpoint, Progress, Realisation, SendJob
from tailrace.workload.plan import Plan
from tailrace.workload.realise import calibrate
from tailrace.workload.run.calibration import calibrated
from tailrace.workload.run.endpoint import Connected, connect, count_prompt_tokens
from tailrace.workload.run.live import LiveNumbers
from tailrace.workload.run.machine_facts import machine_facts
from tailrace.workload.run.merge import first_unfinished_ns, merged_lines
from tailrace.workload.run.request import BenchRequest
from tailrace.workload.run.second_count import Recount
from tailrace.workload.run.senders import START_AHEAD_NS, SendResult, run_senders
from tailrace.workload.run.warm_up import warm_up
from tailrace.workload.send.self_check import client_stats

GAPS_MAX = 10_000
"""Of the schedule, kept in the header of the rows."""
QUIET_S = 5.0
"""Without an answer, before a person is told what may be the matter."""
_T = TypeVar("_T")
Show = Callable[[LiveNumbers], None]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    info: RunInfo | None
    """None: stopped before the first request; there are no rows."""
    was_interrupted: bool


class Stopped(Exception):
    """Internal: `stop` was set before anything was measured."""


async def measure(
    request: BenchRequest, rows_path: Path, *, show: Show, stop: asyncio.Event, recount: Recount | None = None
) -> Measured:
    """Runs to the end of the window, or until `stop` is set, and writes the rows.

    `recount` counts output tokens again, after the run. Raises ClientFailed (endpoint), ConfigError or InvalidRequest
    (workload, arrivals, files) or SenderFailed.
    """
    try:
        return await _Run(request, show, stop).measure(rows_path, recount)
    except Stopped:
        return Measured(info=None, was_interrupted=True)


class _Run:
    def __init__(self, request: BenchRequest, show: Show, stop: asyncio.Event) -> None:
        self._request = request
        self._stop = stop
        self._show = show
        self._workload = decode_workload(request.workload_toml)
        self._plan = draw_plan(request.source())
        self._options = msgspec.structs.replace(request.options, sampling=self._workload.sampling.fields())
        self._numbers = LiveNumbers(
            warmup_s=request.warmup_s,
            duration_s=None if request.num_requests is not None else _window_s(self._plan),
            num_requests=request.num_requests,
        )
        self._notes = list(self._plan.notes)

    async def measure(self, rows_path: Path, recount: Recount | None) -> Measured:
        request = self._request
        self._phase(f"asking {request.url}")
        connected = await self._answered(
            connect(
                request.url,
                model=request.model,
                api_key=request.api_key,
                api=request.api,
                headers=request.headers,
            )
        )
        self._phase("calibrating the lengths of prompts")
        endpoint = connected.endpoint
        realisation = await self._answered(realised(endpoint))
        with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as folder:

            def jobs(num: int, name: str) -> list[SendJob]:
                return [self._job(connected, realisation, f"{folder}/{name}-{i}.jsonl", i, num) for i in range(num)]

            num_senders, null = await self._calibrated(jobs)
            self._phase("warming the service up")
            self._notes += await self._unless_stopped(
                warm_up(request.source(), endpoint, realisation, self._options, request.timeout_s)
            )
            result = await self._send(jobs(num_senders, "run"))
            if result.was_stopped and self._window_end_ns(result) <= self._plan.window_start_ns:
                raise Stopped  # In the warm-up, or before an answer: a window without length says nothing.
            if recount is not None:
                self._phase("counting tokens")
                self._notes += await recount(result.rows_paths, endpoint)
            info = self._info(connected, realisation, result, null)
            self._phase("putting the records together")
            await asyncio.to_thread(write_rows, rows_path, info, merged_lines(result.rows_paths))
        return Measured(info=info, was_interrupted=result.was_stopped)

    async def _calibrated(self, jobs: Callable[[int, str], list[SendJob]]) -> tuple[int, NullRun | None]:
        if not self._request.calibrates:
            return self._request.num_senders or 1, None
        self._phase("measuring this client against a null server")
        found = await calibrated(jobs, self._request.num_senders, self._request.slo, self._stop)
        self._check_stopped()
        return found

    async def _send(self, jobs: list[SendJob]) -> SendResult:
        self._phase(f"measuring with {len(jobs)} sender{'s' if len(jobs) > 1 else ''}")

        def on_progress(shard: int, progress: Progress) -> None:
            if self._numbers.start_ns is None:
                self._numbers.start_ns = monotonic_ns() - START_AHEAD_NS - 500 * NS_PER_MS
            self._numbers.add(shard, progress)
            self._show(self._numbers)

        return await run_senders(jobs, on_progress, self._stop)

    def _job(self, connected: Connected, realisation: Realisation, rows_path: str, shard: int, num: int) -> SendJob:
        request = self._request
        return SendJob(
            source=request.source(),
            endpoint=connected.endpoint,
            realisation=realisation,
            options=self._options,
            shard=shard,
            num_shards=num,
            timeout_ns=round(request.timeout_s * NS_PER_S),
            num_in_flight_max=max(1, request.num_in_flight_max // num),
            rows_path=rows_path,
            keep_text=request.keeps_text,
        )

    def _info(
        self, connected: Connected, realisation: Realisation, result: SendResult, null: NullRun | None
    ) -> RunInfo:
        request, plan = self._request, self._plan
        name, workload_sha256 = _identity(self._workload, plan, request)
        notes = [note for note in (realisation.note, *self._notes) if note]
        if result.was_stopped:
            notes.insert(0, "interrupted: the window ends before the first request that had not ended then")
        return RunInfo(
            run_id=request.run_id,
            started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            url=connected.endpoint.base_url,
            model=connected.endpoint.model,
            api=request.api,
            arrivals=request.arrivals,
            workload=name,
            workload_sha256=workload_sha256,
            schedule_sha256=plan.schedule_sha256,
            seed=request.seed,
            slo=request.slo,
            origin_ns=result.origin_ns,
            window_start_ns=plan.window_start_ns,
            window_end_ns=max(self._window_end_ns(result), plan.window_start_ns),
            timeout_ns=round(request.timeout_s * NS_PER_S),
            offered_per_s=plan.offered_per_s,
            num_clients=plan.num_clients,
            scheduled_gaps_ns=scheduled_gaps_ns(plan),
            declares_sharing=plan.declares_sharing,
            ignore_eos=request.options.ignore_eos,
            client=client_stats(result.finished, null),
            server=connected.server,
            machine=machine_facts(),
            notes=notes,
        )

    def _window_end_ns(self, result: SendResult) -> int:
        """Of a run that was stopped: before the first request that the stop cut off, so that each one in the window
        has ended by itself."""
        if not result.was_stopped:
            return result.window_end_ns
        cut_off = first_unfinished_ns(result.rows_paths)
        last = monotonic_ns() if cut_off is None else cut_off
        return min(result.window_end_ns, last - result.origin_ns)

    def _phase(self, text: str) -> None:
        self._check_stopped()
        self._numbers.phase = text
        self._show(self._numbers)

    def _check_stopped(self) -> None:
        if self._stop.is_set() and self._numbers.start_ns is None:
            raise Stopped

    async def _answered(self, work: Awaitable[_T]) -> _T:
        """As `_unless_stopped`; a wait that has become long says what it may be waiting for."""

        async def remind() -> None:
            await asyncio.sleep(QUIET_S)
            self._numbers.phase += ": still waiting; the service may be loading its model"
            self._show(self._numbers)

        reminder = asyncio.create_task(remind())
        try:
            return await self._unless_stopped(work)
        finally:
            reminder.cancel()

    async def _unless_stopped(self, work: Awaitable[_T]) -> _T:
        """The result of something that has no rows yet; Ctrl-C need not wait for its time limit."""
        task, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Stopped
            return task.result()
        finally:
            for each in (task, stopping):
                each.cancel()
            await asyncio.gather(task, stopping, return_exceptions=True)


async def realised(endpoint: Endpoint) -> Realisation:
    """How prompts become tokens there. Raises ClientFailed when the service does not even answer a word."""
    await count_prompt_tokens(endpoint, "Hello")
    return await calibrate(partial(count_prompt_tokens, endpoint))


def scheduled_gaps_ns(plan: Plan) -> list[int]:
    """Gaps of the window's first arrivals; none in a closed loop."""
    if plan.num_clients is not None:
        return []
    instants: list[int] = []
    index = 0
    while len(instants) <= GAPS_MAX and (plan.num_sessions is None or index < plan.num_sessions):
        instant = plan.scheduled_ns(index)
        assert instant is not None, "an open plan has instants"
        if plan.window_end_ns is not None and instant >= plan.window_end_ns:
            break
        if instant >= plan.window_start_ns:
            instants.append(instant)
        index += 1
    return [later - earlier for earlier, later in pairwise(instants)]


def _identity(workload: Workload, plan: Plan, request: BenchRequest) -> tuple[str, str]:
    """Name and hash of what is sent. Of a trace it is the file's rows that make the load."""
    arrivals = parse_arrivals(request.arrivals)
    if isinstance(arrivals, Trace):
        return Path(arrivals.path).name, plan.schedule_sha256
    return workload.name, workload.sha256


def _window_s(plan: Plan) -> float | None:
    return None if plan.window_end_ns is None else (plan.window_end_ns - plan.window_start_ns) / NS_PER_S
