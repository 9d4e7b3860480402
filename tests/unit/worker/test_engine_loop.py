"""The loop in this process: the real scheduler, the modeled executor in virtual time, a list instead of the socket."""

import threading

import pytest

from tailrace.cost.step_time import StepTimeModel
from tailrace.engine.config import EngineConfig
from tailrace.engine.scheduler import Scheduler
from tailrace.engine.step import ExecutorLimits, SequenceEvent
from tailrace.executor.modeled import ModeledExecutor
from tailrace.request import FinishReason, RequestId, SamplingParams, SequenceId
from tailrace.worker import engine_loop
from tailrace.worker.channel import Cancel, Finish, FromEngine, ReadSteps, StepLog, StepReport, Submit, ToEngine
from tailrace.worker.engine_cut import StepCutter
from tailrace.worker.engine_inbox import Inbox
from tailrace.worker.engine_loop import EngineLoop

LIMITS = ExecutorLimits(num_blocks=64, context_tokens_max=512, step_sizes=(64,), scratch_tokens_max=1_024)


class Bench:
    """A loop and what it sent. `on_report` sees each report in the loop's thread, between two steps."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.inbox = Inbox()
        self.cutter = StepCutter()
        self.scheduler = Scheduler(config or EngineConfig(), LIMITS, frozenset({0}), StepTimeModel())
        self.sent: list[FromEngine] = []
        self.script_began = False
        self.script: list[list[ToEngine]] = []
        """Commands put in after each report of something that happened; the inbox closes when all of it is over."""
        self.loop = EngineLoop(
            send=self._send,
            inbox=self.inbox,
            cutter=self.cutter,
            scheduler=self.scheduler,
            executor=ModeledExecutor(LIMITS, 1_000),
            step_log_max=8,
        )

    def run(self, *commands: ToEngine) -> list[SequenceEvent]:
        for command in commands:
            self.inbox.put(command)
        self.loop.run()
        return [event for message in self.sent if isinstance(message, StepReport) for event in message.events]

    def _send(self, message: FromEngine) -> None:
        self.sent.append(message)
        if not isinstance(message, StepReport) or not (message.events or message.record or self.script_began):
            return  # the first report only tells the gauges of an empty engine
        self.script_began = True
        if self.script:
            for command in self.script.pop(0):
                self.inbox.put(command)
        elif not self.scheduler.has_work:
            self.inbox.close()


def submit(*sequence_ids: int, max_tokens: int = 3, prompt_tokens: int = 5, deadline_ns: int | None = None) -> Submit:
    return Submit(
        request_id=RequestId(f"r{sequence_ids[0]}"),
        sequence_ids=tuple(SequenceId(i) for i in sequence_ids),
        prompt_token_ids=[7] * prompt_tokens,
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        arrival_ns=0,
        deadline_ns=deadline_ns,
    )


def ends(events: list[SequenceEvent]) -> dict[int, tuple[FinishReason, str | None]]:
    found: dict[int, tuple[FinishReason, str | None]] = {}
    for event in events:
        assert event.sequence_id not in found, "an event after the final one"
        if event.finish_reason is not None:
            found[event.sequence_id] = (event.finish_reason, event.error_label)
    return found


LENGTH = (FinishReason.LENGTH, None)


def test_one_report_a_step() -> None:
    bench = Bench()
    assert ends(bench.run(submit(1, max_tokens=3), submit(2, 3, max_tokens=3))) == {1: LENGTH, 2: LENGTH, 3: LENGTH}
    reports = [message for message in bench.sent if isinstance(message, StepReport)]
    assert [report.record is not None for report in reports] == [True] * len(reports)
    assert [report.record.step_id for report in reports if report.record] == list(range(1, len(reports) + 1))


def test_a_deadline_that_passed_in_the_queue_is_reported_without_a_step() -> None:
    bench = Bench()
    assert ends(bench.run(submit(1, deadline_ns=1))) == {1: (FinishReason.DEADLINE, "deadline_exceeded")}
    assert [m.record for m in bench.sent if isinstance(m, StepReport)] == [None]


def test_a_cancel_between_steps_is_reported_with_the_next_step() -> None:
    bench = Bench()
    bench.script = [[Cancel(RequestId("r1"))]]
    assert ends(bench.run(submit(1, max_tokens=50), submit(2, max_tokens=4))) == {
        1: (FinishReason.CANCELLED, "cancelled"),
        2: LENGTH,
    }


def test_a_cancel_of_an_unknown_or_ended_request_changes_nothing() -> None:
    bench = Bench()
    bench.script = [[Cancel(RequestId("nobody"))], [Cancel(RequestId("r1")), submit(2)]]
    assert ends(bench.run(submit(1, max_tokens=2))) == {1: LENGTH, 2: LENGTH}


def test_a_finish_sends_no_event_but_the_gauges_follow() -> None:
    bench = Bench()
    bench.script = [[Finish(SequenceId(1), FinishReason.STOP, 1)]]
    assert ends(bench.run(submit(1, max_tokens=400, prompt_tokens=64))) == {}
    last = bench.sent[-1]
    assert isinstance(last, StepReport)
    assert last.record is None
    assert last.stats.num_blocks_held == last.stats.num_running == 0
    assert bench.cutter.request_of == {}


def test_a_refused_submit_leaves_none_of_its_choices_behind() -> None:
    bench = Bench(EngineConfig(waiting_max=2))
    events = bench.run(submit(1), submit(2, 3, 4), submit(5))
    overloaded = (FinishReason.ERROR, "overloaded")
    assert ends(events) == {1: LENGTH, 2: overloaded, 3: overloaded, 4: overloaded, 5: LENGTH}
    assert bench.cutter.request_of == {}
    bench.scheduler.check_invariants()


def test_the_step_log_is_bounded_and_answers_with_the_number_asked() -> None:
    bench = Bench()
    bench.script = [[] for _ in range(29)] + [[ReadSteps(77), submit(2, max_tokens=1)]]
    bench.run(submit(1, max_tokens=30))
    (log,) = [message for message in bench.sent if isinstance(message, StepLog)]
    assert log.query_id == 77
    assert [record.step_id for record in log.records] == list(range(23, 31))


def test_a_broken_invariant_is_found_at_rest_and_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise AssertionError("I2: a block is lost")

    bench = Bench()
    monkeypatch.setattr(engine_loop, "_REST_S", 0.0)
    monkeypatch.setattr(bench.scheduler, "check_invariants", broken)
    bench.script = [[] for _ in range(3)]
    with pytest.raises(AssertionError, match="I2"):
        bench.run(submit(1, max_tokens=3))


def test_an_idle_loop_sleeps_until_a_command_comes() -> None:
    bench = Bench()
    thread = threading.Thread(target=bench.loop.run)
    thread.start()
    bench.inbox.put(submit(1))
    thread.join(60)
    assert not thread.is_alive()
    assert ends([e for m in bench.sent if isinstance(m, StepReport) for e in m.events]) == {1: LENGTH}
