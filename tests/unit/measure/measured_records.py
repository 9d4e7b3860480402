"""Records and run headers for tests: times in ms from the schedule's zero, everything else as the service would say."""

from typing import Any

from tailrace.measure.record import Outcome, RequestRecord
from tailrace.measure.run_info import ClientStats, Lag, NullRun, RunInfo
from tailrace.measure.slo import parse_slo

MS = 1_000_000
ORIGIN_NS = 5_000 * MS
_NO_LAG = Lag(p50_ms=0.0, p99_ms=0.0, max_ms=0.0)


def ns(ms: float) -> int:
    return ORIGIN_NS + round(ms * MS)


def record(
    name: str, scheduled_ms: float, gaps_ms: list[float], tokens: list[int] | None = None, **changes: Any
) -> RequestRecord:
    """Ended well, 1 ms after its last chunk; sent when issued. `changes` go into the record as they are."""
    last_ms = scheduled_ms + sum(gaps_ms)
    issued_ns = changes.get("issued_ns", ns(scheduled_ms))
    fields: dict[str, Any] = {
        "request_id": name,
        "outcome": Outcome.OK,
        "scheduled_ns": ns(scheduled_ms),
        "issued_ns": issued_ns,
        "connected_ns": issued_ns,
        "sent_ns": issued_ns,
        "first_answer_ns": ns(scheduled_ms + gaps_ms[0]) if gaps_ms else None,
        "ended_ns": ns(last_ms + 1),
        "chunk_gaps_ns": [round(gap * MS) for gap in gaps_ms],
        "chunk_tokens": tokens,
        "num_output_tokens": sum(tokens) if tokens else len(gaps_ms),
        "num_output_tokens_asked": sum(tokens) if tokens else len(gaps_ms),
    }
    return RequestRecord(**fields | changes)


def failed(name: str, scheduled_ms: float, outcome: Outcome = Outcome.REFUSED, **changes: Any) -> RequestRecord:
    """Sent, and ended after 1 ms without a token."""
    fields: dict[str, Any] = {"outcome": outcome, "ended_ns": ns(scheduled_ms + 1), "num_output_tokens": None}
    return record(name, scheduled_ms, [], **fields | changes)


def client_stats(**changes: Any) -> ClientStats:
    """Of a client that was never late."""
    fields: dict[str, Any] = {
        "num_senders": 1,
        "loop_lag": _NO_LAG,
        "gc_pause_ms_max": 0.0,
        "num_gc_pauses": 0,
        "cpu_ratio_max": 0.1,
        "num_connections_opened": 1,
        "num_connections_reused": 0,
        "num_in_flight_max": 1,
        "num_cpus": 2,
        "null_run": NullRun(num_requests=10, ttft_ms_p99=0.0, send_lag_ms_p99=0.0, chunk_lag_ms_p99=0.0),
    }
    return ClientStats(**fields | changes)


def run_info(window_ms: tuple[float, float] = (0, 1000), slo: str = "", **changes: Any) -> RunInfo:
    fields: dict[str, Any] = {
        "run_id": "r",
        "started_at": "2026-01-01T00:00:00+00:00",
        "url": "http://127.0.0.1:1",
        "model": "m",
        "api": "chat",
        "arrivals": "poisson:4",
        "workload": "chat",
        "workload_sha256": "w",
        "schedule_sha256": "s",
        "seed": 1,
        "slo": parse_slo(slo),
        "origin_ns": ORIGIN_NS,
        "window_start_ns": round(window_ms[0] * MS),
        "window_end_ns": round(window_ms[1] * MS),
        "timeout_ns": 60_000 * MS,
        "offered_per_s": 4.0,
        "client": client_stats(),
    }
    return RunInfo(**fields | changes)
