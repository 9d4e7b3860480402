from tailrace.clock import monotonic_ns
from tailrace.engine.step import Executor, ExecutorLimits, Slice, StepOutcome, StepPlan
from tailrace.request import RequestId, SequenceId, StepId
from tailrace.worker.engine_cut import StepCutter

LONG_NS = 10**12
A, B = RequestId("a"), RequestId("b")


class InterruptLog(Executor):
    """Notes which steps were interrupted; it runs nothing."""

    def __init__(self) -> None:
        self.interrupted: list[StepId] = []

    @property
    def limits(self) -> ExecutorLimits:
        raise NotImplementedError

    def execute(self, plan: StepPlan) -> StepOutcome:
        raise NotImplementedError

    def interrupt(self, step_id: StepId) -> None:
        self.interrupted.append(step_id)


def plan(step_id: int, tokens: dict[int, int]) -> StepPlan:
    slices = tuple(
        Slice(sequence_id=SequenceId(i), start=0, token_ids=[0] * num, block_ids=[0]) for i, num in tokens.items()
    )
    return StepPlan(step_id=StepId(step_id), slices=slices)


def cutter() -> StepCutter:
    one = StepCutter()
    one.request_of = {SequenceId(1): A, SequenceId(2): A, SequenceId(3): B}
    return one


def begin(one: StepCutter, log: InterruptLog, step: StepPlan) -> None:
    one.begin(step, log, LONG_NS, monotonic_ns())


def test_a_step_that_mostly_serves_the_cancelled_request_is_cut() -> None:
    one, log = cutter(), InterruptLog()
    begin(one, log, plan(5, {1: 40, 2: 40, 3: 50}))
    one.on_cancel(A)
    assert log.interrupted == [5]


def test_a_step_that_mostly_serves_others_runs_on() -> None:
    one, log = cutter(), InterruptLog()
    begin(one, log, plan(5, {1: 40, 3: 50}))
    one.on_cancel(A)
    assert log.interrupted == []


def test_cancels_add_up_during_one_step_and_are_forgotten_after_it() -> None:
    one, log = cutter(), InterruptLog()
    begin(one, log, plan(5, {1: 40, 3: 40, 9: 10}))
    one.on_cancel(A)
    assert log.interrupted == []
    one.on_cancel(B)
    assert log.interrupted == [5]
    one.end(was_cut=False)
    begin(one, log, plan(6, {3: 10, 9: 11}))
    one.on_cancel(A)
    assert log.interrupted == [5]


def test_no_step_is_cut_right_after_a_cut_one() -> None:
    one, log = cutter(), InterruptLog()
    one.end(was_cut=True)
    begin(one, log, plan(6, {1: 10}))
    one.on_cancel(A)
    assert log.interrupted == []


def test_between_steps_nothing_is_interrupted() -> None:
    one, log = cutter(), InterruptLog()
    begin(one, log, plan(5, {1: 10}))
    one.end(was_cut=False)
    one.on_cancel(A)
    one.on_close()
    assert log.interrupted == []


def test_the_end_of_the_app_cuts_whatever_runs() -> None:
    one, log = cutter(), InterruptLog()
    begin(one, log, plan(5, {3: 10}))
    one.on_close()
    assert log.interrupted == [5]
