"""Whether and when a dead engine process is started again. Pure: time and history are arguments."""

from collections.abc import Sequence

import msgspec

from tailrace.clock import NS_PER_MS, NS_PER_S


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Bounded exponential back-off. A machine that kills its engine again and again is left alone, visibly."""

    backoff_ms_first: int = 100
    backoff_ms_max: int = 10_000
    failures_max: int = 5
    """So many deaths within the window and the engine stays down."""
    window_s: int = 300


def restart_delay_ns(policy: RestartPolicy, failures_ns: Sequence[int], now_ns: int) -> int | None:
    """Wait before the next start, from the times of all deaths so far, the latest included; None: stay down."""
    num_recent = sum(1 for at_ns in failures_ns if now_ns - at_ns <= policy.window_s * NS_PER_S)
    if num_recent >= policy.failures_max:
        return None
    doubled_ms = policy.backoff_ms_first << max(0, num_recent - 1)
    return min(policy.backoff_ms_max, doubled_ms) * NS_PER_MS
