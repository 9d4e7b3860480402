"""The step in flight as the reader thread sees it, so that a cancel can cut it short.

Written by the main thread before and after a step, read by the reader thread: one reference, swapped whole.
"""

from tailrace.clock import monotonic_ns
from tailrace.engine.cut import should_cut
from tailrace.engine.step import Executor, StepPlan
from tailrace.request import RequestId, SequenceId


class _InFlight:
    __slots__ = ("cancelled", "executor", "plan", "predicted_ns", "started_ns")

    def __init__(self, plan: StepPlan, executor: Executor, predicted_ns: int, started_ns: int) -> None:
        self.plan = plan
        self.executor = executor
        self.predicted_ns = predicted_ns
        self.started_ns = started_ns
        self.cancelled: set[SequenceId] = set()


class StepCutter:
    def __init__(self) -> None:
        self._in_flight: _InFlight | None = None
        self._last_step_was_cut = False
        self.request_of: dict[SequenceId, RequestId] = {}
        """Of every sequence in the engine; kept by the main thread."""

    # Main thread

    def begin(self, plan: StepPlan, executor: Executor, predicted_ns: int, started_ns: int) -> None:
        self._in_flight = _InFlight(plan, executor, predicted_ns, started_ns)

    def end(self, *, was_cut: bool) -> None:
        self._in_flight = None
        self._last_step_was_cut = was_cut

    # Reader thread

    def on_cancel(self, request_id: RequestId) -> None:
        """A cancel is queued for the main thread; the step need not be worth finishing any more."""
        step = self._in_flight
        if step is None:
            return
        ids = (piece.sequence_id for piece in step.plan.slices)
        step.cancelled.update(i for i in ids if self.request_of.get(i) == request_id)
        if should_cut(
            plan=step.plan,
            cancelled=step.cancelled,
            predicted_ns=step.predicted_ns,
            elapsed_ns=monotonic_ns() - step.started_ns,
            last_step_was_cut=self._last_step_was_cut,
        ):
            step.executor.interrupt(step.plan.step_id)

    def on_close(self) -> None:
        """The app is gone: nothing is worth finishing."""
        step = self._in_flight
        if step is not None:
            step.executor.interrupt(step.plan.step_id)
