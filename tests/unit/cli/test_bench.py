"""`tailrace bench`: flags that are checked before anything is sent, and what is shown."""

import sys
from pathlib import Path

import pytest
from report_samples import make_report, make_series

from tailrace.cli import bench_options, bench_text
from tailrace.cli.bench_progress import LineDisplay, PanelDisplay, lines
from tailrace.cli.bench_result import Outputs, holds, show
from tailrace.cli.bench_run import (
    Flags,
    check_rows_name,
    expected_requests,
    make_request,
    numbered,
    requests_needed,
    say_too_short,
)
from tailrace.cli.main import run
from tailrace.errors import ConfigError, TailraceError
from tailrace.measure.report import BenchResult, Report, Verdict
from tailrace.measure.slo import parse_slo
from tailrace.workload.job import Progress
from tailrace.workload.run.live import LiveNumbers

NOWHERE = "http://127.0.0.1:9"


def result(*reports: Report, passes: bool | None = None) -> BenchResult:
    return BenchResult(definitions="x", reports=list(reports), intervals={}, passes=passes, reasons=["why"])


# Flags


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--arrivals", "poisson"], "poisson"),
        (["--arrivals", "poisson:-1"], "poisson:-1"),
        (["--arrivals", "weird:3"], "weird"),
        (["--trace", "missing.jsonl"], "there is no trace file 'missing.jsonl'"),
        (["--workload", "chet"], "the nearest is 'chat'"),
        (["--workload", "missing.toml"], "missing.toml"),
        (["--slo", "ttft<=5"], "'ttft<=5' is not a limit"),
        (["--duration", "5", "--requests", "5"], "--duration or --requests"),
        (["--duration", "-5"], "duration"),
        (["--requests", "0"], "requests"),
        (["--senders", "many"], "write auto or a number"),
        (["--senders", "0"], "write auto or a number"),
        (["--api", "embeddings"], "write chat or completions"),
        (["--header", "no-colon"], "write NAME:VALUE"),
        (["--extra-body", "[1]"], "not a JSON object"),
        (["--extra-body", "{"], "not a JSON object"),
        (["--timeout", "inf"], "--timeout inf"),
        (["--timeout", "99999999"], "--timeout"),
        (["--tokenizer", "missing/tokenizer.json"], "cannot read the tokenizer"),
        (["--rows", "rows.csv"], ".jsonl.gz"),
        (["--rows", "missing-folder/rows.jsonl.gz"], "there is no folder"),
        (["--html", "missing-folder/page.html"], "there is no folder"),
        (["--out", "."], "is a folder"),
        (["--out", "/proc/result.json"], "cannot be written"),
        (["--rows", "/proc/rows.jsonl"], "cannot be written"),
        (["--out", "one.file", "--html", "one.file"], "give two names"),
        (["--header", "X-A: b\r\nX-B: c"], "a character that a header cannot carry"),
        (["--header", "Host: x"], "leave it out"),
        (["--api-key", "a\nb"], "a character that a header cannot carry"),
        *((["--extra-body", f'{{"{name}": 1}}'], f"leave {name} out") for name in bench_options.OWN_FIELDS),
    ],
)
def test_bad_input_is_one_line_before_anything_is_sent(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", NOWHERE, *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert words in shown.err
    assert len(shown.err.splitlines()) == 1


def test_arrivals_are_given_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", NOWHERE, "--trace", "a.jsonl", "--arrivals", "poisson:4"]) == 2
    assert "one of --arrivals and --trace" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://host", "ftp://host is not an HTTP address; write http://host:port"),
        ("http://", "http:// is not an HTTP address; write http://host:port"),
        ("http://host:notaport", "http://host:notaport is not an HTTP address; write http://host:port"),
        ("http://host/?key=1", "write http://host:port"),
        ("http://host/a b", "write http://host:port"),
        ("http://host/\r\nX: y", "write http://host:port"),
        ("http://host/v1/chat/completions", "give the address before /v1"),
    ],
)
def test_an_address_that_is_none_is_one_line(url: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", url, "--requests", "1"]) == 2
    shown = capsys.readouterr().err
    assert shown.endswith(f"{said}\n")
    assert len(shown.splitlines()) == 1


def test_a_service_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", NOWHERE, "--requests", "1"]) == 5
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"tailrace: {NOWHERE}/v1/models cannot be used")
    assert said.endswith("; is a server running there?")


