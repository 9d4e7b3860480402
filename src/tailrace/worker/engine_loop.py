"""Hop 9 to 11: the loop of the engine's main thread. Obey, plan, execute, commit, report.

In: commands from the inbox. Out: one `StepReport` a step, and one whenever a command or a deadline ended something
between steps. It decides nothing: the scheduler does. It sends with blocking writes on purpose: the app reads all the
time, so a full socket means a stalled app; tokens it cannot take are not worth computing, and the write of an app that
died fails.
"""

import gc
from collections.abc import Callable
from typing import assert_never

import msgspec

from tailrace.clock import NS_PER_S, monotonic_ns
from tailrace.engine.scheduler import Scheduler
from tailrace.engine.sequence import Sequence
from tailrace.engine.step import (
    Executor,
    SchedulerStats,
    SequenceEvent,
    Slice,
    StepCut,
    StepDone,
    StepFailed,
    StepOutcome,
    StepPlan,
)
from tailrace.errors import TailraceError
from tailrace.request import FinishReason
from tailrace.worker.channel import (
    Cancel,
    Finish,
    FromEngine,
    ReadSteps,
    StepLog,
    StepRecord,
    StepReport,
    Submit,
    ToEngine,
)
from tailrace.worker.engine_cut import StepCutter
from tailrace.worker.engine_inbox import Inbox
from tailrace.worker.step_log import StepLogBuffer

_REST_S = 1.0
"""Idle for so long, the engine tidies up, at most once in `_TIDY_NS`: the full check takes milliseconds (45 for 8,192
blocks on a slow core), which a request that comes just then waits for."""
_TIDY_NS = 60 * NS_PER_S


