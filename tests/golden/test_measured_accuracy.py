"""Whatever a server's stream looks like, the report says of it what the server's own log says.

Nothing here depends on how quick this machine is: counts and order are exact, a receipt is never before its send, and
each figure of the report is what the independent formulas below give for the instants that were observed. How large
the delays are is measured by `benchmarks/bench_accuracy.py`.
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from statistics import median_low
from typing import Any

import pytest
from paced_run import PacedPair, PacedRun, PacingServer, pacing_server

from tailrace.measure.record import Outcome, TokenCount


@pytest.fixture(scope="module")
def server() -> Iterator[PacingServer]:
    with pacing_server() as running:
        yield running


def assert_agrees(run: PacedRun, *, exact_tokens: bool = True) -> None:
    """What must hold in every mode whose requests all end well."""
    assert run.pairs
    assert run.report.outcomes == {"ok": len(run.pairs)}
    for pair in run.pairs:
        record, served = pair.record, pair.served
        assert record.outcome is Outcome.OK
        assert len(record.chunk_gaps_ns) == len(served.texts), "a sample a chunk with tokens, no other"
        tokens = record.chunk_tokens or [1] * len(record.chunk_gaps_ns)
        if exact_tokens:
            assert tokens == [chunk.tokens for chunk in served.texts]
        assert_order(pair)
    assert_report(run)


def assert_order(pair: PacedPair) -> None:
    record, served = pair.record, pair.served
    assert record.issued_ns is not None
    assert record.connected_ns is not None
    assert record.headers_ns is not None
    # `sent_ns` is read after the write returned: the server may have read the request by then.
    assert record.scheduled_ns <= record.issued_ns <= record.connected_ns <= served.read_ns
    received = pair.received_ns
    assert all(at_ns >= chunk.before_ns for at_ns, chunk in zip(received, served.texts, strict=True))
    assert received == sorted(received)
    assert record.ended_ns >= received[-1]


def assert_report(run: PacedRun) -> None:
    """The report against formulas of this file over the observed instants, and bounded from below by the log."""
    ttft, e2e, tpot, stalls, gaps, itl = [], [], [], [], [], []
    for pair in run.pairs:
        start_ns, received, texts = pair.record.scheduled_ns, pair.received_ns, pair.served.texts
        tokens = pair.record.chunk_tokens or [1] * len(received)
        ttft.append((received[0] - start_ns) / 1e6)
        e2e.append((received[-1] - start_ns) / 1e6)
        assert ttft[-1] >= (texts[0].before_ns - start_ns) / 1e6
        assert e2e[-1] >= (texts[-1].before_ns - start_ns) / 1e6
        num_after_first = sum(tokens) - tokens[0]
        if num_after_first > 0:
            tpot.append((received[-1] - received[0]) / 1e6 / num_after_first)
        own = [(later - earlier) / 1e6 for earlier, later in pairwise(received)]
        gaps += own
        itl += [gap / k for gap, k in zip(own, tokens[1:], strict=True) for _ in range(k)]
        stalls += [max(own)] if own else []
    for name, values in {
        "ttft_ms": ttft, "e2e_ms": e2e, "tpot_ms": tpot, "stall_ms": stalls, "chunk_gap_ms": gaps, "itl_ms": itl,
    }.items():  # fmt: skip
        metric = run.report.metrics[name]
        assert metric.num == len(values), name
        assert metric.num_failed == 0
        if not values:
            assert metric.percentiles["p50"] is None, "undefined is not zero"
            continue
        # The nearest rank of p50 is the lower middle.
        assert metric.percentiles["p50"] == pytest.approx(median_low(values), abs=1e-6), name
        assert metric.percentiles["p99"] == pytest.approx(sorted(values)[math.ceil(0.99 * len(values)) - 1], abs=1e-6)
    assert run.report.metrics["tpot_ms"].num_undefined == len(run.pairs) - len(tpot)


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_one_token_a_chunk(server: PacingServer, api: str) -> None:
    run = server.run({"gaps_ms": [3, 9, 1]}, api=api)
    assert_agrees(run)
    assert {pair.record.token_count for pair in run.pairs} == {TokenCount.SERVER}
    assert run.report.metrics["itl_ms"].num_estimated == 0, "one token a chunk is not smeared"


def test_several_tokens_a_chunk_with_usage_in_each(server: PacingServer) -> None:
    run = server.run({"tokens": [2, 1, 4]}, num_output_tokens=15, chunk_usage=True)
    assert_agrees(run)
    assert {pair.record.token_count for pair in run.pairs} == {TokenCount.SERVER}
    itl = run.report.metrics["itl_ms"]
    smeared = sum(chunk.tokens for pair in run.pairs for chunk in pair.served.texts[1:] if chunk.tokens > 1)
    assert itl.num_estimated == smeared, "tokens that share a gap are flagged"


def test_several_tokens_a_chunk_without_usage_in_each_are_flagged_as_an_estimate(server: PacingServer) -> None:
    run = server.run({"tokens": [2, 1, 4], "continuous": False}, num_output_tokens=15)
    assert_agrees(run, exact_tokens=False)
    for pair in run.pairs:
        assert pair.record.token_count is TokenCount.LENGTH
        assert sum(pair.record.chunk_tokens or ()) == 15, "the server's total is kept"
    assert run.report.metrics["tpot_ms"].num_estimated == len(run.pairs)


def test_a_bundled_first_chunk_does_not_shorten_tpot(server: PacingServer) -> None:
    run = server.run({"first_tokens": 8, "gaps_ms": [10]}, num_output_tokens=12, chunk_usage=True)
    assert_agrees(run)
    # Four tokens come after the first chunk, each 10 ms after the other; by N - 1 it would be a third of that.
    for pair in run.pairs:
        emitted_ms = (pair.served.texts[-1].due_ns - pair.served.texts[0].due_ns) / 1e6
        assert emitted_ms / (12 - 8) == pytest.approx(10)
        assert sum(pair.record.chunk_tokens or ()) - (pair.record.chunk_tokens or [0])[0] == 4


def test_a_role_chunk_is_no_token(server: PacingServer) -> None:
    run = server.run({"role_ms": 1, "first_ms": 40})
    assert_agrees(run)
    for pair in run.pairs:
        assert pair.served.chunks[0].kind == "role"
        assert pair.received_ns[0] - pair.served.read_ns >= 40_000_000, "TTFT is of the first token"


def test_empty_chunks_are_no_tokens(server: PacingServer) -> None:
    run = server.run({"empty_every": 1})
    assert_agrees(run)
    assert any(chunk.kind == "empty" for pair in run.pairs for chunk in pair.served.chunks)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_counts_as_tokens_and_the_first_answer_is_apart(server: PacingServer, field: str) -> None:
    run = server.run({"num_reasoning": 5, "reasoning_field": field})
    assert_agrees(run)
    for pair in run.pairs:
        assert pair.record.first_answer_ns == pair.received_ns[5]
    ttft, ttfo = (run.report.metrics[name].percentiles["p50"] for name in ("ttft_ms", "ttfo_ms"))
    assert isinstance(ttft, float)
    assert isinstance(ttfo, float)
    assert ttfo >= ttft + 40, "four gaps of 10 ms lie between, and one more"


def test_without_usage_tokens_are_not_known_and_instants_are(server: PacingServer) -> None:
    run = server.run({"usage": "never", "tokens": [2]})
    assert run.report.outcomes == {"ok": len(run.pairs)}
    for pair in run.pairs:
        assert pair.record.token_count is TokenCount.UNKNOWN
        assert pair.record.num_output_tokens is None
        assert len(pair.record.chunk_gaps_ns) == len(pair.served.texts)
        assert_order(pair)
    metrics = run.report.metrics
    assert metrics["tpot_ms"].percentiles["p50"] is None
    assert metrics["tpot_ms"].num_undefined == len(run.pairs)
    assert metrics["ttft_ms"].num == metrics["e2e_ms"].num == len(run.pairs)
    rates = run.report.rates
    assert rates.num_uncounted_chunks > 0
    assert rates.output_tokens_per_s == pytest.approx(rates.num_uncounted_chunks / run.report.window_s)


def test_usage_that_comes_unasked_changes_nothing(server: PacingServer) -> None:
    assert_agrees(server.run({"usage": "always"}))


def test_an_answer_of_one_chunk_has_no_tpot_and_no_gap(server: PacingServer) -> None:
    run = server.run({"first_tokens": 12}, chunk_usage=True)
    assert_agrees(run)
    assert run.report.metrics["tpot_ms"].num_undefined == len(run.pairs)
    assert run.report.metrics["tpot_ms"].percentiles["p99"] is None
    assert run.report.metrics["chunk_gap_ms"].num == 0


def test_an_answer_of_one_token_has_no_tpot(server: PacingServer) -> None:
    run = server.run({}, num_output_tokens=1)
    assert_agrees(run)
    assert run.report.metrics["tpot_ms"].num_undefined == len(run.pairs)


def test_a_burst_at_the_end_keeps_its_tokens_apart(server: PacingServer) -> None:
    assert_agrees(server.run({"burst_last": 6, "gaps_ms": [5]}))


def test_a_stall_is_the_longest_gap(server: PacingServer) -> None:
    run = server.run({"stall_after": 4, "stall_ms": 120, "gaps_ms": [5]})
    assert_agrees(run)
    for pair in run.pairs:
        texts, received = pair.served.texts, pair.received_ns
        assert texts[4].due_ns - texts[3].due_ns == 125_000_000
        assert received[4] - texts[3].before_ns >= 125_000_000 - (texts[3].before_ns - texts[3].due_ns)


def test_a_stream_without_done_ends_with_its_finish_reason(server: PacingServer) -> None:
    run = server.run({"done": False})
    assert_agrees(run)
    assert {pair.record.finish_reason for pair in run.pairs} == {"length"}


def test_late_headers_are_not_the_first_token(server: PacingServer) -> None:
    run = server.run({"headers_ms": 30, "first_ms": 60})
    assert_agrees(run)
    for pair in run.pairs:
        assert pair.record.headers_ns is not None
        assert pair.record.headers_ns - pair.served.read_ns >= 30_000_000
        assert pair.received_ns[0] - pair.served.read_ns >= 60_000_000


def test_the_tail_after_the_last_token_is_not_latency(server: PacingServer) -> None:
    run = server.run({"tail_ms": 50})
    assert_agrees(run)
    for pair in run.pairs:
        assert pair.record.ended_ns - pair.served.texts[-1].due_ns >= 50_000_000
    tail = run.report.metrics["tail_ms"]
    assert tail.num == len(run.pairs)
    assert isinstance(tail.max_ms, float)


def test_a_finish_reason_with_the_last_token(server: PacingServer) -> None:
    assert_agrees(server.run({"finish_with_last": True, "role_ms": None}))


def test_a_connection_for_each_answer(server: PacingServer) -> None:
    assert_agrees(server.run({"keep_alive": False}))


@pytest.mark.parametrize("num_senders", [1, 2])
def test_a_closed_loop_counts_from_the_moment_the_slot_was_free(server: PacingServer, num_senders: int) -> None:
    run = server.run({"gaps_ms": [2]}, arrivals="closed:3", num_requests=9, num_senders=num_senders)
    assert len(run.pairs) >= 9
    assert_agrees(run)


def test_two_senders_split_one_schedule(server: PacingServer) -> None:
    run = server.run({}, arrivals="poisson:40", num_requests=20, num_senders=2)
    assert len({pair.record.request_id for pair in run.pairs}) == len(run.pairs) == 20
    assert {pair.record.sender for pair in run.pairs} == {0, 1}
    assert_agrees(run)


SHAPES: list[dict[str, Any]] = [
    {"first_tokens": 3, "tokens": [1, 5], "empty_every": 2, "role_ms": 5, "burst_last": 2},
    {"num_reasoning": 2, "tokens": [2, 1], "stall_after": 3, "stall_ms": 30, "done": False, "keep_alive": False},
]


@pytest.mark.parametrize("script", SHAPES, ids=["mixed", "reasoning"])
def test_shapes_together(server: PacingServer, script: dict[str, Any]) -> None:
    assert_agrees(server.run(script, num_output_tokens=20, chunk_usage=True))
