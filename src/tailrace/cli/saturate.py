"""`tailrace saturate`: between which rates does the service stop meeting its objective?"""

import typer

from tailrace.cli import bench_options as given
from tailrace.cli import options

EPILOG = """\b
Examples:
  tailrace saturate URL --slo 'ttft_ms_p99<=500, tpot_ms_p99<=60'
  tailrace saturate URL -w rag-shared-prefix --slo 'ttft_ms_p95<=300' --start 4 --resolution 1.05 --html saturation.html
\b
Doubles the rate until a run fails, bisects on its logarithm, then makes fresh runs at both ends in random order.
A run passes when it is valid and steady and the bound of each percentile is within its limit.
Exit codes: 0 the search came to an end; 1 no rate could be judged (with --check: none is known to pass);
130 interrupted."""

EXIT_INTERRUPTED = 130


def saturate(
    url: str = given.URL,
    workload: str = given.WORKLOAD,
    slo: str = typer.Option(..., "--slo", metavar="LIMITS", help="Such as 'ttft_ms_p99<=500, tpot_ms_p99<=60'."),
    law: str = typer.Option("poisson", "--law", metavar="poisson|constant", help="Arrivals of every run."),
    start: float = typer.Option(1.0, "--start", metavar="RATE", help="Requests a second of the first run."),
    resolution: float = typer.Option(1.1, "--resolution", metavar="RATIO", help="Upper end / lower end when to stop."),
    requests: int | None = typer.Option(
        None, "--requests-per-run", "-n", help="Length of a run's window.  [default: enough for the SLO's bound]"
    ),
    duration: float | None = typer.Option(
        None, "--duration", "-d", metavar="SECONDS", help="Length of a run's window as time, in place of requests."
    ),
    runs: int = typer.Option(5, "--runs", help="Fresh runs at each end of the bracket, 5 at least."),
    runs_max: int = typer.Option(60, "--runs-max", help="Runs in all, then the search ends as it stands."),
    floor: float = typer.Option(0.01, "--floor", metavar="RATE", help="Give up below."),
    ceiling: float = typer.Option(1000.0, "--ceiling", metavar="RATE", help="Give up above."),
    warmup: float = given.WARMUP,
    seed: int = given.SEED,
    senders: str = given.SENDERS,
    timeout: float = given.TIMEOUT,
    max_in_flight: int = given.IN_FLIGHT,
    api: str = given.API,
    model: str | None = given.MODEL,
    api_key: str | None = given.API_KEY,
    header: list[str] | None = given.HEADER,
    ignore_eos: bool = given.IGNORE_EOS,
    chunk_usage: bool = given.CHUNK_USAGE,
    extra_body: str | None = given.EXTRA_BODY,
    as_json: bool = options.JSON,
    rows: str | None = typer.Option(
        None, "--rows", metavar="FOLDER", help="Keep every request of every run; `tailrace report` reads the files."
    ),
    html: str | None = given.HTML,
    out: str | None = given.OUT,
    check: bool = given.CHECK,
) -> None:
    """Find the rate at which a service stops meeting its SLO."""
    from tailrace.cli.bench_result import Outputs
    from tailrace.cli.bench_run import Flags, make_request
    from tailrace.cli.saturate_run import check_runs, parse_law, requests_per_run, rows_folder, search, show
    from tailrace.measure.saturation import SaturationSettings

    outputs = Outputs(as_json=as_json, html=html, out=out)
    outputs.check()
    check_runs(runs, runs_max)
    settings = SaturationSettings(
        start_per_s=start,
        floor_per_s=min(floor, start),
        ceiling_per_s=ceiling,
        resolution_ratio=resolution,
        confirm_runs=runs,
        runs_max=runs_max,
    )
    flags = Flags(
        url=url,
        workload=workload,
        arrivals=f"{parse_law(law)}:{start:g}",
        duration=duration,
        requests=requests_per_run(slo, requests, duration),
        slo=slo,
        warmup=warmup,
        seed=seed,
        senders=senders,
        timeout=timeout,
        max_in_flight=max_in_flight,
        api=api,
        model=model,
        api_key=api_key,
        header=header,
        ignore_eos=ignore_eos,
        chunk_usage=chunk_usage,
        extra_body=extra_body,
    )
    make_request(flags)
    with rows_folder(rows) as folder:
        found = search(flags, law, settings, folder)
    if found.report is not None:
        show(found.report, outputs)
    if found.was_interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    result = None if found.report is None else found.report.result
    if result is None or (result.last_pass_per_s is None and (check or result.first_fail_per_s is None)):
        raise typer.Exit(1)
