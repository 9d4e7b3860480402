"""When has one shard's part of the measured window ended? Pure: times are arguments."""

from tailrace.workload.plan import Plan


class ShardWindow:
    """Counts the requests scheduled in the window; done when it is over and all of them have ended.

    A window by number of requests ends, in a closed loop, with the last of this shard's share of them. Times count
    from the schedule's zero.
    """

    def __init__(self, plan: Plan, shard: int, num_shards: int) -> None:
        self.start_ns = plan.window_start_ns
        self.end_ns = plan.window_end_ns
        self._left: int | None = None
        if self.end_ns is None:
            assert plan.num_window_requests is not None, "a window has an end or a number of requests"
            share, rest = divmod(plan.num_window_requests, num_shards)
            self._left = share + (shard < rest)
            if self._left == 0:
                self.end_ns = self.start_ns
        self.num_begun = 0
        self.num_open = 0
        self._last_ns = 0
        self._is_passed = False

    @property
    def is_done(self) -> bool:
        return self._is_passed and self.num_open == 0

    def began(self, scheduled_ns: int) -> bool:
        """A request came due. Whether it is one of the window; if so, `ended` follows when it has its record."""
        if scheduled_ns < self.start_ns or (self.end_ns is not None and scheduled_ns >= self.end_ns):
            return False
        self.num_begun += 1
        self.num_open += 1
        if self._left is not None:
            self._left -= 1
            self._last_ns = max(self._last_ns, scheduled_ns)
            if self._left == 0:
                self.end_ns = self._last_ns + 1
                self._is_passed = True
        return True

    def ended(self) -> None:
        """A request of the window has its record."""
        self.num_open -= 1

    def extended(self, end_ns: int, num_open: int) -> None:
        """It lasted longer than this shard saw; `num_open` requests that were left out belong to it and are open."""
        self.end_ns = end_ns
        self.num_begun += num_open
        self.num_open += num_open

    def passed(self) -> None:
        """No request will come due in it any more."""
        self._is_passed = True
