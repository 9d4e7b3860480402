"""`tailrace compare`: what changed between two measured results, with intervals."""

from typing import TYPE_CHECKING, Any

import typer

from tailrace.cli import options

if TYPE_CHECKING:
    from tailrace.measure.compare import Change, Comparison, Side
    from tailrace.measure.intervals import SignedQuantile
    from tailrace.measure.report import BenchResult

EPILOG = """\b
Examples:
  tailrace compare before.json after.json
  tailrace compare a.json b.json --json
  tailrace bench http://127.0.0.1:8000 --workload chat --arrivals poisson:4 --duration 300 --json > a.json"""

FILE_BYTES_MAX = 64 * 1024 * 1024
"""A result of ten runs with 20,000 requests each has about 20 MB."""
REPORTS_MAX = 100
HEADER = ["", "A", "B", "B - A", "95 % interval", "B / A", "95 % interval", "B is"]


def compare(
    a: str = typer.Argument(metavar="A.json", help="A result of `tailrace bench --json` or `tailrace report --json`."),
    b: str = typer.Argument(metavar="B.json", help="The other; differences are B against A."),
    allow_invalid: bool = typer.Option(
        False, "--allow-invalid", help="Compare runs that a verdict calls invalid; no figure is a claim then."
    ),
    as_json: bool = options.JSON,
) -> None:
    """Compare two measured results.

    Results of different workloads, arrivals, SLOs or definitions are refused.
    """
    from tailrace.cli.output import print_json, printable
    from tailrace.errors import ConfigError
    from tailrace.measure.compare import compare as compare_results

    try:
        found = compare_results(read_result(a), read_result(b), allow_invalid=allow_invalid)
    except OverflowError as error:
        raise ConfigError(f"{a} or {b} holds a number out of all range: {error}") from error
    if as_json:
        print_json(found)
    else:
        print(printable(comparison_text(found)))


def read_result(path: str) -> "BenchResult":
    """Raises ConfigError when the file cannot be read, is too large, or is no result of these definitions."""
    import msgspec

    from tailrace.errors import ConfigError
    from tailrace.measure.record import DEFINITIONS
    from tailrace.measure.report import BenchResult

    class Head(msgspec.Struct):
        definitions: str | msgspec.UnsetType = msgspec.UNSET
        result: Any = None

    text = _read(path)
    try:
        head = msgspec.json.decode(text, type=Head)
        if head.definitions is msgspec.UNSET and head.result is not None:
            raise ConfigError(f"{path} is a result of `tailrace saturate`, not of `tailrace bench`")
        if head.definitions is not msgspec.UNSET and head.definitions != DEFINITIONS:
            raise ConfigError(
                f"{path}: made with the definitions {head.definitions[:60]!r}, these are {DEFINITIONS};"
                " make its report again from its rows"
            )
        result = msgspec.json.decode(text, type=BenchResult)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no result of `tailrace bench --json`: {error}") from error
    if not 1 <= len(result.reports) <= REPORTS_MAX:
        raise ConfigError(f"{path} holds {len(result.reports)} runs; 1 to {REPORTS_MAX} can be compared")
    return result


def _read(path: str) -> bytes:
    from tailrace.errors import ConfigError

    try:
        with open(path, "rb") as file:
            text = file.read(FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path!r} cannot be read: {reason}") from error
    if len(text) > FILE_BYTES_MAX:
        raise ConfigError(f"{path} has more than {FILE_BYTES_MAX // 2**20} MiB; results are smaller")
    return text


def comparison_text(found: "Comparison") -> str:
    """The table for people; times in ms."""
    from tailrace.cli.output import table

    rows = [_row(change) for change in found.percentiles + found.figures if change.num_a or change.num_b]
    lines = [
        f"{found.workload}, {found.arrivals}, SLO: {found.slo or 'none'}",
        _side_line("A", found.a),
        _side_line("B", found.b),
        "",
        table(HEADER, rows, right=frozenset(range(1, 7))),
        *(["", *(f"note: {note}" for note in found.notes)] if found.notes else []),
    ]
    return "\n".join(lines)


def _side_line(name: str, side: "Side") -> str:
    outcomes = ", ".join(f"{num:,} {outcome}" for outcome, num in sorted(side.outcomes.items()))
    runs = f"{side.num_runs} run{'s' if side.num_runs != 1 else ''}"
    passes = {True: "meets the SLO", False: "does not show the SLO", None: "the SLO is not judged"}[side.passes]
    return f"{name}: {side.model} at {side.url}, {runs}, {side.num_requests:,} requests ({outcomes}); {passes}"


def _row(change: "Change") -> list[str]:
    interval, ratio_interval = "-", "-"
    if change.difference_low is not None and change.difference_high is not None:
        interval = f"{_signed(change.difference_low)} .. {_signed(change.difference_high)}"
    if change.ratio_low is not None and change.ratio_high is not None:
        ratio_interval = f"{_ratio(change.ratio_low)} .. {_ratio(change.ratio_high)}"
    finding = "no difference shown" if change.finding == "none shown" else change.finding
    return [
        change.name, _number(change.a), _number(change.b), _signed(change.difference), interval,
        _ratio(change.ratio), ratio_interval, finding,
    ]  # fmt: skip


def _number(value: "SignedQuantile") -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _signed(value: "SignedQuantile") -> str:
    text = _number(value)
    return text if text.startswith("-") or text == "0" else f"+{text}"


def _ratio(value: "SignedQuantile") -> str:
    return _number(value) if value is None or isinstance(value, str) else f"{value:.3f}"
