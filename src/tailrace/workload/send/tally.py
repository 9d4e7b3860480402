"""What a sender tells of its run while it lasts: running totals, and samples since the last time."""

from array import array
from collections import Counter
from collections.abc import Iterable

from tailrace.clock import NS_PER_MS
from tailrace.workload.job import Progress
from tailrace.workload.send.calls import Call
from tailrace.workload.send.window import ShardWindow

_SAMPLES_MAX = 1_000
"""Of one kind in a message."""
_CHUNK_LAGS_MAX = 2_000_000


class Tally:
    def __init__(self) -> None:
        self.num_scheduled = 0
        self.num_issued = 0
        self.chunk_lags_ns = array("q")
        """Against the null server only."""
        self._outcomes: Counter[str] = Counter()
        self._num_output_tokens = 0
        self._ttft_ms: list[float] = []
        self._tpot_ms: list[float] = []

    def ended(self, call: Call) -> None:
        answer = call.answer
        times_ns = answer.times_ns
        num_tokens = answer.num_output_tokens or len(times_ns)
        self._outcomes[str(call.outcome)] += 1
        self._num_output_tokens += num_tokens
        if times_ns and len(self._ttft_ms) < _SAMPLES_MAX:
            self._ttft_ms.append((times_ns[0] - call.scheduled_ns) / NS_PER_MS)
        if len(times_ns) > 1 and num_tokens > 1 and len(self._tpot_ms) < _SAMPLES_MAX:
            self._tpot_ms.append((times_ns[-1] - times_ns[0]) / NS_PER_MS / (num_tokens - 1))
        if answer.lags_ns and len(self.chunk_lags_ns) < _CHUNK_LAGS_MAX:
            self.chunk_lags_ns.extend(answer.lags_ns)

    def progress(self, active: Iterable[Call], num_in_flight: int, window: ShardWindow) -> Progress:
        """`active`: calls that are due and not over."""
        ttft_ms, self._ttft_ms = self._ttft_ms, []
        tpot_ms, self._tpot_ms = self._tpot_ms, []
        return Progress(
            num_scheduled=self.num_scheduled,
            num_issued=self.num_issued,
            num_in_flight=num_in_flight,
            num_awaiting_first=sum(1 for each in active if each.issued_ns is not None and not each.answer.times_ns),
            outcomes=dict(self._outcomes),
            num_window=window.num_begun,
            num_window_open=window.num_open,
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
            num_output_tokens=self._num_output_tokens,
        )
