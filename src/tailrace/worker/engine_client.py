"""Hop 8 and 11, app side: the engine as an asyncio object that outlives its process.

In: `Submit`, `Cancel`, `Finish` from the worker app. Out: one `EventStream` a submit. The guarantee: every sequence of
an accepted submit gets exactly one final event, whatever becomes of the engine; when the engine is the cause, the event
carries `engine_died`. Never blocks the event loop, never computes anything about tokens, never retries a request.
"""

import asyncio
import contextlib
import enum
from collections.abc import Callable
from typing import assert_never

from tailrace.clock import NS_PER_MS, NS_PER_S, monotonic_ns
from tailrace.engine.step import SchedulerStats, SequenceEvent
from tailrace.errors import (
    LABEL_TO_ERROR,
    Draining,
    NotReady,
    Overloaded,
    StartFailed,
    TailraceError,
)
from tailrace.request import FinishReason, RequestId, SequenceId
from tailrace.worker.channel import (
    Cancel,
    EngineSpec,
    Fatal,
    Finish,
    FromEngine,
    Progress,
    ReadSteps,
    Ready,
    Start,
    StepLog,
    StepRecord,
    StepReport,
    Stop,
    Submit,
    ToEngine,
)
from tailrace.worker.engine_child import EngineChild
from tailrace.worker.event_stream import EventStream
from tailrace.worker.open_work import OpenWork
from tailrace.worker.restart import RestartPolicy, restart_delay_ns

UNSENT_BYTES_MAX = 64 * 1024 * 1024
"""Submits are refused (overloaded) while so much waits for a stalled engine; 64 MiB is some ten million token ids."""
_STOP_S = 2.0
"""An engine asked to stop cuts its step and leaves; one that does not within this time is killed."""
_WATCH_S = 0.5
"""The watchdog looks at least so often: the bound itself shrinks when a start ends."""
_LAG_S = 0.05


class EngineState(enum.StrEnum):
    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPED = "stopped"
    """Died too often, or never came up: it stays down."""
    CLOSED = "closed"


