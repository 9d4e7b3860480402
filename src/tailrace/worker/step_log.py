"""The step log: the last `records_max` steps, oldest first. Bounded by construction, never written anywhere."""

from collections import deque

from tailrace.worker.channel import StepRecord


class StepLogBuffer:
    def __init__(self, records_max: int) -> None:
        assert records_max >= 0, "the step log's length is a count"
        self._records: deque[StepRecord] = deque(maxlen=records_max)

    def __len__(self) -> int:
        return len(self._records)

    def append(self, record: StepRecord) -> None:
        """The oldest record leaves when the buffer is full."""
        self._records.append(record)

    def records(self) -> list[StepRecord]:
        """A copy, oldest first."""
        return list(self._records)
