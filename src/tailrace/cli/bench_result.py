"""From files of rows to what is shown: one report a file, their curves, and what they say together."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tailrace.cli.bench_text import result_text
from tailrace.cli.output import note, print_json, printable
from tailrace.errors import ConfigError
from tailrace.measure.build import build_report
from tailrace.measure.combine import combine
from tailrace.measure.pages.report_page import report_page
from tailrace.measure.pages.series import RunSeries, run_series
from tailrace.measure.report import BenchResult
from tailrace.measure.rows import read_rows
from tailrace.measure.slo import Slo


class Outputs(msgspec.Struct, frozen=True, kw_only=True):
    """Where a result goes, besides standard output."""

    as_json: bool = False
    html: str | None = None
    out: str | None = None

    def check(self) -> None:
        """Before minutes of measuring: raises ConfigError for a file that could not be written."""
        for path in (self.html, self.out):
            if path is not None:
                check_writable(path)
        if self.html is not None and self.html == self.out:
            raise ConfigError(f"{self.out} cannot be both the page and the JSON: give two names")

    def say(self) -> None:
        """Which files were written, after the result."""
        for name, path in (("JSON", self.out), ("page", self.html)):
            if path is not None:
                note(f"{name}: {path}")


def check_writable(path: str) -> None:
    """Tries: permissions alone do not tell of a folder that is mounted read-only."""
    file = Path(path).expanduser()
    if not file.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {str(file.parent)!r}")
    if file.is_dir():
        raise ConfigError(f"{path} is a folder; name a file")
    try:
        if file.exists():
            file.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=file.parent).close()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}; name a file elsewhere") from error


def result_of(paths: Sequence[Path], slo: Slo | None, *, with_curves: bool) -> tuple[BenchResult, list[RunSeries]]:
    """`slo`: another one than the rows were measured for. Raises ConfigError or InvalidRequest."""
    reports, curves = [], []
    for path in paths:
        info, table = read_rows(path)
        if slo is not None:
            info = msgspec.structs.replace(info, slo=slo)
        reports.append(build_report(info, table))
        if with_curves:
            curves.append(run_series(info, table))
    return combine(reports), curves


def show(result: BenchResult, curves: Sequence[RunSeries], outputs: Outputs) -> None:
    """Raises ConfigError when a file cannot be written."""
    if outputs.out is not None:
        write_file(outputs.out, msgspec.json.format(msgspec.json.encode(result), indent=1))
    if outputs.html is not None:
        write_file(outputs.html, report_page(result, curves).encode("utf-8", "replace"))
    if outputs.as_json:
        print_json(result)
    else:
        print(printable(result_text(result)), flush=True)
    outputs.say()


def holds(result: BenchResult) -> bool:
    """What `--check` asks: every report is valid and every limit, if there is one, holds."""
    has_slo = bool(result.reports[0].info.slo.limits)
    return all(report.is_valid for report in result.reports) and (result.passes is True or not has_slo)


def write_file(name: str, content: bytes) -> None:
    try:
        Path(name).expanduser().write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{name} cannot be written: {error.strerror or error}") from error
