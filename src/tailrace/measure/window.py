"""The part of a run that is reported: requests scheduled in the window, and what each of them measured."""

from dataclasses import dataclass

import numpy as np

from tailrace.measure.metrics import request_metrics
from tailrace.measure.run_info import RunInfo
from tailrace.measure.table import Bools, Floats, RecordTable


@dataclass(frozen=True)
class Window:
    info: RunInfo
    table: RecordTable
    metrics: dict[str, Floats]
    """[n] ms of all rows of the table, in and outside the window (`measure.metrics`)."""
    scheduled: Bools
    """[n] scheduled in the window."""
    counted: Bools
    """[n] of these, not planned to be cancelled: what percentiles and goodput speak of."""
    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def is_closed(self) -> bool:
        """A closed loop: the service sets the rate."""
        return self.info.offered_per_s is None

    def holds(self, name: str) -> Bools:
        """[n] whether one of `table.TIMES` is known and lies in the window."""
        times = self.table.time_ns(name)
        return self.table.known(name) & (times >= self.start_ns) & (times < self.end_ns)

    def since_start_s(self, name: str) -> Floats:
        """[n] one of `table.TIMES` that every record has, from the start of the window."""
        return (self.table.time_ns(name) - self.start_ns) / 1e9


def window_of(info: RunInfo, table: RecordTable) -> Window:
    start_ns, end_ns = info.origin_ns + info.window_start_ns, info.origin_ns + info.window_end_ns
    times = table.time_ns("scheduled")
    scheduled: Bools = np.asarray((times >= start_ns) & (times < end_ns))
    return Window(info, table, request_metrics(table), scheduled, scheduled & ~table.will_cancel, start_ns, end_ns)
