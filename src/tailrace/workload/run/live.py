"""What a run has shown so far, folded from the messages of its senders; for a person who waits, never for a report."""

from collections import Counter, deque
from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from tailrace.clock import NS_PER_S
from tailrace.measure.statistics import nearest_rank
from tailrace.workload.job import Progress

SAMPLES_KEPT = 20_000
"""The latest values of TTFT and TPOT: bounded, and enough for a p99."""
GROWTH_LOOKS = 6
GROWTH_LOOK_NS = 5 * NS_PER_S
ENDED_SHARE = 0.8


class LiveNumbers:
    """One run. Counts are running totals of each sender; samples come once."""

    def __init__(self, *, warmup_s: float, duration_s: float | None, num_requests: int | None) -> None:
        self.warmup_s = warmup_s
        self.duration_s = duration_s
        """Of the window; None: by requests."""
        self.num_requests = num_requests
        self.phase = "starting"
        self.start_ns: int | None = None
        """Monotonic zero of the schedule, once it is set."""
        self._latest: dict[int, Progress] = {}
        self._ttft_ms: deque[float] = deque(maxlen=SAMPLES_KEPT)
        self._tpot_ms: deque[float] = deque(maxlen=SAMPLES_KEPT)
        self._flow: deque[tuple[int, int, int]] = deque(maxlen=GROWTH_LOOKS + 1)
        self._next_look_ns = 0

    def add(self, shard: int, progress: Progress) -> None:
        self._latest[shard] = progress
        self._ttft_ms.extend(progress.ttft_ms)
        self._tpot_ms.extend(progress.tpot_ms)

    def elapsed_s(self, now_ns: int) -> float:
        return 0.0 if self.start_ns is None else max(0.0, (now_ns - self.start_ns) / NS_PER_S)

    @property
    def num_window(self) -> int:
        """Requests of the window that came due."""
        return sum(each.num_window for each in self._latest.values())

    @property
    def num_window_open(self) -> int:
        """Of these, not ended."""
        return sum(each.num_window_open for each in self._latest.values())

    @property
    def num_issued(self) -> int:
        return sum(each.num_issued for each in self._latest.values())

    @property
    def num_in_flight(self) -> int:
        return sum(each.num_in_flight for each in self._latest.values())

    @property
    def num_awaiting_first(self) -> int:
        return sum(each.num_awaiting_first for each in self._latest.values())

    @property
    def outcomes(self) -> Counter[str]:
        return sum((Counter(each.outcomes) for each in self._latest.values()), Counter())

    @property
    def num_ended(self) -> int:
        return self.outcomes.total()

    def ttft_ms(self, ratio: float) -> float | None:
        """Nearest rank of the answers so far; failures are not in it."""
        return _rank(self._ttft_ms, ratio)

    def tpot_ms(self, ratio: float) -> float | None:
        return _rank(self._tpot_ms, ratio)

    def is_outrun(self, now_ns: int) -> bool:
        """Whether requests in flight have only grown for half a minute, and far fewer ended than were issued. Call it
        often: it looks every five seconds, once the first request has ended."""
        if self.num_ended and now_ns >= self._next_look_ns:
            self._next_look_ns = now_ns + GROWTH_LOOK_NS
            self._flow.append((self.num_in_flight, self.num_issued, self.num_ended))
        if len(self._flow) <= GROWTH_LOOKS:
            return False
        grows = all(later[0] > earlier[0] for earlier, later in pairwise(self._flow))
        issued, ended = (self._flow[-1][i] - self._flow[0][i] for i in (1, 2))
        return grows and ended < ENDED_SHARE * issued

    def done_ratio(self, now_ns: int) -> float:
        """Of warm-up and window, 0 to 1; what comes after them is not foreseen."""
        if self.duration_s is not None:
            return min(1.0, self.elapsed_s(now_ns) / max(self.warmup_s + self.duration_s, 1e-9))
        return min(1.0, (self.num_window - self.num_window_open) / max(self.num_requests or 1, 1))


def _rank(values: Iterable[float], ratio: float) -> float | None:
    ordered = np.sort(np.fromiter(values, np.float64))
    return nearest_rank(ordered, ratio) if len(ordered) else None
