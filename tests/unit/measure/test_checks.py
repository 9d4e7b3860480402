"""Verdicts on the run itself: each fault is found, named, and nothing else is blamed."""

from typing import Any

import numpy as np
import pytest
from measured_records import client_stats, failed, ns, record, run_info

from tailrace.measure.checks import (
    cache_verdict,
    chunk_allowance_ms,
    client_verdict,
    output_verdict,
    schedule_distance,
    steady_verdict,
    tokens_verdict,
    ttft_allowance_ms,
)
from tailrace.measure.record import Outcome, RequestRecord, TokenCount
from tailrace.measure.report import Steadiness, Verdict
from tailrace.measure.run_info import Lag, NullRun, RunInfo
from tailrace.measure.table import RecordTable
from tailrace.measure.window import Window, window_of


def window(rows: list[RequestRecord], info: RunInfo | None = None) -> Window:
    return window_of(info or run_info(), RecordTable.from_records(rows))


def requests(num: int = 100, **changes: Any) -> list[RequestRecord]:
    """One each 10 ms from 0, TTFT 100 ms, four tokens at 20 ms."""
    return [record(f"r{i}", 10.0 * i, [100, 20, 20, 20], **changes) for i in range(num)]


def gaps_ns(num: int) -> list[int]:
    return [10_000_000] * (num - 1)


def reason(verdict: Verdict) -> str:
    return "; ".join(verdict.reasons)


def test_a_punctual_client_is_ok() -> None:
    info = run_info(scheduled_gaps_ns=gaps_ns(100))
    assert client_verdict(window(requests(), info)) == Verdict(state="ok")


def test_without_an_slo_two_percent_of_the_median_ttft_are_allowed() -> None:
    assert ttft_allowance_ms(window(requests())) == pytest.approx(2)
    assert chunk_allowance_ms(window(requests())) is None


def test_two_percent_of_the_tightest_limit_are_allowed() -> None:
    both = window(requests(), run_info(slo="ttft_ms_p99<=500, ttft_ms_p50<=200, itl_ms_p99<=60, stall_ms_p99<=50"))
    assert ttft_allowance_ms(both) == pytest.approx(4)
    assert chunk_allowance_ms(both) == pytest.approx(1)


def test_a_limit_on_tpot_forgives_a_late_chunk_by_the_number_of_tokens() -> None:
    assert chunk_allowance_ms(window(requests(), run_info(slo="tpot_ms_p99<=50"))) == pytest.approx(0.02 * 50 * 3)


def test_late_sending_is_the_clients_fault_never_a_slow_server() -> None:
    rows = requests()
    late = [*rows[:-5], *(record(f"late{i}", 10.0 * i, [100], issued_ns=ns(10.0 * i + 3)) for i in range(95, 100))]
    verdict = client_verdict(window(late))
    assert verdict.state == "invalid"
    assert "send lag p99 is 3 ms, more than the 2 ms" in reason(verdict)
    # One of a hundred is not the p99.
    assert client_verdict(window([*rows[:-1], *late[-1:]])).state == "ok"


def test_requests_that_were_never_sent_are_the_clients_fault() -> None:
    rows = [*requests(98), *(failed(f"x{i}", 980 + i, Outcome.CANCELLED, issued_ns=None) for i in range(2))]
    verdict = client_verdict(window(rows))
    assert verdict.state == "invalid"
    assert "never sent" in reason(verdict)


def test_a_server_that_refuses_is_no_fault_of_the_client() -> None:
    rows = [*requests(50), *(failed(f"x{i}", 500 + 10 * i) for i in range(50))]
    assert client_verdict(window(rows)).state == "ok"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loop_lag": Lag(p50_ms=0, p99_ms=3, max_ms=9)}, "event loop lag p99 is 3 ms"),
        ({"gc_pause_ms_max": 50.0}, "pause of the collector is 50 ms"),
        ({"cpu_ratio_max": 0.97}, "97% of a processor"),
        ({"num_own_limit": 3}, "3 requests found no connection"),
        (
            {"null_run": NullRun(num_requests=9, ttft_ms_p99=5, send_lag_ms_p99=0, chunk_lag_ms_p99=0)},
            "TTFT p99 against",
        ),
        (
            {"null_run": NullRun(num_requests=9, ttft_ms_p99=0, send_lag_ms_p99=5, chunk_lag_ms_p99=0)},
            "send lag p99 aga",
        ),
        ({"null_run": NullRun(num_requests=9, ttft_ms_p99=0, send_lag_ms_p99=0, chunk_lag_ms_p99=5)}, "chunk lag p99"),
    ],
)
def test_each_weakness_of_the_client_makes_the_run_invalid(changes: dict[str, Any], said: str) -> None:
    verdict = client_verdict(window(requests(), run_info(client=client_stats(**changes))))
    assert verdict.state == "invalid"
    assert len(verdict.reasons) == 1
    assert said in verdict.reasons[0]