@pytest.mark.parametrize("url", ["http://me:hush@127.0.0.1:9", "me:hush@127.0.0.1:9/v1"])
def test_an_address_with_a_password_is_refused_and_not_shown(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", url]) == 2
    assert "hush" not in capsys.readouterr().err


def test_a_secret_header_is_not_shown_when_it_is_wrong() -> None:
    with pytest.raises(ConfigError) as caught:
        bench_options.parse_headers(["Authorization Bearer hush"])
    assert "hush" not in caught.value.message


def test_headers_keep_colons_of_their_values() -> None:
    assert bench_options.parse_headers(["X-A: b:c", "X-B:d"]) == {"X-A": "b:c", "X-B": "d"}


def test_defaults_are_a_minute_of_one_caller() -> None:
    request = make_request(Flags(url=NOWHERE, workload="chat", arrivals="closed:1"))
    assert (request.duration_s, request.num_requests, request.num_senders) == (60.0, None, None)


def test_a_key_is_in_the_request_and_in_no_text_of_it() -> None:
    request = make_request(Flags(url=NOWHERE, workload="chat", arrivals="closed:1", api_key="hush"))
    assert request.api_key == "hush"
    assert "hush" not in request.source().workload_toml


def test_a_run_too_short_for_its_claim_is_told_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    flags = Flags(url=NOWHERE, workload="chat", arrivals="poisson:4", requests=100, slo="ttft_ms_p99<=500")
    say_too_short(make_request(flags))
    assert "662 are needed" in capsys.readouterr().err
    say_too_short(make_request(Flags(url=NOWHERE, workload="chat", arrivals="poisson:4", requests=1000, slo=flags.slo)))
    assert capsys.readouterr().err == ""


def test_the_requests_of_an_open_run_by_time_are_foreseen() -> None:
    flags = Flags(url=NOWHERE, workload="chat", arrivals="constant:4", duration=50.0)
    assert expected_requests(make_request(flags)) == pytest.approx(200, rel=0.01)
    closed = Flags(url=NOWHERE, workload="chat", arrivals="closed:4", duration=50.0)
    assert expected_requests(make_request(closed)) is None


def test_the_widest_percentile_says_how_many_requests_are_needed() -> None:
    assert requests_needed(parse_slo("ttft_ms_p50<=1, ttft_ms_p99<=2, tpot_ms_p90<=3")) == 662
    assert requests_needed(parse_slo("")) == 0


def test_rows_of_repeats_are_numbered() -> None:
    assert numbered(Path("a/run.jsonl.gz"), 1) == [Path("a/run.jsonl.gz")]
    assert numbered(Path("a/run.jsonl.gz"), 2) == [Path("a/run-1.jsonl.gz"), Path("a/run-2.jsonl.gz")]
    check_rows_name("a/run.jsonl")


def test_a_file_that_cannot_be_written_is_told_before_the_run(tmp_path: Path) -> None:
    Outputs(html=str(tmp_path / "page.html")).check()
    with pytest.raises(TailraceError):
        Outputs(html=str(tmp_path)).check()


# The table


def test_verdicts_come_first_then_limits_then_numbers() -> None:
    text = bench_text.result_text(result(make_report()))
    order = ["check", "limit", "TTFT", "requests/s", "prompt asked", "outcomes", "note:"]
    places = [text.index(word) for word in order]
    assert places == sorted(places)


@pytest.mark.parametrize(("passes", "word"), [(True, "pass"), (False, "FAIL"), (None, "cannot say")])
def test_a_limit_passes_fails_or_cannot_be_said(passes: bool | None, word: str) -> None:
    text = bench_text.report_text(make_report(passes=passes))
    line = next(line for line in text.splitlines() if line.startswith("ttft_ms_p99<=500"))
    assert word in line
    assert "240 of 662 samples" in line


def test_an_invalid_run_is_named_by_what_is_invalid() -> None:
    report = changed(make_report(), verdicts={"client": Verdict(state="invalid", reasons=["send lag 30 ms"])})
    assert "INVALID (invalid-client)" in bench_text.report_text(report)


def test_failures_are_infinite_beside_a_column_of_successes() -> None:
    text = bench_text.report_text(make_report())
    ttft = next(line for line in text.splitlines() if line.startswith("TTFT "))
    assert ttft.split() == ["TTFT", "120", "240", "360", "inf", "120", "480", "240", "4", "1"]


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "-"), ("inf", "inf"), (0.123, "0.12"), (12.345, "12.3"), (12345.6, "12,346")]
)
def test_milliseconds_keep_their_significant_digits(value: float | str | None, shown: str) -> None:
    assert bench_text.milliseconds(value) == shown  # type: ignore[arg-type]


def test_the_rate_of_the_law_is_told_from_the_rate_that_chance_gave() -> None:
    text = bench_text.report_text(make_report())
    assert "4 by the law, 4.1 issued, 3.9 completed" in text
    assert text.count("requests that ended well only") == 1


def test_the_files_are_named_after_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", sys.stdout)
    out, page = tmp_path / "out.json", tmp_path / "page.html"
    show(result(make_report()), [make_series()], Outputs(out=str(out), html=str(page)))
    assert capsys.readouterr().out.splitlines()[-2:] == [f"JSON: {out}", f"page: {page}"]


def test_several_runs_end_with_what_they_say_together() -> None:
    text = bench_text.result_text(result(make_report(), make_report(), passes=False))
    assert text.count("run ") >= 2
    assert text.endswith("all runs together: FAIL\n  why")