class EngineLoop:
    def __init__(
        self,
        *,
        send: Callable[[FromEngine], None],
        inbox: Inbox,
        cutter: StepCutter,
        scheduler: Scheduler,
        executor: Executor,
        step_log_max: int,
    ) -> None:
        self._send = send
        self._inbox = inbox
        self._cutter = cutter
        self._scheduler = scheduler
        self._executor = executor
        self._step_log = StepLogBuffer(step_log_max)
        self._refused: list[SequenceEvent] = []
        """The events of submits refused since the last report."""
        self._stats_sent = SchedulerStats()
        self._is_tidy = True
        self._tidied_ns: int | None = None

    def run(self) -> None:
        """Returns when the inbox is closed. Raises what `send` raises, and whatever is a bug."""
        while not self._inbox.closed:
            self._obey(self._inbox.take(0))
            started_ns = monotonic_ns()
            plan = self._scheduler.plan_step(started_ns)
            if plan is not None:
                self._step(plan, started_ns)
            else:
                self._report_between_steps()
                self._rest()

    # Commands

    def _obey(self, commands: list[ToEngine]) -> None:
        for command in commands:
            now_ns = monotonic_ns()
            match command:
                case Submit():
                    self._submit(command, now_ns)
                case Cancel(request_id):
                    self._scheduler.cancel(request_id, now_ns)
                case Finish(sequence_id, reason, tokens_kept):
                    self._scheduler.finish(sequence_id, reason, tokens_kept, now_ns)
                    self._cutter.request_of.pop(sequence_id, None)
                case ReadSteps(query_id):
                    self._send(StepLog(query_id, self._step_log.records()))
                case _:
                    raise AssertionError(f"the reader queued a {type(command).__name__}")

    def _submit(self, message: Submit, now_ns: int) -> None:
        """All choices or none: a refusal ends every one of them with the error's label."""
        try:
            for index, sequence_id in enumerate(message.sequence_ids):
                self._scheduler.submit(
                    Sequence(
                        sequence_id=sequence_id,
                        request_id=message.request_id,
                        choice=message.first_choice + index,
                        prompt_token_ids=message.prompt_token_ids,
                        params=message.params,
                        priority=message.priority,
                        arrival_ns=message.arrival_ns,
                        deadline_ns=message.deadline_ns,
                        cache_salt=message.cache_salt,
                    ),
                    now_ns,
                )
                self._cutter.request_of[sequence_id] = message.request_id
        except TailraceError as error:
            self._refuse(message, error, now_ns)

    def _refuse(self, message: Submit, error: TailraceError, now_ns: int) -> None:
        for sequence_id in message.sequence_ids:
            if self._cutter.request_of.pop(sequence_id, None) is not None:
                self._scheduler.finish(sequence_id, FinishReason.ERROR, 0, now_ns)
            self._refused.append(
                SequenceEvent(
                    sequence_id=sequence_id,
                    finish_reason=FinishReason.ERROR,
                    error_label=error.row.label,
                    error_message=error.message,
                )
            )

    # Steps

    def _step(self, plan: StepPlan, started_ns: int) -> None:
        planned_ns = monotonic_ns()
        self._cutter.begin(plan, self._executor, self._scheduler.predicted_ns, planned_ns)
        outcome = self._executor.execute(plan)
        self._cutter.end(was_cut=isinstance(outcome, StepCut))
        executed_ns = monotonic_ns()
        # Before the commit: what a deadline ended while the step was planned ended first.
        events = self._ended_between_steps()
        events += self._scheduler.commit_step(plan, outcome, executed_ns)
        stats = self._scheduler.stats()
        record = self._record(plan, outcome, stats, (started_ns, planned_ns, executed_ns, monotonic_ns()))
        self._report(StepReport(events=events, stats=stats, record=record))
        sent = msgspec.structs.replace(record, duration_ns=monotonic_ns() - started_ns)
        self._step_log.append(sent)
        self._is_tidy = False

    def _record(
        self, plan: StepPlan, outcome: StepOutcome, stats: SchedulerStats, times_ns: tuple[int, int, int, int]
    ) -> StepRecord:
        started_ns, planned_ns, executed_ns, committed_ns = times_ns
        features = self._scheduler.step_features
        assert features is not None, "a plan has features"
        num_decode_rows = sum(map(_is_decode_row, plan.slices))
        done = outcome if isinstance(outcome, StepDone) else None
        return StepRecord(
            step_id=plan.step_id,
            started_ns=started_ns,
            duration_ns=committed_ns - started_ns,
            plan_ns=planned_ns - started_ns,
            kernel_ns=executed_ns - planned_ns if done is None else done.kernel_ns,
            sampling_ns=0 if done is None else done.sampling_ns,
            commit_ns=committed_ns - executed_ns,
            num_tokens=features.tokens,
            num_prefill_tokens=features.tokens - num_decode_rows,
            num_decode_rows=num_decode_rows,
            num_kv_tokens_read=features.kv_read + features.kv_repacked,
            num_waiting=stats.num_waiting,
            num_running=stats.num_running,
            num_blocks_held=stats.num_blocks_held,
            predicted_ns=self._scheduler.predicted_ns,
            outcome=_outcome_word(outcome),
        )

    # Between steps

    def _ended_between_steps(self) -> list[SequenceEvent]:
        refused, self._refused = self._refused, []
        return refused + self._scheduler.take_events()

    def _report_between_steps(self) -> None:
        """Also when a finish freed blocks without an event: the gauges must not stay behind."""
        events = self._ended_between_steps()
        stats = self._scheduler.stats()
        if events or stats != self._stats_sent:
            self._report(StepReport(events=events, stats=stats))

    def _report(self, report: StepReport) -> None:
        for event in report.events:
            if event.finish_reason is not None:
                self._cutter.request_of.pop(event.sequence_id, None)
        self._stats_sent = report.stats
        self._send(report)

    def _rest(self) -> None:
        """Nothing to plan means nothing waits or runs, so no deadline either: sleep until a command comes."""
        if self._is_tidy or (self._tidied_ns is not None and monotonic_ns() - self._tidied_ns < _TIDY_NS):
            commands = self._inbox.take(None)
        else:
            commands = self._inbox.take(_REST_S)
            if not commands and not self._inbox.closed:
                self._tidy()
        self._obey(commands)

    def _tidy(self) -> None:
        """The full check, and the only garbage collection: steps make no cycles (none found after 12,000 sequences)."""
        self._scheduler.check_invariants()
        gc.collect()
        self._is_tidy = True
        self._tidied_ns = monotonic_ns()


def _is_decode_row(piece: Slice) -> bool:
    """One token of output whose successor is drawn; the last token of a prompt is prefill."""
    row = piece.sampling
    return row is not None and len(piece.token_ids) == 1 and piece.start >= row.num_prompt_tokens


def _outcome_word(outcome: StepOutcome) -> str:
    match outcome:
        case StepDone():
            return "done"
        case StepCut():
            return "cut"
        case StepFailed():
            return "failed"
        case _:
            assert_never(outcome)