class EngineClient:
    """Use from one event loop. `start`, then `submit` as often as wanted, `close` at the end."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        policy: RestartPolicy | None = None,
        start_timeout_s: float = 600.0,
        argv: tuple[str, ...] | None = None,
    ) -> None:
        """`start_timeout_s` bounds the silence between two messages of a starting engine. `argv`: see `EngineChild`."""
        self._spec = spec
        self._policy = policy or RestartPolicy()
        self._start_timeout_ns = int(start_timeout_s * NS_PER_S)
        self._argv = argv
        self._state = EngineState.NEW
        self._draining = False
        self._child: EngineChild | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._first_ready: asyncio.Future[Ready] | None = None
        self._closing = asyncio.Event()
        self._open = OpenWork()
        self._next_sequence_id = 0
        self._deaths_ns: list[int] = []
        self._fatal: Fatal | None = None
        self._ready: Ready | None = None
        self._stats = SchedulerStats()
        self._on_step: list[Callable[[StepReport], None]] = []
        self._on_progress: Callable[[Progress], None] | None = None
        self._on_end: Callable[[str], None] | None = None
        self.restarts_total = 0
        """Engines started after the first."""
        self.last_error: str | None = None
        """Why the engine ended last; None while none has."""

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def ready(self) -> Ready | None:
        """What the engine said when it came up; kept from the last one while it restarts."""
        return self._ready

    @property
    def stats(self) -> SchedulerStats:
        """Of the last report of the running engine; zeros after a death (totals start again, as counters may)."""
        return self._stats

    @property
    def num_open(self) -> int:
        """Sequences whose final event has not arrived."""
        return self._open.num_sequences

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def new_sequence_ids(self, num: int) -> tuple[SequenceId, ...]:
        """Never given out before by this client."""
        first = self._next_sequence_id
        self._next_sequence_id += num
        return tuple(SequenceId(first + i) for i in range(num))

    def on_step(self, callback: Callable[[StepReport], None]) -> None:
        """Called in the event loop with every report, after its events were delivered. It must be quick."""
        self._on_step.append(callback)

    def on_end(self, callback: Callable[[str], None]) -> None:
        """Called with the cause when an engine that was ready ends without being closed. It must be quick."""
        self._on_end = callback

    async def start(self, on_progress: Callable[[Progress], None] | None = None) -> Ready:
        """Starts the engine and waits until it is ready; no second try.

        Raises the error the engine names (`ModelRefused`, `ConfigError`, ...), or `StartFailed` with the end of its
        stderr.
        """
        assert self._state is EngineState.NEW, "an engine client starts once"
        self._on_progress = on_progress
        self._state = EngineState.STARTING
        self._first_ready = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")
        try:
            return await asyncio.shield(self._first_ready)
        except BaseException:
            await self.close()
            self._state = EngineState.STOPPED
            self._first_ready.exception()  # seen: nobody waits for it any more
            raise

    def submit(self, message: Submit) -> EventStream:
        """Queues one prompt. Raises NotReady, Draining or Overloaded, and then nothing was sent."""
        child = self._accepting_child()
        assert message.sequence_ids, "a submit has at least one choice"
        stream = EventStream(message.request_id, message.sequence_ids, self._on_stream_closed)
        self._open.add(stream)
        child.send(message)
        return stream

    def cancel(self, request_id: RequestId) -> None:
        """Ends all choices of a request; their streams still get the final event (cancelled)."""
        self._send(Cancel(request_id))

    def finish(self, sequence_id: SequenceId, reason: FinishReason, tokens_kept: int) -> None:
        """A stop string was found: the final event (`reason`, no tokens) is delivered at once, the engine sends none.

        Nothing happens to a sequence that has ended.
        """
        if sequence_id in self._open:
            self._send(Finish(sequence_id, reason, tokens_kept))
            self._open.deliver(SequenceEvent(sequence_id=sequence_id, finish_reason=reason))

    async def read_steps(self) -> list[StepRecord]:
        """The engine's step log, oldest first. Raises NotReady, or EngineDied when it ends before it answers."""
        child = self._ready_child()
        query_id = self._open.new_query()
        child.send(ReadSteps(query_id))
        return await self._open.answer_to(query_id)

    def begin_drain(self) -> None:
        """From now on `submit` raises Draining; what runs goes on."""
        self._draining = True

    async def drained(self) -> None:
        """Returns when no sequence is open. Bound it with `asyncio.timeout`, then `close`."""
        await self._open.drained()

    async def close(self) -> None:
        """Stops the engine and ends every open stream (`engine_died`). Idempotent; safe after a failed start."""
        self._state = EngineState.CLOSED
        self._closing.set()
        if self._supervisor is None:
            return
        child = self._child
        if child is not None:
            child.send(Stop())
            done, _ = await asyncio.wait([child.lost], timeout=_STOP_S)
            if not done:
                child.kill("it did not stop when asked")
        await asyncio.wait([self._supervisor])

    # Sending

    def _ready_child(self) -> EngineChild:
        if self._state is not EngineState.READY or self._child is None:
            raise NotReady(f"the engine is {self._state.value}; try again shortly")
        return self._child

    def _accepting_child(self) -> EngineChild:
        if self._draining or self._state is EngineState.CLOSED:
            raise Draining("this service is shutting down and accepts nothing new; send the request to another replica")
        child = self._ready_child()
        if child.unsent_bytes > UNSENT_BYTES_MAX:
            raise Overloaded("the engine does not take requests as fast as they come; try again later")
        return child

    def _send(self, message: ToEngine) -> None:
        if self._child is not None and self._state is EngineState.READY:
            self._child.send(message)

    def _on_stream_closed(self, stream: EventStream) -> None:
        self.cancel(stream.request_id)

    # Receiving

    def _on_message(self, message: FromEngine) -> None:
        match message:
            case StepReport():
                self._on_report(message)
            case StepLog():
                self._open.answer(message)
            case Progress():
                if self._on_progress is not None:
                    self._on_progress(message)
            case Ready():
                self._on_ready(message)
            case Fatal():
                self._fatal = message
            case _:
                assert_never(message)

    def _on_ready(self, message: Ready) -> None:
        self._ready = message
        if self._closing.is_set():
            return
        self._state = EngineState.READY
        if self._first_ready is not None and not self._first_ready.done():
            self._first_ready.set_result(message)

    def _on_report(self, report: StepReport) -> None:
        self._stats = report.stats
        for event in report.events:
            self._open.deliver(event)
        for callback in self._on_step:
            try:
                callback(report)
            except Exception as error:
                # A broken metric must not end the engine's connection.
                context = {"message": "a step callback failed", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)

    def _end_open(self, cause: str) -> None:
        """The other half of the guarantee: what the engine can no longer end is ended here."""
        self._open.end_all(cause)
        self._stats = SchedulerStats()

    # Supervision

    async def _supervise(self) -> None:
        """Lives follow each other until one of them stays the last. However it ends, no stream is left open."""
        try:
            while not self._closing.is_set():
                error = await self._one_life()
                self.last_error = error.message
                self._tell_end(error.message)
                self._end_open(error.message)
                if self._closing.is_set() or not await self._back_off(error):
                    break
        finally:
            self._end_open("the engine is not supervised any more")
            if not self._closing.is_set():
                self._state = EngineState.STOPPED
            if self._first_ready is not None and not self._first_ready.done():
                self._first_ready.set_exception(StartFailed("the engine was closed before it was ready"))

    def _tell_end(self, cause: str) -> None:
        """Somebody must hear why an engine that was ready ended, also when no request ran."""
        was_ready = self._first_ready is not None and self._first_ready.done()
        if self._on_end is not None and was_ready and not self._closing.is_set():
            self._on_end(cause)

    async def _back_off(self, error: TailraceError) -> bool:
        """Waits before the next life; False when there shall be none. A first start that fails is not tried again."""
        if self._first_ready is not None and not self._first_ready.done():
            self._first_ready.set_exception(error)
            return False
        now_ns = monotonic_ns()
        self._deaths_ns = [*self._deaths_ns[-self._policy.failures_max :], now_ns]
        delay_ns = restart_delay_ns(self._policy, self._deaths_ns, now_ns)
        if delay_ns is None:
            return False
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), delay_ns / NS_PER_S)
        if self._closing.is_set():
            return False
        self.restarts_total += 1
        return True

    async def _one_life(self) -> TailraceError:
        """Starts one engine and waits for its end; says why it ended."""
        self._fatal = None
        try:
            child = await EngineChild.spawn(self._on_message, self._argv)
        except OSError as error:
            return StartFailed(f"cannot start the engine process: {error}")
        self._child = child
        if self._closing.is_set():
            child.kill("the service was closed")
        child.send(Start(self._spec))
        watchdog = asyncio.create_task(self._watch(child), name="engine-watchdog")
        try:
            await child.lost
        finally:
            watchdog.cancel()
            self._child = None
            if not self._closing.is_set():
                self._state = EngineState.RESTARTING
            await child.reap()
        return self._cause(child)

    def _cause(self, child: EngineChild) -> TailraceError:
        if self._fatal is not None:
            cls = LABEL_TO_ERROR.get(self._fatal.error_label, StartFailed)
            return cls(self._fatal.message)
        if child.fault is not None:
            return StartFailed(child.fault)
        code = child.exit_code
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        tail = child.stderr_tail
        return StartFailed(f"the engine process ended with {how}" + (f"; it said: {tail}" if tail else ""))

    async def _watch(self, child: EngineChild) -> None:
        """Kills an engine that has work and says nothing for longer than its longest step may take."""
        while True:
            timeout_ns, since_ns = self._silence_bound(child)
            await asyncio.sleep(min(timeout_ns / 4 / NS_PER_S, _WATCH_S))
            if monotonic_ns() - since_ns <= timeout_ns:
                continue
            # This loop itself may have been late: read what has arrived before judging.
            await asyncio.sleep(_LAG_S)
            timeout_ns, since_ns = self._silence_bound(child)
            silence_ns = monotonic_ns() - since_ns
            if silence_ns > timeout_ns:
                child.kill(f"the engine hung: no message for {silence_ns // NS_PER_MS} ms with work outstanding")

    def _silence_bound(self, child: EngineChild) -> tuple[int, int]:
        """How long it may stay silent, and since when it owes a message; an idle engine owes none."""
        if self._state is not EngineState.READY or self._ready is None:
            return self._start_timeout_ns, child.last_message_ns
        timeout_ns = self._ready.step_timeout_ms * NS_PER_MS
        if not self._open:
            return timeout_ns, monotonic_ns()
        return timeout_ns, max(child.last_message_ns, self._open.busy_since_ns)
