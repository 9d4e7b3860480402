"""Sessions to come, their first requests made before they are due: at the instant nothing is left but to write."""

from collections import deque
from collections.abc import Callable

from tailrace.workload.plan import Plan, PlannedSession

SESSIONS_AHEAD = 128
BYTES_AHEAD = 64 * 1024 * 1024


class Ahead:
    """The sessions of one shard in order: `shard`, `shard + num_shards`, ..."""

    def __init__(self, plan: Plan, shard: int, num_shards: int, make: Callable[[PlannedSession], bytes]) -> None:
        self._plan = plan
        self._make = make
        self._step = num_shards
        self._next_made = shard
        self._next_taken = shard
        self._ready: deque[tuple[PlannedSession, bytes]] = deque()
        self._num_bytes = 0

    @property
    def is_full(self) -> bool:
        enough = len(self._ready) >= SESSIONS_AHEAD or self._num_bytes >= BYTES_AHEAD
        return enough or not self._exists(self._next_made)

    @property
    def is_low(self) -> bool:
        """Less than half is left: making more goes before waiting for a calm moment."""
        return not self.is_full and len(self._ready) < SESSIONS_AHEAD // 2 and self._num_bytes < BYTES_AHEAD // 2

    @property
    def is_over(self) -> bool:
        """There is no further session."""
        return not self._exists(self._next_taken)

    @property
    def next_scheduled_ns(self) -> int | None:
        """Of the next session, from the schedule's zero; None in a closed loop or when there is none."""
        return None if self.is_over else self._plan.scheduled_ns(self._next_taken)

    def make_one(self) -> None:
        session = self._plan.session(self._next_made)
        request = self._make(session)
        self._next_made += self._step
        self._ready.append((session, request))
        self._num_bytes += len(request)

    def take(self) -> tuple[PlannedSession, bytes]:
        """The next session and all bytes of its first request. There must be one."""
        assert not self.is_over, "no session is left"
        if not self._ready:
            self.make_one()
        session, request = self._ready.popleft()
        self._num_bytes -= len(request)
        self._next_taken += self._step
        return session, request

    def _exists(self, index: int) -> bool:
        return self._plan.num_sessions is None or index < self._plan.num_sessions
