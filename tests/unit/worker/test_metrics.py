"""What the worker counts: totals survive a restart of the engine, latencies come from the engine's reports."""

import re

from tailrace.clock import NS_PER_MS
from tailrace.engine.step import SchedulerStats, SequenceEvent
from tailrace.request import FinishReason, SequenceId
from tailrace.worker.channel import StepRecord, StepReport
from tailrace.worker.metrics import LABEL_OK, WorkerMetrics

A, B = SequenceId(1), SequenceId(2)


def report(*events: SequenceEvent, stats: SchedulerStats | None = None, record: StepRecord | None = None) -> StepReport:
    return StepReport(events=list(events), stats=stats or SchedulerStats(), record=record)


def token(sequence_id: SequenceId, reason: FinishReason | None = None, num: int = 1) -> SequenceEvent:
    return SequenceEvent(sequence_id=sequence_id, token_ids=(5,) * num, finish_reason=reason)


def value(metrics: WorkerMetrics, name: str, stats: SchedulerStats | None = None, **labels: str) -> float:
    text = metrics.expose(stats or SchedulerStats(), num_open=0, num_restarts=0, is_ready=True).decode()
    for line in text.splitlines():
        match = re.fullmatch(r"([^{ ]+)\{([^}]*)\} (\S+)", line)
        if match and match[1] == name and all(f'{key}="{item}"' in match[2] for key, item in labels.items()):
            return float(match[3])
    raise AssertionError(f"{name} {labels} is not exposed")


def test_latencies_are_between_the_engines_reports() -> None:
    metrics = WorkerMetrics("m")
    metrics.on_submit((A, B), 0, 7)
    metrics.on_step(report(token(A), token(B)), 100 * NS_PER_MS)
    metrics.on_step(report(token(A)), 147 * NS_PER_MS)
    assert value(metrics, "vllm:time_to_first_token_seconds_count") == 2
    assert value(metrics, "vllm:time_to_first_token_seconds_sum") == 0.2
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 1
    assert value(metrics, "vllm:inter_token_latency_seconds_bucket", le="0.045") == 0
    assert value(metrics, "vllm:inter_token_latency_seconds_bucket", le="0.05") == 1
    assert value(metrics, "vllm:prompt_tokens_total") == 7
    assert value(metrics, "vllm:generation_tokens_total") == 3


def test_several_tokens_of_one_step_share_its_gap() -> None:
    metrics = WorkerMetrics("m")
    metrics.on_submit((A,), 0, 1)
    metrics.on_step(report(token(A)), 0)
    metrics.on_step(report(token(A, num=4)), 40 * NS_PER_MS)
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 4
    assert value(metrics, "vllm:inter_token_latency_seconds_bucket", le="0.01") == 4


def test_a_sequence_that_ended_is_not_measured_any_more() -> None:
    metrics = WorkerMetrics("m")
    metrics.on_submit((A, B), 0, 1)
    metrics.forget((B,))
    metrics.on_step(report(token(A, FinishReason.STOP), token(B)), 1)
    metrics.on_step(report(token(A)), 2)
    assert value(metrics, "vllm:generation_tokens_total") == 1


def test_totals_go_on_after_a_restart_of_the_engine() -> None:
    metrics = WorkerMetrics("m")
    # The third engine's first report has more than the second one's last.
    for num_restarts, total in ((0, 2), (0, 5), (1, 1), (1, 3), (2, 7)):
        stats = SchedulerStats(preemptions_total=total, fork_tokens_total=total)
        metrics.on_step(report(stats=stats), 0, num_restarts)
    assert value(metrics, "vllm:num_preemptions_total") == 5 + 3 + 7
    assert value(metrics, "tailrace_cached_tokens_total", source="fork") == 5 + 3 + 7


def test_gauges_are_of_now() -> None:
    stats = SchedulerStats(num_running=3, num_waiting=2, num_blocks=10, num_blocks_held=4, num_blocks_cached=1)
    metrics = WorkerMetrics("m")
    assert value(metrics, "vllm:num_requests_running", stats) == 3
    assert value(metrics, "vllm:num_requests_waiting", stats) == 2
    assert value(metrics, "vllm:kv_cache_usage_perc", stats) == 0.4
    assert value(metrics, "tailrace_kv_blocks", stats, state="free") == 5


def test_a_request_is_counted_by_its_label() -> None:
    metrics = WorkerMetrics("m")
    metrics.on_request_end(LABEL_OK, 3 * NS_PER_MS)
    metrics.on_request_end("overloaded", 1)
    assert value(metrics, "tailrace_requests_total", label="ok") == 1
    assert value(metrics, "tailrace_requests_total", label="overloaded") == 1
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == 1


def test_steps_are_timed_by_phase() -> None:
    record = StepRecord(
        step_id=1, started_ns=0, duration_ns=30 * NS_PER_MS, plan_ns=NS_PER_MS, kernel_ns=25 * NS_PER_MS,
        sampling_ns=2 * NS_PER_MS, commit_ns=NS_PER_MS, num_tokens=1, num_prefill_tokens=0, num_decode_rows=1,
        num_kv_tokens_read=1, num_waiting=0, num_running=1, num_blocks_held=1,
    )  # fmt: skip
    metrics = WorkerMetrics("m")
    metrics.on_step(report(record=record), 0)
    assert value(metrics, "tailrace_step_seconds_sum", phase="kernel") == 0.025
    assert value(metrics, "tailrace_step_seconds_count", phase="sampling") == 1
