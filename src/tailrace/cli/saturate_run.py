"""Drives the search of `measure.saturation` with real runs, and shows what it found."""

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from tailrace.cli.bench_progress import display
from tailrace.cli.bench_result import Outputs, write_file
from tailrace.cli.bench_run import Flags, make_request, requests_needed, run_once, say_too_short
from tailrace.cli.bench_text import count, milliseconds, rate, ratio
from tailrace.cli.output import note, print_json, printable, table
from tailrace.errors import ConfigError
from tailrace.measure.build import build_report
from tailrace.measure.pages.saturation_page import SaturationReport, Value, bracket, saturation_page, shown_values
from tailrace.measure.rows import read_rows
from tailrace.measure.run_info import RunInfo
from tailrace.measure.run_summary import RunVerdict, judge
from tailrace.measure.saturation import Probe, SaturationSearch, SaturationSettings
from tailrace.measure.saturation_result import ProbeResult
from tailrace.measure.slo import parse_slo
from tailrace.measure.steadiness import REQUESTS_MIN as STEADY_REQUESTS_MIN
from tailrace.workload.run.request import BenchRequest

LAWS = ("poisson", "constant")
REQUESTS_MIN = 200
LONG_S = 120.0
MARGIN_RATIO = 1.5
"""More requests than a bound needs at least, so that a single slow one does not fail a run."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    report: SaturationReport | None
    """None: interrupted before the first run had ended."""
    was_interrupted: bool


def parse_law(text: str) -> str:
    if text not in LAWS:
        raise ConfigError(f"--law {text}: write {' or '.join(LAWS)}", param="law")
    return text


def requests_per_run(slo: str, requests: int | None, duration: float | None) -> int | None:
    """None: by time. Raises InvalidRequest for a wrong SLO, ConfigError for an empty one or runs that cannot pass."""
    limits = parse_slo(slo)
    if not limits.limits:
        raise ConfigError("--slo is empty: without limits every rate passes", param="slo")
    needed = requests_needed(limits)
    if requests is None:
        return None if duration is not None else max(REQUESTS_MIN, round(MARGIN_RATIO * needed))
    if requests < max(STEADY_REQUESTS_MIN, needed):
        raise ConfigError(
            f"--requests-per-run {requests}: no run could pass; steadiness needs {STEADY_REQUESTS_MIN} requests, "
            f"the bounds of {limits} need {needed:,}",
            param="requests",
        )
    return requests


def check_runs(runs: int, runs_max: int) -> None:
    """Raises ConfigError where both ends could never have their fresh runs."""
    if 2 * runs > runs_max:
        raise ConfigError(
            f"--runs {runs}: two ends take {2 * runs} runs, more than --runs-max {runs_max}", param="runs"
        )


@contextlib.contextmanager
def rows_folder(name: str | None) -> Iterator[Path | None]:
    """Where the rows of every run stay; None: nowhere. Raises ConfigError when it cannot be made, or holds rows."""
    if name is None:
        yield None
        return
    folder = Path(name).expanduser()
    try:
        folder.mkdir(exist_ok=True)
        if any(folder.glob("run-*.jsonl.gz")):
            raise ConfigError(f"--rows {name}: the rows of another search are there; name another folder", param="rows")
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"--rows {name}: no folder to write into: {error.strerror or error}", param="rows") from error
    yield folder


def search(flags: Flags, law: str, settings: SaturationSettings, rows: Path | None = None) -> Found:
    """`rows`: a folder for the rows of every run. Raises what a run raises (`workload.run.measured_run.measure`)."""
    request = make_request(flags)
    say_too_short(request)
    steps = SaturationSearch(settings, flags.seed)
    first: RunInfo | None = None
    while isinstance(probe := steps.next_probe(), Probe):
        note(start_line(request, probe))
        info, verdict = _run(request, law, probe, rows)
        if info is None or verdict is None:
            note("interrupted: the run under way is left out")
            break
        first = first or info
        steps.record(probe, verdict)
        note(probe_line(probe, verdict))
    report = None if first is None else SaturationReport(info=first, result=steps.result())
    return Found(report=report, was_interrupted=isinstance(steps.next_probe(), Probe))


def probe_request(request: BenchRequest, law: str, probe: Probe) -> BenchRequest:
    """A fresh run: other text, another draw."""
    return msgspec.structs.replace(
        request,
        arrivals=f"{law}:{probe.rate_per_s:g}",
        run_id=f"{request.run_id}-{probe.number}",
        seed=request.seed + probe.number,
    )


def start_line(request: BenchRequest, probe: Probe) -> str:
    """How long a run will take: at low rates it is long, and a better start is worth knowing in the first minute."""
    window_s = (request.num_requests or 0) / probe.rate_per_s if request.duration_s is None else request.duration_s
    hint = "; a higher --start comes there sooner" if probe.number == 0 and window_s > LONG_S else ""
    seconds = request.warmup_s + window_s
    takes = f"{seconds / 60:.0f} min" if seconds >= LONG_S else f"{seconds:.0f} s"
    return f"run {probe.number + 1} ({probe.purpose}): {probe.rate_per_s:g}/s, about {takes}{hint}"


def probe_line(probe: Probe, verdict: RunVerdict) -> str:
    s = verdict.summary
    limits = "".join(f", {each.limit}: {milliseconds(each.value_ms)} ms" for each in s.limits)
    why = f": {verdict.reasons[0]}" if verdict.reasons and verdict.outcome != "pass" else ""
    return (
        f"{probe.rate_per_s:g}/s ({probe.purpose}): {verdict.outcome.value}, {s.steadiness}; TTFT p99 "
        f"{milliseconds(s.ttft_ms_p99)} ms{limits}, goodput {rate(s.goodput_per_s)}/s, "
        f"{count(s.num_errors)} errors{why}"
    )


def show(report: SaturationReport, outputs: Outputs) -> None:
    """Raises ConfigError when a file cannot be written."""
    if outputs.out is not None:
        write_file(outputs.out, msgspec.json.format(msgspec.json.encode(report), indent=1))
    if outputs.html is not None:
        write_file(outputs.html, saturation_page(report).encode("utf-8", "replace"))
    if outputs.as_json:
        print_json(report)
    else:
        print(printable(report_text(report)), flush=True)
    outputs.say()


def report_text(report: SaturationReport) -> str:
    result, info = report.result, report.info
    values = shown_values(info.slo)
    header = ["rate/s", "runs", "passed", "steady", "attained", *values, "goodput/s", "errors", "queue age p99"]
    rows = []
    for each in result.rates:
        runs = [p for p in result.probes if p.rate_per_s == each.rate_per_s]
        mark = {result.last_pass_per_s: " <", result.first_fail_per_s: " >"}.get(each.rate_per_s, "")
        counts = (each.num_runs, each.num_passed, each.num_steady)
        rows.append([f"{each.rate_per_s:g}{mark}", *map(count, counts), ratio(each.attainment_ratio)])
        rows[-1] += _middle(runs, values.values())
    parts = [
        f"{info.workload} at {info.url}, {info.slo}",
        bracket(result),
        "\n".join(f"  {reason}" for reason in result.reasons),
        table(header, rows, right=frozenset(range(1, len(header)))) if rows else "",
        "numbers of the middle run at each rate; < last that passes, > first that fails" if rows else "",
    ]
    return "\n\n".join(part for part in parts if part)


def _middle(runs: list[ProbeResult], values: Iterable[Value]) -> list[str]:
    """The run in the middle by TTFT p99, whole: its numbers belong together."""

    def ttft(run: ProbeResult) -> float:
        value = run.summary.ttft_ms_p99
        return float("inf") if value is None else float(value)

    s = sorted(runs, key=ttft)[(len(runs) - 1) // 2].summary
    times = [milliseconds(value(s)) for value in values]
    return [*times, rate(s.goodput_per_s), count(s.num_errors), milliseconds(s.queue_age_ms_p99)]


def _run(request: BenchRequest, law: str, probe: Probe, rows: Path | None) -> tuple[RunInfo | None, RunVerdict | None]:
    fresh = probe_request(request, law, probe)
    with tempfile.TemporaryDirectory(prefix="tailrace-rows-") as folder, display(f"{fresh.arrivals}") as shown:
        path = Path(folder) / "rows.jsonl" if rows is None else rows / f"run-{probe.number + 1:03d}.jsonl.gz"
        info, was_interrupted = run_once(fresh, path, shown.show, None)
        if info is None or was_interrupted:
            return None, None
        return info, judge(build_report(*read_rows(path)))
