"""`tailrace bench`: measure an OpenAI-compatible address under load, and say what can be claimed."""

import typer

from tailrace.cli import bench_options as given
from tailrace.cli import options

EPILOG = """\b
Examples:
  tailrace bench http://127.0.0.1:8000
  tailrace bench URL -w chat --arrivals poisson:4 --requests 1000 --slo 'ttft_ms_p99<=500, tpot_ms_p99<=60'
  tailrace bench URL -w rag-shared-prefix --arrivals closed:64 --duration 120 --rows run.jsonl.gz --html run.html
  tailrace bench URL --arrivals poisson:4 --requests 1000 --slo 'ttft_ms_p99<=500' --repeats 5 --check
\b
Arrivals:
  poisson:RATE     requests a second with exponential gaps, whatever the service does
  constant:RATE    the same with equal gaps
  gamma:RATE:CV    bursts: gaps of a gamma law with coefficient of variation CV (1: poisson)
  closed:CLIENTS   so many callers, each sends when its last answer ended
  trace:FILE       the instants and lengths of a file; trace:FILE@2.0 twice as fast
\b
Latency counts from the scheduled arrival; what fails counts as infinite. A p99 needs 662 requests at least.
Exit codes: 0 measured, also when a limit does not hold (1 with --check); 130 interrupted, with the report so far."""

ARRIVALS = "closed:1"
REPEATS_MAX = 100
EXIT_INTERRUPTED = 130


def bench(
    url: str = given.URL,
    workload: str = given.WORKLOAD,
    arrivals: str = typer.Option(
        ARRIVALS, "--arrivals", "-a", metavar="LAW", help="poisson:RATE, closed:CLIENTS and others, see below."
    ),
    trace: str | None = typer.Option(None, "--trace", metavar="FILE", help="Short for --arrivals trace:FILE."),
    duration: float | None = typer.Option(
        None, "--duration", "-d", metavar="SECONDS", help="Length of the window.  [default: 60, without --requests]"
    ),
    requests: int | None = typer.Option(
        None, "--requests", "-n", help="Length of the window as requests; load goes on until they have ended."
    ),
    slo: str | None = given.SLO,
    warmup: float = given.WARMUP,
    seed: int = given.SEED,
    repeats: int = typer.Option(1, "--repeats", min=1, max=REPEATS_MAX, help="Fresh runs, combined into one result."),
    senders: str = given.SENDERS,
    timeout: float = given.TIMEOUT,
    max_in_flight: int = given.IN_FLIGHT,
    api: str = given.API,
    model: str | None = given.MODEL,
    api_key: str | None = given.API_KEY,
    header: list[str] | None = given.HEADER,
    ignore_eos: bool = given.IGNORE_EOS,
    chunk_usage: bool = given.CHUNK_USAGE,
    tokenizer: str | None = given.TOKENIZER,
    extra_body: str | None = given.EXTRA_BODY,
    no_calibrate: bool = given.NO_CALIBRATE,
    as_json: bool = options.JSON,
    rows: str | None = typer.Option(
        None, "--rows", metavar="FILE", help="Keep every request (.jsonl.gz); `tailrace report` reads it."
    ),
    html: str | None = given.HTML,
    out: str | None = given.OUT,
    check: bool = given.CHECK,
) -> None:
    """Measure a service under load.

    Sends the workload by an absolute schedule, judges itself, the run and the limits, and prints what can be claimed.
    """
    from tailrace.cli.bench_result import Outputs, check_writable, holds, result_of, show
    from tailrace.cli.bench_run import (
        Flags,
        check_rows_name,
        kept_rows,
        make_request,
        measure_all,
        open_recount,
        say_too_short,
    )
    from tailrace.cli.output import note

    if trace is not None:
        if arrivals != ARRIVALS:
            raise typer.BadParameter("one of --arrivals and --trace", param_hint="--trace")
        arrivals = f"trace:{trace}"
    outputs = Outputs(as_json=as_json, html=html, out=out)
    outputs.check()
    if rows is not None:
        check_rows_name(rows)
        check_writable(rows)
    flags = Flags(
        url=url,
        workload=workload,
        arrivals=arrivals,
        duration=duration,
        requests=requests,
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
        tokenizer=tokenizer,
        extra_body=extra_body,
        no_calibrate=no_calibrate,
    )
    request = make_request(flags)
    recount = open_recount(tokenizer)
    say_too_short(request)
    with kept_rows(rows, repeats) as paths:
        done = measure_all(request, paths, recount)
        if not done.paths:
            note("interrupted before anything was measured")
            raise typer.Exit(EXIT_INTERRUPTED)
        result, curves = result_of(done.paths, None, with_curves=html is not None)
    show(result, curves, outputs)
    if rows is not None:
        note(f"rows: {', '.join(str(path) for path in done.paths)}")
    if done.was_interrupted:
        note("interrupted: the report covers what was measured until then")
        raise typer.Exit(EXIT_INTERRUPTED)
    if check and not holds(result):
        raise typer.Exit(1)
