"""The loop of a load generator: at each instant of the plan a request goes out, and each leaves exactly one record.

Open loop: arrivals at absolute instants, whatever the service does. Closed loop: each client begins its next session
the moment its last one ended. Either way load goes on, by the same law, until `stop`; the window's end is told by
`on_window_done`. Latency counts from the scheduled instant, so waiting for `num_in_flight_max` is in it.

A conversation goes on after a turn that ended well and is given up otherwise: there is no answer to go on from. A
client of a closed loop whose request was turned away or failed at once waits `FAILED_PAUSE_NS` before its next
session: without it, a service that is down would be asked thousands of times a second.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Protocol

from tailrace.clock import NS_PER_MS, monotonic_ns
from tailrace.errors import ConfigError
from tailrace.measure.record import Outcome
from tailrace.workload.job import Finished, Progress, SendJob
from tailrace.workload.plan import Plan, PlannedSession
from tailrace.workload.send.ahead import Ahead
from tailrace.workload.send.alarm import Alarm
from tailrace.workload.send.calls import Call, Caller, timeout_message
from tailrace.workload.send.pool import Pool, Target
from tailrace.workload.send.rows_out import RowsOut
from tailrace.workload.send.self_check import CpuWatch, GcWatch, LoopTicker, StealWatch, thinned
from tailrace.workload.send.tally import Tally
from tailrace.workload.send.window import ShardWindow

FAILED_PAUSE_NS = 100 * NS_PER_MS
_PAUSES = frozenset(
    {Outcome.UNREACHABLE, Outcome.REFUSED, Outcome.REJECTED, Outcome.FAILED, Outcome.MALFORMED, Outcome.EMPTY}
)
_CALM_NS = NS_PER_MS
"""Requests are made ahead when the next arrival is at least so far off: longer than making one takes."""
_TIMEOUT_CHECK_NS = 10 * NS_PER_MS


class BodyMaker(Protocol):
    """`workload.body.BodyWriter`."""

    def body(self, session: PlannedSession, turn_index: int, answers: Sequence[str]) -> bytes: ...


class Sender:
    """One shard of a run. `prepare`, then `run`; `stop` ends it."""

    def __init__(self, job: SendJob, plan: Plan, bodies: BodyMaker, on_window_done: Callable[[int], None]) -> None:
        """`on_window_done` hears where the window ended, from the schedule's zero.

        Raises ConfigError (rows cannot be written), ClientFailed (headers), OSError (no timer).
        """
        self._job = job
        self._plan = plan
        self._bodies = bodies
        self._on_window_done = on_window_done
        self._loop = asyncio.get_running_loop()
        self._target = Target(job.endpoint)
        self._path = "/v1/chat/completions" if job.endpoint.api == "chat" else "/v1/completions"
        self._pool = Pool(self._target)
        self._alarm = Alarm(self._loop)
        self._rows = RowsOut(job.rows_path, keep_text=job.keep_text)
        self._ahead = Ahead(plan, job.shard, job.num_shards, lambda session: self._request(Caller(session)))
        self._window = ShardWindow(plan, job.shard, job.num_shards)
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._active: OrderedDict[Call, None] = OrderedDict()
        """Due and not over, in the order they came due: the first is the first to reach its limit."""
        self._waiting: deque[Call] = deque()
        self._num_in_flight = 0
        self._num_in_flight_max = 0
        self._num_clients_left = 0
        self._num_thinking = 0
        self._origin_ns = 0
        self._is_filling = False
        self._is_stopping = False
        self._is_window_told = False
        self._tally = Tally()

    async def prepare(self) -> None:
        """Looks the service's name up and makes the first requests. Raises ClientFailed."""
        await self._pool.resolve()
        while not self._ahead.is_full:
            self._ahead.make_one()

    async def run(self, origin_ns: int) -> Finished:
        """Sends from `origin_ns` on until `stop`. Raises ConfigError when records cannot be written."""
        self._origin_ns = origin_ns
        ticker, garbage, cpu, steal = LoopTicker(self._alarm), GcWatch(), CpuWatch(), StealWatch()
        garbage.start()
        ticker.start(origin_ns)
        self._alarm.at(origin_ns, self._check_timeouts)
        try:
            self._start_arrivals()
            await self._ended
            await self._pool.close()
        finally:
            garbage.stop()
            self._alarm.close()
            self._rows.close()
        return Finished(
            num_records=self._rows.num_records,
            loop_lag_ns=thinned(ticker.lateness_ns),
            gc_pauses_ns=thinned(garbage.pauses_ns),
            cpu_ratio=cpu.ratio,
            steal_ratio=steal.ratio,
            num_connections_opened=self._pool.num_opened,
            num_connections_reused=self._pool.num_reused,
            num_connections_stale=self._pool.num_stale,
            num_own_limit=self._pool.num_own_limit,
            num_in_flight_max=self._num_in_flight_max,
            window_end_ns=self._window_end_ns,
            chunk_lag_ns=thinned(self._tally.chunk_lags_ns),
            was_stopped=not self._is_window_told,
        )

    def stop(self) -> None:
        """Nothing new begins; what is in flight is recorded as cancelled by the run."""
        if self._is_stopping:
            return
        self._is_stopping = True
        for call in list(self._active):
            call.leave(Outcome.CANCELLED, "the run ended first" if self._is_window_told else "the run was stopped")
        self._settle(None)

    def extend_window(self, end_ns: int) -> None:
        """To where another shard saw its window end: this one is done again when its requests until then have ended."""
        added = [
            call for call in self._active if not call.is_in_window and call.scheduled_ns < self._origin_ns + end_ns
        ]
        for call in added:
            call.is_in_window = True
        self._window.extended(end_ns, len(added))
        self._is_window_told = False
        self._check_window()

    def fail(self, error: BaseException) -> None:
        """Ends `run` with an error."""
        self._is_stopping = True
        self._settle(error)

    def progress(self) -> Progress:
        """Since the last call."""
        return self._tally.progress(self._active, self._num_in_flight, self._window)

    # Arrivals

    def _start_arrivals(self) -> None:
        if self._window.end_ns is not None:
            self._alarm.at(self._origin_ns + self._window.end_ns, self._window_passed)
        clients = self._plan.num_clients
        if clients is None:
            self._arm_arrival()
            return
        mine = range(self._job.shard, clients, self._job.num_shards)
        self._num_clients_left = len(mine)
        for client in mine:
            # Spread over the warm-up: a burst of first requests would be a load that the run does not have later.
            start_ns = self._origin_ns + self._window.start_ns * client // clients
            self._alarm.at(start_ns, partial(self._start_client, client, start_ns))
        self._check_exhausted()

    def _arm_arrival(self) -> None:
        scheduled_ns = self._ahead.next_scheduled_ns
        if scheduled_ns is not None:
            self._alarm.at(self._origin_ns + scheduled_ns, self._arrive)
        else:
            self._check_exhausted()

    def _arrive(self) -> None:
        scheduled_ns = self._ahead.next_scheduled_ns
        if self._is_stopping or scheduled_ns is None:
            return
        self._start_client(None, self._origin_ns + scheduled_ns)
        self._arm_arrival()

    def _start_client(self, client: int | None, scheduled_ns: int) -> None:
        self._begin_session(client, scheduled_ns, self._is_in_window(scheduled_ns))

    def _is_in_window(self, scheduled_ns: int) -> bool:
        """Called once a request, as soon as its instant is known: from then on the window waits for its end."""
        return self._window.began(scheduled_ns - self._origin_ns)

    def _begin_session(self, client: int | None, scheduled_ns: int, is_in_window: bool) -> None:
        if self._is_stopping:
            return
        if self._ahead.is_over:
            self._num_clients_left -= client is not None
            if is_in_window:
                self._window.ended()
            self._check_exhausted()
            return
        session, request = self._ahead.take()
        self._due(Caller(session, client), request, scheduled_ns, is_in_window)
        self._fill_soon()

    def _fill_soon(self) -> None:
        if not self._is_filling and not self._ahead.is_full:
            self._is_filling = True
            self._loop.call_soon(self._fill)

    def _fill(self) -> None:
        """Makes one request ahead, between two arrivals where there is room."""
        self._is_filling = False
        if self._is_stopping or self._ahead.is_full:
            return
        scheduled_ns = self._ahead.next_scheduled_ns
        if scheduled_ns is not None and not self._ahead.is_low:
            until_ns = self._origin_ns + scheduled_ns - monotonic_ns()
            if until_ns < _CALM_NS:
                return  # The arrival itself asks again.
        self._ahead.make_one()
        self._fill_soon()

    # Requests

    def _request(self, caller: Caller) -> bytes:
        body = self._bodies.body(caller.session, caller.turn_index, caller.answers)
        return self._target.request("POST", self._path, body, caller.turn.request_id)

    def _due(self, caller: Caller, request: bytes, scheduled_ns: int, is_in_window: bool) -> None:
        self._tally.num_scheduled += 1
        call = Call(caller, request, scheduled_ns, self._over, keep_text=self._job.keep_text)
        call.is_in_window = is_in_window
        self._active[call] = None
        if self._num_in_flight < self._job.num_in_flight_max:
            self._issue(call)
        else:
            self._waiting.append(call)

    def _issue(self, call: Call) -> None:
        self._num_in_flight += 1
        self._num_in_flight_max = max(self._num_in_flight_max, self._num_in_flight)
        self._tally.num_issued += 1
        call.issue(self._pool)

    def _over(self, call: Call) -> None:
        """A call has ended: its record, then whatever it was in the way of."""
        del self._active[call]
        if call.issued_ns is not None:
            self._num_in_flight -= 1
        self._keep(call)
        if not self._is_stopping:
            self._go_on(call)
            while self._waiting and self._num_in_flight < self._job.num_in_flight_max:
                waiting = self._waiting.popleft()
                if not waiting.is_over:
                    self._issue(waiting)
        if call.is_in_window:  # After what follows it was counted in.
            self._window.ended()
        if not self._is_stopping:
            self._check_exhausted()
            self._check_window()

    def _keep(self, call: Call) -> None:
        try:
            self._rows.write(call.record(self._job.shard), call.text())
        except ConfigError as error:
            self.fail(error)
        self._tally.ended(call)

    def _go_on(self, call: Call) -> None:
        caller = call.caller
        if call.outcome is Outcome.OK and caller.has_next:
            answer = call.answer
            caller.go_on(answer.answer_text, answer.num_output_tokens or len(answer.times_ns))
            self._num_thinking += 1
            next_ns = call.ended_ns + caller.turn.think_ns
            # Not within the call of the connection that just ended: its own work comes first.
            self._loop.call_soon(self._think, caller, next_ns, self._is_in_window(next_ns))
        elif caller.client is not None:
            next_ns = call.ended_ns + (FAILED_PAUSE_NS if call.outcome in _PAUSES else 0)
            begin = partial(self._begin_session, caller.client, next_ns, self._is_in_window(next_ns))
            if next_ns > call.ended_ns:
                self._alarm.at(next_ns, begin)
            else:
                self._loop.call_soon(begin)

    def _think(self, caller: Caller, scheduled_ns: int, is_in_window: bool) -> None:
        if not self._is_stopping:
            request = self._request(caller)
            self._alarm.at(scheduled_ns, partial(self._next_turn, caller, request, scheduled_ns, is_in_window))

    def _next_turn(self, caller: Caller, request: bytes, scheduled_ns: int, is_in_window: bool) -> None:
        self._num_thinking -= 1
        if not self._is_stopping:
            self._due(caller, request, scheduled_ns, is_in_window)

    # Ends

    def _check_timeouts(self) -> None:
        now_ns = monotonic_ns()
        late = list(takewhile(lambda call: now_ns - call.scheduled_ns >= self._job.timeout_ns, self._active))
        # Those that wait for their turn first, or they would be sent when the others make room.
        for call in sorted(late, key=lambda call: call.issued_ns is not None):
            call.leave(Outcome.TIMEOUT, timeout_message(self._job.timeout_ns))
        self._alarm.at(now_ns + _TIMEOUT_CHECK_NS, self._check_timeouts)

    def _window_passed(self) -> None:
        self._window.passed()
        self._check_window()

    def _check_exhausted(self) -> None:
        """A plan with an end may be sent to its end before the window is over."""
        is_open = self._plan.num_clients is None
        if (is_open and not self._ahead.is_over) or self._num_clients_left or self._active or self._num_thinking:
            return
        self._window_passed()

    def _check_window(self) -> None:
        if self._window.is_done and not self._is_window_told and not self._is_stopping:
            self._is_window_told = True
            self._on_window_done(self._window_end_ns)

    @property
    def _window_end_ns(self) -> int:
        return self._window.end_ns or max(monotonic_ns() - self._origin_ns, 0)

    def _settle(self, error: BaseException | None) -> None:
        if not self._ended.done():
            if error is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(error)