def test_a_client_that_was_not_judged_is_unknown() -> None:
    assert client_verdict(window(requests(), run_info(client=None))).state == "unknown"
    uncalibrated = client_verdict(window(requests(), run_info(client=client_stats(null_run=None))))
    assert uncalibrated.state == "unknown"
    assert "null server" in reason(uncalibrated)
    assert client_verdict(window([])).state == "unknown"


def test_bunched_arrivals_are_found_though_their_number_is_right() -> None:
    info = run_info(scheduled_gaps_ns=gaps_ns(100), slo="ttft_ms_p99<=250")
    alike = [record(f"r{i}", 10.0 * i, [100], issued_ns=ns(10.0 * i + 4)) for i in range(100)]
    assert client_verdict(window(alike, info)).state == "ok"  # all late alike: the gaps are those drawn
    pairs = [record(f"r{i}", 10.0 * i, [100], issued_ns=ns(10.0 * (i | 1))) for i in range(100)]
    assert "distance 0.51" in reason(client_verdict(window(pairs, info)))


def test_jitter_does_not_break_a_constant_schedule() -> None:
    constant = np.full(100, 10.0)
    jittered = constant + np.linspace(-0.5, 0.5, 100)
    assert schedule_distance(constant, jittered, 1.0) == 0
    assert schedule_distance(constant, jittered, 0.1) > 0.3
    assert schedule_distance(constant, constant * 2, 1.0) == 1


def test_rows_that_are_missing_are_noticed() -> None:
    info = run_info(scheduled_gaps_ns=gaps_ns(100))
    verdict = client_verdict(window(requests()[:90], info))
    assert "the schedule has 100 first arrivals in the window, the rows only 90" in reason(verdict)


def test_arrivals_left_unsent_at_the_end_are_noticed() -> None:
    rows = [record(f"r{i}", 10.0 * i, [500], issued_ns=ns(12.0 * i)) for i in range(100)]
    assert "only 85.0% of the arrivals" in reason(client_verdict(window(rows)))


def test_later_turns_are_not_held_against_the_schedule() -> None:
    info = run_info(scheduled_gaps_ns=gaps_ns(100))
    turns = [record(f"t{i}", 10.0 * i + 3, [100], turn=1) for i in range(50)]
    assert client_verdict(window([*requests(), *turns], info)).state == "ok"


def test_a_closed_loop_has_no_schedule_to_keep() -> None:
    info = run_info(offered_per_s=None, num_clients=1)
    assert client_verdict(window(requests(), info)).state == "ok"


def test_rows_put_together_twice_are_noticed() -> None:
    assert "3 rows repeat" in reason(client_verdict(window([*requests(), *requests(3)])))


@pytest.mark.parametrize(
    "changes", [{"sent_ns": ns(-50)}, {"ended_ns": ns(20)}, {"connected_ns": ns(60), "sent_ns": ns(50)}]
)
def test_times_that_run_backwards_are_noticed(changes: dict[str, Any]) -> None:
    verdict = client_verdict(window([*requests(), record("x", 0, [100, 1], **changes)]))
    assert "1 rows have times that run backwards" in reason(verdict)


def steadiness(verdict: Any) -> Steadiness:
    return Steadiness(
        verdict=verdict, in_flight_slope_per_s=None, ttft_trend_ratio=None, truncation_ratio=None, reasons=["why"]
    )


