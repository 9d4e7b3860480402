"""What a run was: all that two reports must agree on before they are compared, and what the client saw of itself."""

from typing import Any

import msgspec

from tailrace.measure.record import DEFINITIONS
from tailrace.measure.slo import Slo


class Lag(msgspec.Struct, frozen=True, kw_only=True):
    """Lateness of a client, ms."""

    p50_ms: float
    p99_ms: float
    max_ms: float


class NullRun(msgspec.Struct, frozen=True, kw_only=True):
    """The same schedule against a server that answers at once: what of the latency is the client's own."""

    num_requests: int
    ttft_ms_p99: float
    send_lag_ms_p99: float
    chunk_lag_ms_p99: float
    """Receipt of a chunk against the instant the null server says it wrote it."""


class ClientStats(msgspec.Struct, frozen=True, kw_only=True):
    """What the senders measured of themselves during the run, the worst of them where there are several."""

    num_senders: int
    loop_lag: Lag
    """Lateness of a 5 ms ticker in the event loop."""
    gc_pause_ms_max: float
    num_gc_pauses: int
    cpu_ratio_max: float
    """Processor time / wall time of the busiest sender."""
    steal_ratio: float | None = None
    """Share of all processors that the host of this virtual machine gave to others during the run."""
    num_connections_opened: int
    num_connections_reused: int
    num_connections_stale: int = 0
    """Kept connections that the server had closed; their requests went out again on a new one, their times going on."""
    num_own_limit: int = 0
    """Requests that found no connection because this host allows no more (open files, ports)."""
    num_in_flight_max: int
    num_cpus: int
    governor: str | None = None
    null_run: NullRun | None = None


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Header of a file of rows, and part of each report."""

    definitions: str = DEFINITIONS
    run_id: str
    started_at: str
    """Wall clock, ISO 8601, for people; no duration is computed from it."""
    url: str
    model: str
    api: str
    """`chat` or `completions`."""
    arrivals: str
    """As given: `poisson:4`."""
    workload: str
    """Name of the workload."""
    workload_sha256: str
    """Of its canonical form: distributions, groups, turns, sampling."""
    schedule_sha256: str
    """Of the drawn schedule: instants, lengths, groups, cancellations."""
    seed: int
    slo: Slo
    origin_ns: int
    """Monotonic time of the schedule's zero."""
    window_start_ns: int
    """From `origin_ns`: warm-up is over. Requests scheduled in [start, end) are the ones reported."""
    window_end_ns: int
    timeout_ns: int
    offered_per_s: float | None
    """Requests a second of the schedule's law; None in a closed loop."""
    num_clients: int | None = None
    """Of a closed loop."""
    scheduled_gaps_ns: list[int] = []
    """Gaps of an open schedule's first instants in the window (at most 10,000), to hold what was issued against."""
    declares_sharing: bool = False
    ignore_eos: bool = True
    client: ClientStats | None = None
    """None until the run has ended."""
    server: dict[str, Any] = {}
    """What the endpoint says of itself: its model card, its version."""
    machine: dict[str, Any] = {}
    """The client's host."""
    notes: list[str] = []
    """What the reader should know: lengths could not be verified, and the like."""