def test_check_asks_for_validity_and_for_limits_where_there_are_any() -> None:
    assert holds(result(make_report(), passes=True))
    assert not holds(result(make_report(), passes=None))
    assert holds(result(make_report(slo=""), passes=None))
    assert not holds(result(changed(make_report(slo=""), is_valid=False), passes=None))


def changed(report: Report, **fields: object) -> Report:
    kept = {name: getattr(report, name) for name in report.__struct_fields__}
    return Report(**(kept | fields))  # type: ignore[arg-type]


# The live display


def progress(**fields: object) -> Progress:
    values: dict[str, object] = {
        "num_scheduled": 40,
        "num_issued": 39,
        "num_in_flight": 3,
        "num_awaiting_first": 1,
        "outcomes": {"ok": 30, "timeout": 2},
        "ttft_ms": [100.0, 200.0],
        "tpot_ms": [20.0],
        "num_output_tokens": 99,
    }
    return Progress(**(values | fields))  # type: ignore[arg-type]


def numbers() -> LiveNumbers:
    live = LiveNumbers(warmup_s=5.0, duration_s=15.0, num_requests=None)
    live.start_ns = 10**9
    live.add(0, progress())
    live.add(1, progress(outcomes={"ok": 8}, ttft_ms=[300.0]))
    return live


def test_the_display_adds_senders_up() -> None:
    shown = dict(lines(numbers(), now_ns=11 * 10**9))
    assert shown["time"] == "window 5/15 s"
    assert shown["rate"] == "7.8 issued a second, 40 requests ended"
    assert shown["in flight"] == "6 in flight, 2 awaiting first token"
    assert shown["TTFT"] == "TTFT p50 200, p99 300 ms"
    assert shown["errors"] == "2 timeout"


def test_a_later_message_of_a_sender_replaces_its_counts_and_adds_its_samples() -> None:
    live = numbers()
    live.add(1, progress(num_in_flight=0, outcomes={}, ttft_ms=[50.0]))
    assert live.num_in_flight == 3
    assert live.ttft_ms(0.01) == 50.0
    assert live.ttft_ms(0.99) == 300.0


def test_nothing_seen_yet_is_no_number() -> None:
    live = LiveNumbers(warmup_s=0.0, duration_s=None, num_requests=10)
    assert live.ttft_ms(0.5) is None
    assert dict(lines(live, now_ns=0))["TTFT"] == "TTFT p50 -, p99 - ms"


def test_done_is_by_time_or_by_requests() -> None:
    assert numbers().done_ratio(now_ns=11 * 10**9) == 0.5
    live = LiveNumbers(warmup_s=0.0, duration_s=None, num_requests=100)
    live.add(0, progress(num_window=36, num_window_open=4))
    assert live.done_ratio(now_ns=0) == 0.32


def test_a_run_says_where_it_is() -> None:
    live = numbers()
    live.add(0, progress(num_window=30, num_window_open=3))
    live.add(1, progress(num_window=30, num_window_open=1))
    times = [dict(lines(live, now_ns=(1 + s) * 10**9))["time"] for s in (3, 19, 20)]
    assert times == ["warm-up 3/5 s", "window 14/15 s", "window over; waiting for 4 of 60 to end, load goes on"]
    live = LiveNumbers(warmup_s=0.0, duration_s=None, num_requests=100)
    live.add(0, progress(num_window=14, num_window_open=2))
    assert dict(lines(live, now_ns=0))["time"] == "window 14/100 requests"


@pytest.mark.parametrize(("growth", "is_outrun"), [(5, True), (1, False), (0, False)])
def test_a_service_that_only_falls_behind_is_told_apart(growth: int, is_outrun: bool) -> None:
    live = numbers()
    found = []
    for look in range(7):
        flight = 10 + growth * look
        outcomes = {"ok": 100 + (10 - growth) * look}
        live.add(0, progress(num_in_flight=flight, num_issued=110 + 10 * look, outcomes=outcomes))
        found.append(live.is_outrun(now_ns=(1 + 5 * look) * 10**9))
    assert found == [False] * 6 + [is_outrun]


def test_without_a_terminal_a_phase_is_a_line_and_standard_output_stays_empty(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown, live = LineDisplay(), numbers()
    for phase in ("asking", "asking", "measuring"):
        live.phase = phase
        shown.show(live)
    captured = capsys.readouterr()
    assert captured.err.splitlines() == ["asking", "measuring"]
    assert captured.out == ""


def test_a_panel_says_the_phase_and_the_numbers() -> None:
    from rich.console import Console

    drawn: list[object] = []
    live = numbers()
    live.phase = "measuring [b]"
    PanelDisplay("poisson:4 to [url]", drawn.append).show(live)
    console = Console(width=100, file=sys.stderr, record=True)
    console.print(drawn[0])
    text = console.export_text()
    assert "poisson:4 to [url]" in text
    assert "measuring [b]" in text
    assert "awaiting first token" in text
