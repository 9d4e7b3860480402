"""What the worker counts, for Prometheus. vLLM's names where the meaning is equal, `tailrace_` otherwise.

`on_step` is called with every report of the engine, before any chunk is written, so latencies do not depend on how fast
clients read. It is paid for in every step: children of labelled metrics are looked up once.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import generate_latest

from tailrace.clock import NS_PER_S
from tailrace.engine.step import SchedulerStats, SequenceEvent
from tailrace.errors import (
    ERROR_TABLE,
    BodyTooLarge,
    Cancelled,
    ContextExceeded,
    DeadlineExceeded,
    Draining,
    EngineDied,
    EngineFailed,
    InvalidRequest,
    KvExhausted,
    ModelNotFound,
    NotReady,
    Overloaded,
    Unsupported,
)
from tailrace.request import FinishReason, SequenceId
from tailrace.worker.channel import StepReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FINE_S = (
    0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.045, 0.05, 0.055, 0.06, 0.07, 0.08, 0.1,
    0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
"""Five-millisecond steps around a target of 50 ms, so that a p99 near it can be read."""
_LONG_S = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
_PHASE_S = (
    0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1,
    0.15, 0.2, 0.3, 0.5, 1.0, 5.0,
)  # fmt: skip
LABEL_OK = "ok"
LABEL_INTERNAL = "internal_error"
"""A bug: the answer was 500 and the log has the traceback."""


_REQUEST_ENDS = (
    InvalidRequest,
    Unsupported,
    ContextExceeded,
    BodyTooLarge,
    ModelNotFound,
    Overloaded,
    NotReady,
    Draining,
    DeadlineExceeded,
    Cancelled,
    EngineFailed,
    EngineDied,
    KvExhausted,
)
disable_created_metrics()  # type: ignore[no-untyped-call]


class _Open:
    """One sequence between submit and its final event."""

    __slots__ = ("arrival_ns", "last_token_ns", "num_prompt_tokens")

    def __init__(self, arrival_ns: int, num_prompt_tokens: int) -> None:
        self.arrival_ns = arrival_ns
        self.last_token_ns: int | None = None
        self.num_prompt_tokens = num_prompt_tokens


class WorkerMetrics:
    """One registry a service, so that several can live in one process."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._names = {"model_name": model_name}
        self._open: dict[SequenceId, _Open] = {}
        self._last = SchedulerStats()
        self._num_restarts = 0
        self._num_restarts_told = 0
        self._engine_gauges()
        self._engine_totals()
        self._latencies()
        self._requests = Counter(
            "tailrace_requests", "Requests ended, by label", ["model_name", "label"], registry=self.registry
        )
        # Every series exists from the start: a rate over one that appears with its first count misses that count.
        for label in (LABEL_OK, LABEL_INTERNAL, *(ERROR_TABLE[kind].label for kind in _REQUEST_ENDS)):
            self._requests.labels(label=label, **self._names)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["model_name"], registry=self.registry).labels(**self._names)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self.registry).labels(**self._names)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry).labels(**self._names)

    def _engine_gauges(self) -> None:
        self._running = self._gauge("vllm:num_requests_running", "Sequences in the running batch")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Sequences waiting in the engine")
        self._kv_usage = self._gauge("vllm:kv_cache_usage_perc", "Referenced KV blocks, 0 to 1")
        self._blocks = Gauge("tailrace_kv_blocks", "KV blocks", ["model_name", "state"], registry=self.registry)
        self._free = self._blocks.labels(state="free", **self._names)
        self._held = self._blocks.labels(state="held", **self._names)
        self._cached = self._blocks.labels(state="cached", **self._names)
        self._open_requests = self._gauge("tailrace_requests_open", "HTTP requests that have not ended")
        self._restarts = self._counter("tailrace_engine_restarts", "Engine processes started after the first")
        self._engine_up = self._gauge("tailrace_engine_ready", "1 when the engine takes requests")

    def _engine_totals(self) -> None:
        by_source = Counter(
            "tailrace_cached_tokens",
            "Prompt tokens not computed anew (prefix, fork), and computed again after preemption (recompute)",
            ["model_name", "source"],
            registry=self.registry,
        )
        self._totals: tuple[tuple[str, Counter], ...] = (
            ("preemptions_total", self._counter("vllm:num_preemptions", "Preemptions")),
            ("prefix_query_tokens_total", self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up")),
            ("prefix_hit_tokens_total", self._counter("vllm:prefix_cache_hits", "Prompt tokens found")),
            ("prefix_hit_tokens_total", by_source.labels(source="prefix", **self._names)),
            ("fork_tokens_total", by_source.labels(source="fork", **self._names)),
            ("recompute_tokens_total", by_source.labels(source="recompute", **self._names)),
            ("steps_cut_total", self._counter("tailrace_steps_cut", "Steps interrupted and rolled back")),
            ("steps_failed_total", self._counter("tailrace_steps_failed", "Steps that raised")),
            (
                "itl_budget_overruns_total",
                self._counter("tailrace_itl_budget_overruns", "Steps with decoding rows above the ITL target"),
            ),
        )
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of sequences that began to answer")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens drawn")
        success = Counter(
            "vllm:request_success", "Sequences ended well", ["model_name", "finished_reason"], registry=self.registry
        )
        self._success = {
            reason: success.labels(finished_reason=reason.value, **self._names)
            for reason in (FinishReason.STOP, FinishReason.LENGTH)
        }

    def _latencies(self) -> None:
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token", _LONG_S)
        self._itl = self._histogram("vllm:inter_token_latency_seconds", "Between tokens of a sequence", _FINE_S)
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to end of a request", _LONG_S)
        self._lag = self._histogram("tailrace_event_loop_lag_seconds", "Lateness of the app's event loop", _PHASE_S)
        phases = Histogram(
            "tailrace_step_seconds",
            "Step time by phase",
            ["model_name", "phase"],
            buckets=_PHASE_S,
            registry=self.registry,
        )
        self._phases = {
            name: phases.labels(phase=name, **self._names) for name in ("plan", "kernel", "sampling", "commit", "total")
        }

    # Called by the service

    def on_submit(self, sequence_ids: tuple[SequenceId, ...], arrival_ns: int, num_prompt_tokens: int) -> None:
        """The prompt is counted with its first choice only."""
        for i, sequence_id in enumerate(sequence_ids):
            self._open[sequence_id] = _Open(arrival_ns, num_prompt_tokens if i == 0 else 0)

    def on_request_end(self, label: str, duration_ns: int) -> None:
        """Every HTTP request to a generating route, exactly once. The latency is of those that ended well."""
        self._requests.labels(label=label, **self._names).inc()
        if label == LABEL_OK:
            self._e2e.observe(duration_ns / NS_PER_S)

    def on_choice_end(self, reason: FinishReason) -> None:
        """A choice that ended well: stop or length."""
        self._success[reason].inc()

    def on_lag(self, lag_ns: int) -> None:
        self._lag.observe(lag_ns / NS_PER_S)

    # Called by the engine client

    def on_step(self, report: StepReport, now_ns: int, num_restarts: int = 0) -> None:
        """`num_restarts` tells one engine's reports from the next one's."""
        for event in report.events:
            self._on_event(event, now_ns)
        self._advance(report.stats, num_restarts)
        record = report.record
        if record is not None:
            self._phases["plan"].observe(record.plan_ns / NS_PER_S)
            self._phases["kernel"].observe(record.kernel_ns / NS_PER_S)
            self._phases["sampling"].observe(record.sampling_ns / NS_PER_S)
            self._phases["commit"].observe(record.commit_ns / NS_PER_S)
            self._phases["total"].observe(record.duration_ns / NS_PER_S)

    def _on_event(self, event: SequenceEvent, now_ns: int) -> None:
        entry = self._open.get(event.sequence_id)
        if entry is None:
            return
        num_tokens = len(event.token_ids)
        if num_tokens:
            self._generation_tokens.inc(num_tokens)
            if entry.last_token_ns is None:
                self._ttft.observe((now_ns - entry.arrival_ns) / NS_PER_S)
                self._prompt_tokens.inc(entry.num_prompt_tokens)
            else:
                gap_s = (now_ns - entry.last_token_ns) / num_tokens / NS_PER_S
                for _ in range(num_tokens):
                    self._itl.observe(gap_s)
            entry.last_token_ns = now_ns
        if event.finish_reason is not None:
            self._open.pop(event.sequence_id, None)

    def forget(self, sequence_ids: Iterable[SequenceId]) -> None:
        """A request ended. Sequences that a stop string or a dead engine ended have no final event in a report."""
        for sequence_id in sequence_ids:
            self._open.pop(sequence_id, None)

    def _advance(self, stats: SchedulerStats, num_restarts: int) -> None:
        """Totals of the engine start at zero again with each engine process; the counters here do not."""
        if num_restarts != self._num_restarts:
            self._num_restarts, self._last = num_restarts, SchedulerStats()
        last, self._last = self._last, stats
        for name, counter in self._totals:
            now, before = getattr(stats, name), getattr(last, name)
            if now != before:
                counter.inc(now - before)

    # At a scrape

    def expose(self, stats: SchedulerStats, *, num_open: int, num_restarts: int, is_ready: bool) -> bytes:
        """The text format. Gauges are of now."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._kv_usage.set(stats.num_blocks_held / stats.num_blocks if stats.num_blocks else 0.0)
        self._held.set(stats.num_blocks_held)
        self._cached.set(stats.num_blocks_cached)
        self._free.set(stats.num_blocks - stats.num_blocks_held - stats.num_blocks_cached)
        self._open_requests.set(num_open)
        self._restarts.inc(num_restarts - self._num_restarts_told)
        self._num_restarts_told = num_restarts
        self._engine_up.set(is_ready)
        return generate_latest(self.registry)
