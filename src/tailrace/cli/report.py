"""`tailrace report`: the report of a run again, from its rows."""

from typing import Any

import typer

from tailrace.cli import options

EPILOG = """\b
Examples:
  tailrace report run.jsonl.gz
  tailrace report run.jsonl.gz --slo 'ttft_ms_p95<=300' --html run.html
  tailrace report run-1.jsonl.gz run-2.jsonl.gz run-3.jsonl.gz --json"""


ROWS: Any = typer.Argument(metavar="ROWS...", help="Files of `tailrace bench --rows`; several are repeats.")


def report(
    rows: list[str] = ROWS,
    slo: str | None = typer.Option(
        None, "--slo", metavar="LIMITS", help="Judge by these limits.  [default: those that were measured for]"
    ),
    as_json: bool = options.JSON,
    html: str | None = typer.Option(None, "--html", metavar="FILE", help="Write a page that needs no network."),
    out: str | None = typer.Option(None, "--out", metavar="FILE", help="Write the JSON to a file."),
    check: bool = typer.Option(False, "--check", help="Exit 1 when a limit does not hold or the run is invalid."),
) -> None:
    """Make the report of kept rows again.

    Every number of a report comes from its rows, so a kept run can be judged by another SLO.
    """
    from pathlib import Path

    from tailrace.cli.bench_result import Outputs, holds, result_of, show
    from tailrace.measure.slo import parse_slo

    outputs = Outputs(as_json=as_json, html=html, out=out)
    outputs.check()
    limits = None if slo is None else parse_slo(slo)
    result, curves = result_of([Path(path) for path in rows], limits, with_curves=html is not None)
    show(result, curves, outputs)
    if check and not holds(result):
        raise typer.Exit(1)
