"""`tailrace saturate`: what a search is told, and how its result is shown."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from report_samples import make_info

from tailrace.cli.bench_result import Outputs
from tailrace.cli.bench_run import Flags, make_request
from tailrace.cli.main import run
from tailrace.cli.saturate_run import (
    probe_line,
    probe_request,
    report_text,
    requests_per_run,
    rows_folder,
    show,
    start_line,
)
from tailrace.errors import ConfigError
from tailrace.measure.pages.saturation_page import SaturationReport, bracket, saturation_figures, saturation_page
from tailrace.measure.report import LimitResult
from tailrace.measure.run_summary import RunOutcome, RunSummary, RunVerdict
from tailrace.measure.saturation import Probe, SaturationSearch, SaturationSettings

NOWHERE = "http://127.0.0.1:9"
SLO = "ttft_ms_p99<=500"


def verdict(rate: float, limit: float, *, client: bool = False) -> RunVerdict:
    """Of a service that takes `limit` requests a second."""
    passes = rate <= limit
    summary = RunSummary(
        offered_per_s=rate,
        completed_per_s=min(rate, limit),
        num_requests=1_000,
        num_errors=0 if passes else 40,
        num_attained=1_000 if passes else 700,
        attainment_ratio=1.0 if passes else 0.7,
        goodput_per_s=rate if passes else 0.7 * rate,
        ttft_ms_p95=100.0 + rate,
        ttft_ms_p99=200.0 + rate if passes else "inf",
        tpot_ms_p99=30.0,
        steadiness="steady" if passes else "saturated",
        queue_age_ms_p99=50.0 if passes else 9_000.0,
        little_difference_ratio=0.004,
    )
    outcome = RunOutcome.CLIENT if client else RunOutcome.PASS if passes else RunOutcome.FAIL
    return RunVerdict(outcome=outcome, summary=summary, reasons=[] if passes else ["the bound is over <the> limit"])


def searched(limit: float, *, runs: int = 1_000, client_from: float = 1e9) -> SaturationReport:
    steps = SaturationSearch(SaturationSettings(start_per_s=2.0), seed=3)
    for _ in range(runs):
        probe = steps.next_probe()
        if not isinstance(probe, Probe):
            break
        steps.record(probe, verdict(probe.rate_per_s, limit, client=probe.rate_per_s >= client_from))
    return SaturationReport(info=make_info(slo=SLO), result=steps.result())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing option '--slo'"),
        (["--slo", ""], "without limits every rate passes"),
        (["--slo", SLO, "--law", "closed"], "write poisson or constant"),
        (["--slo", SLO, "--resolution", "1"], "resolution"),
        (["--slo", SLO, "--runs", "2"], "at least 5 fresh runs"),
        (["--slo", SLO, "--runs", "40"], "more than --runs-max 60"),
        (["--slo", SLO, "--rows", "/proc/rows"], "no folder to write into"),
        (["--slo", SLO, "--start", "0"], ":0"),
        (["--slo", SLO, "--ceiling", "0.5"], "ceiling"),
        (["--slo", SLO, "-n", "700", "-d", "5"], "--duration or --requests"),
        (["--slo", SLO, "-n", "661"], "need 662"),
        (["--slo", "ttft_ms_p50<=9", "-n", "99"], "steadiness needs 100"),
    ],
)
def test_bad_input_is_told_before_anything_is_sent(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["saturate", NOWHERE, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_run_is_long_enough_for_the_bound_of_its_limits() -> None:
    assert requests_per_run(SLO, None, None) == 993
    assert requests_per_run("ttft_ms_p50<=5", None, None) == 200
    assert requests_per_run(SLO, 662, None) == 662
    assert requests_per_run(SLO, None, 30.0) is None


def test_each_probe_is_a_fresh_run_at_its_rate() -> None:
    request = make_request(Flags(url=NOWHERE, workload="chat", arrivals="poisson:1", requests=10, seed=4, slo=SLO))
    first, second = (
        probe_request(request, "constant", Probe(number=n, rate_per_s=2.5, purpose="bisect")) for n in (0, 1)
    )
    assert first.arrivals == second.arrivals == "constant:2.5"
    assert (first.seed, second.seed) == (4, 5)
    assert first.run_id != second.run_id


def test_a_run_says_how_long_it_takes_and_a_slow_start_what_helps() -> None:
    request = make_request(Flags(url=NOWHERE, workload="chat", arrivals="poisson:1", requests=993, warmup=5, slo=SLO))
    first, later = (
        start_line(request, Probe(number=n, rate_per_s=rate, purpose="double")) for n, rate in ((0, 1.0), (4, 16.0))
    )
    assert first == "run 1 (double): 1/s, about 17 min; a higher --start comes there sooner"
    assert later == "run 5 (double): 16/s, about 67 s"


def test_rows_of_another_search_are_not_written_over(tmp_path: Path) -> None:
    with rows_folder(str(tmp_path / "new")) as folder:
        assert folder is not None
        (folder / "run-001.jsonl.gz").touch()
    with pytest.raises(ConfigError, match="another search"), rows_folder(str(folder)):
        pass


def test_a_probe_is_a_line() -> None:
    line = probe_line(Probe(number=0, rate_per_s=4.0, purpose="double"), verdict(4.0, 3.0))
    assert line == (
        "4/s (double): fail, saturated; TTFT p99 inf ms, goodput 2.8/s, 40 errors: the bound is over <the> limit"
    )


def test_the_answer_is_a_bracket() -> None:
    report = searched(10.0)
    low, high = report.result.last_pass_per_s, report.result.first_fail_per_s
    assert low is not None
    assert high is not None
    assert low <= 10.0 < high
    assert bracket(report.result) == f"{low:g} requests/s pass, {high:g} requests/s fail."
    text = report_text(report)
    assert bracket(report.result) in text
    assert f"{low:g} <" in text
    assert f"{high:g} >" in text


def test_a_search_that_was_cut_short_claims_no_confirmation() -> None:
    assert "not confirmed" in bracket(searched(10.0, runs=4).result)


def test_no_passing_rate_is_said() -> None:
    assert bracket(searched(0.001).result).startswith("No rate that was tried passes")


def test_the_client_s_own_limit_is_not_the_service_s() -> None:
    report = searched(1_000.0, client_from=16.0)
    assert report.result.status == "client_limit"
    assert "the client is the limit at 16/s" in report_text(report)


def test_the_bracket_is_shaded_and_infinite_percentiles_are_marks() -> None:
    report = searched(10.0)
    figures = {figure.name: figure for figure in saturation_figures(report)}
    assert list(figures) == ["ttft", "goodput", "errors", "queue-age"]
    shaded = [shape for shape in figures["goodput"].layout["shapes"] if shape["type"] == "rect"]
    assert [(s["x0"], s["x1"]) for s in shaded] == [(report.result.last_pass_per_s, report.result.first_fail_per_s)]
    runs = next(trace for trace in figures["ttft"].traces if trace["name"] == "p99, runs")
    assert "triangle-up-open" in runs["marker"]["symbol"]
    assert len(runs["x"]) == len(report.result.probes)
    assert json.loads(msgspec.json.encode(list(figures.values())))


def test_the_percentiles_of_the_slo_are_shown_beside_their_limits() -> None:
    slo = "ttft_ms_p50<=300, tpot_ms_p90<=40"
    limits = [LimitResult(limit="ttft_ms_p50<=300", value_ms=123.0, bound_ms=150.0, passes=True, reason="")]
    limits.append(LimitResult(limit="tpot_ms_p90<=40", value_ms=31.5, bound_ms=33.0, passes=True, reason=""))
    steps = SaturationSearch(SaturationSettings(start_per_s=2.0), seed=3)
    probe = steps.next_probe()
    assert isinstance(probe, Probe)
    found = verdict(2.0, 10.0)
    found = msgspec.structs.replace(found, summary=msgspec.structs.replace(found.summary, limits=limits))
    steps.record(probe, found)
    report = SaturationReport(info=make_info(slo=slo), result=steps.result())
    lines = report_text(report).splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("rate/s"))
    columns = dict(zip(re.split(r"  +", lines[header]), re.split(r"  +", lines[header + 1]), strict=True))
    assert columns["ttft_ms_p50<=300"] == "123"
    assert columns["tpot_ms_p90<=40"] == "31.5"
    assert columns["TTFT p99"] == "202"
    figures = {figure.name: figure for figure in saturation_figures(report)}
    assert [shape["y0"] for shape in figures["tpot"].layout["shapes"]] == [40.0]
    [line] = figures["ttft"].layout["shapes"]
    p50 = next(trace for trace in figures["ttft"].traces if trace["name"] == "p50")
    assert (line["y0"], line["line"]["color"]) == (300.0, p50["line"]["color"])
    assert "ttft_ms_p50&lt;=300" in saturation_page(report)
    assert "ttft_ms_p50<=300: 123 ms" in probe_line(probe, found)


def test_the_page_shows_text_as_text() -> None:
    names: list[str] = []

    class Elements(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
            names.append(tag)

    text = saturation_page(searched(10.0))
    Elements().feed(text)
    assert "the" not in names
    assert "the bound is over &lt;the&gt; limit" in text


def test_json_and_files_carry_the_whole_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = searched(10.0)
    out, page = tmp_path / "out.json", tmp_path / "page.html"
    show(report, Outputs(as_json=True, html=str(page), out=str(out)))
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(out.read_text(encoding="utf-8"))
    assert len(printed["result"]["probes"]) == len(report.result.probes)
    assert msgspec.convert(printed, SaturationReport) == report
    assert "How much it can take" in page.read_text(encoding="utf-8")