@pytest.mark.parametrize(
    ("verdict", "state"), [("steady", "ok"), ("drifting", "invalid"), ("saturated", "invalid"), ("unknown", "unknown")]
)
def test_only_a_steady_run_is_ok(verdict: str, state: str) -> None:
    found = steady_verdict(steadiness(verdict))
    assert found.state == state
    assert found.reasons == ([] if state == "ok" else ["why"])


def cached(num_cached: int, **changes: Any) -> list[RequestRecord]:
    fields = {"num_prompt_tokens": 1000, "num_prompt_tokens_asked": 1000, "num_cached_tokens": num_cached}
    return requests(**fields | changes)


@pytest.mark.parametrize(
    ("rows", "state"),
    [
        (cached(0), "ok"),
        (cached(64), "ok"),  # a block by chance
        (cached(500), "invalid"),
        (cached(900, num_shared_tokens=900), "ok"),
        (cached(0, num_shared_tokens=900), "ok"),  # less than declared is no fault of the run
        (cached(94, num_prompt_tokens=1030), "ok"),  # the template before every prompt
        (cached(900, turn=3), "unknown"),  # its own conversation
        (requests(), "unknown"),
    ],
)
def test_more_cached_than_declared_is_invalid(rows: list[RequestRecord], state: str) -> None:
    assert cache_verdict(window(rows)).state == state


def test_without_an_answer_it_is_not_the_server_that_did_not_say() -> None:
    rows = [record(str(i), 10.0 * i, [], outcome=Outcome.UNREACHABLE) for i in range(9)]
    assert cache_verdict(window(rows)).reasons == ["no answer ended well"]
    assert "does not say" in reason(cache_verdict(window(requests())))


def test_a_few_hits_do_not_spoil_a_run() -> None:
    rows = [*cached(0)[:99], record("hit", 5, [1], num_prompt_tokens=1000, num_cached_tokens=900)]
    assert cache_verdict(window(rows)).state == "ok"
    assert "50.0%" not in reason(cache_verdict(window(rows)))


@pytest.mark.parametrize(
    ("rows", "state"),
    [
        (requests(), "ok"),
        (requests(num_output_tokens=5), "ok"),  # the end counted as a token
        (requests(num_output_tokens=1), "invalid"),
        (requests(num_output_tokens=None, num_output_tokens_client=1), "invalid"),
        (requests(num_output_tokens_asked=None), "unknown"),
        ([*requests(99), record("x", 5, [1], num_output_tokens_asked=9)], "ok"),  # one in a hundred
        ([*requests(97), *(record(f"x{i}", i, [1], num_output_tokens_asked=9) for i in range(3))], "invalid"),
        ([*requests(97), *(failed(f"x{i}", i) for i in range(3))], "ok"),  # failures are counted elsewhere
    ],
)
def test_output_lengths_are_held_against_what_was_asked(rows: list[RequestRecord], state: str) -> None:
    assert output_verdict(window(rows)).state == state


def test_a_model_that_may_stop_by_itself_is_not_held_to_a_length() -> None:
    assert output_verdict(window(requests(num_output_tokens=1), run_info(ignore_eos=False))).state == "ok"


@pytest.mark.parametrize(
    ("server", "client", "state"),
    [(100, 100, "ok"), (100, 102, "ok"), (100, 103, "invalid"), (1000, 1010, "ok"), (1000, 1011, "invalid")],
)
def test_server_and_tokenizer_may_differ_by_two_tokens_or_a_hundredth(server: int, client: int, state: str) -> None:
    rows = requests(num_output_tokens=server, num_output_tokens_client=client)
    assert tokens_verdict(window(rows)).state == state


def test_tokens_counted_once_are_unknown() -> None:
    assert "second time" in reason(tokens_verdict(window(requests())))
    unknown = tokens_verdict(window(requests(token_count=TokenCount.UNKNOWN, num_output_tokens=None)))
    assert unknown.state == "unknown"
    assert "usage" in reason(unknown)
    assert "estimate" in reason(tokens_verdict(window(requests(token_count=TokenCount.LENGTH))))


def test_planned_cancellations_are_left_out_of_every_verdict() -> None:
    odd = [record(f"c{i}", i, [1], num_output_tokens_asked=99, will_cancel=True) for i in range(50)]
    made = window([*requests(), *odd])
    assert output_verdict(made).state == client_verdict(made).state == "ok"
