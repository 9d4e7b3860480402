"""Runs what `tailrace bench` and `tailrace saturate` measure: a request made of flags, a display, Ctrl-C, kept rows."""

import asyncio
import contextlib
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tailrace.cli import bench_options
from tailrace.cli.bench_progress import display
from tailrace.cli.output import note
from tailrace.errors import ClientFailed, ConfigError
from tailrace.measure.run_info import RunInfo
from tailrace.measure.slo import Slo, parse_slo
from tailrace.measure.statistics import min_samples
from tailrace.workload.arrivals import Trace, parse_arrivals
from tailrace.workload.definition import decode_workload, read_workload_text
from tailrace.workload.draw import DURATION_S_MAX, draw_plan
from tailrace.workload.job import BodyOptions, Endpoint
from tailrace.workload.run.endpoint import base_url
from tailrace.workload.run.measured_run import Show, measure
from tailrace.workload.run.request import BenchRequest, new_run_id, repeat
from tailrace.workload.run.second_count import Recount, recount_with
from tailrace.workload.send.pool import Target

TIMEOUT_S_MAX = 18 * 3600.0
"""Rows keep no longer gaps."""
DURATION_S = 60.0
"""Where neither a duration nor a number of requests is given."""


class Flags(msgspec.Struct, frozen=True, kw_only=True):
    """As on the command line."""

    url: str
    workload: str
    arrivals: str
    duration: float | None = None
    requests: int | None = None
    slo: str | None = None
    warmup: float = 0.0
    seed: int = 0
    senders: str = "auto"
    timeout: float = 600.0
    max_in_flight: int = 4096
    api: str = "chat"
    model: str | None = None
    api_key: str | None = None
    header: list[str] | None = None
    ignore_eos: bool = True
    chunk_usage: bool = False
    tokenizer: str | None = None
    extra_body: str | None = None
    no_calibrate: bool = False


class Done(msgspec.Struct, frozen=True, kw_only=True):
    paths: list[Path]
    """Files of rows that were written."""
    was_interrupted: bool


def make_request(flags: Flags) -> BenchRequest:
    """Checks everything that can be checked before anything is sent. Raises ConfigError or InvalidRequest."""
    headers = bench_options.parse_headers(flags.header)
    _check_address(flags.url, flags.api_key, headers)
    if not 0 < flags.timeout <= TIMEOUT_S_MAX:
        raise ConfigError(f"--timeout {flags.timeout:g}: at most {TIMEOUT_S_MAX:g} s", param="timeout")
    text = read_workload_text(flags.workload)
    decode_workload(text, flags.workload)
    duration = flags.duration
    if duration is None and flags.requests is None:
        # A trace ends by itself.
        duration = DURATION_S_MAX if isinstance(parse_arrivals(flags.arrivals), Trace) else DURATION_S
    request = BenchRequest(
        url=flags.url,
        workload_toml=text,
        arrivals=flags.arrivals,
        run_id=new_run_id(),
        seed=flags.seed,
        duration_s=duration,
        num_requests=flags.requests,
        warmup_s=flags.warmup,
        slo=parse_slo(flags.slo or ""),
        api=bench_options.parse_api(flags.api),
        model=flags.model,
        api_key=flags.api_key,
        headers=headers,
        options=BodyOptions(
            ignore_eos=flags.ignore_eos,
            chunk_usage=flags.chunk_usage,
            extra=bench_options.parse_extra_body(flags.extra_body),
        ),
        num_senders=bench_options.parse_senders(flags.senders),
        timeout_s=flags.timeout,
        num_in_flight_max=flags.max_in_flight,
        calibrates=not flags.no_calibrate,
        keeps_text=flags.tokenizer is not None,
    )
    draw_plan(request.source())
    return request


def _check_address(url: str, api_key: str | None, headers: dict[str, str]) -> None:
    """Raises ConfigError for an address or a header that no request could carry; `run.endpoint` finds out only when it
    asks. An address with a password is refused too: addresses are shown and kept, secrets are not."""
    host, _, path = url.rpartition("://")[2].partition("/")
    if "@" in host:
        raise ConfigError("the address holds a user or password; give it as --api-key or --header", param="url")
    if not (path.isascii() and path.isprintable()) or " " in path or "?" in url or "#" in url:
        raise ConfigError(
            f"the address {url!r} has a query, a space or a strange character; write http://host:port", param="url"
        )
    if path.rstrip("/").endswith(("/completions", "/models")):
        raise ConfigError(f"{url} is one route of a service; give the address before /v1", param="url")
    try:
        Target(Endpoint(base_url=base_url(url), model="", api_key=api_key, headers=headers))
    except ClientFailed as error:
        raise ConfigError(error.message, param="url") from error


def requests_needed(slo: Slo) -> int:
    """Without a failure, for a bound on each percentile of the SLO at 99 % confidence."""
    return max((min_samples(limit.percentile_ratio) for limit in slo.limits), default=0)


def say_too_short(request: BenchRequest) -> None:
    """A claim that the run cannot support is told before it, not after."""
    needed, expected = requests_needed(request.slo), expected_requests(request)
    if expected is not None and expected < needed:
        note(
            f"about {expected:,.0f} requests are too few to bound {request.slo}: {needed:,} are needed; "
            "the limits can fail, but cannot be shown to hold (or use --repeats)"
        )


def expected_requests(request: BenchRequest) -> float | None:
    """In the window; None in a closed loop by time, where the service decides."""
    if request.num_requests is not None:
        return float(request.num_requests)
    plan = draw_plan(request.source())
    if plan.offered_per_s is None or plan.window_end_ns is None:
        return None
    return plan.offered_per_s * (plan.window_end_ns - plan.window_start_ns) / 1e9


def measure_all(request: BenchRequest, paths: Sequence[Path], recount: Recount | None) -> Done:
    """A fresh run for each path, until Ctrl-C: what was measured by then is kept."""
    title = f"{request.arrivals} to {request.url}"
    done: list[Path] = []
    with display(title) as shown:
        for number, path in enumerate(paths):
            fresh = repeat(request, number) if len(paths) > 1 else request
            if len(paths) > 1:
                note(f"run {number + 1} of {len(paths)}")
            info, was_interrupted = run_once(fresh, path, shown.show, recount)
            if info is not None and (not was_interrupted or not done):
                done.append(path)
            if was_interrupted:
                return Done(paths=done, was_interrupted=True)
    return Done(paths=done, was_interrupted=False)


def run_once(request: BenchRequest, path: Path, show: Show, recount: Recount | None) -> tuple[RunInfo | None, bool]:
    """(header of the rows, whether a signal ended it). The first Ctrl-C (or SIGTERM) keeps what there is, the second
    does not."""

    async def run() -> tuple[RunInfo | None, bool]:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def interrupt(number: int) -> None:
            stop.set()
            loop.remove_signal_handler(number)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt, number)
        try:
            measured = await measure(request, path, show=show, stop=stop, recount=recount)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        return measured.info, measured.was_interrupted

    return asyncio.run(run())


def open_recount(spec: str | None) -> Recount | None:
    """Of `--tokenizer`, opened before the run: a wrong path is told at once."""
    return None if spec is None else recount_with(spec)


@contextlib.contextmanager
def kept_rows(name: str | None, num_runs: int) -> Iterator[list[Path]]:
    """Where the rows of each run go. Without a name, into a folder that vanishes with the block."""
    if name is not None:
        yield numbered(Path(name).expanduser(), num_runs)
        return
    with tempfile.TemporaryDirectory(prefix="tailrace-rows-") as folder:
        yield numbered(Path(folder) / "rows.jsonl.gz", num_runs)


def numbered(path: Path, num_runs: int) -> list[Path]:
    """`run.jsonl.gz` -> `run-1.jsonl.gz`, ... of several."""
    if num_runs == 1:
        return [path]
    stem, dot, ends = path.name.partition(".")
    return [path.with_name(f"{stem}-{number}{dot}{ends}") for number in range(1, num_runs + 1)]


def check_rows_name(name: str) -> None:
    """Raises ConfigError for a name that `tailrace report` would not take for rows later."""
    if not name.endswith((".jsonl", ".jsonl.gz")):
        raise ConfigError(f"--rows {name}: end the name in .jsonl.gz (compressed) or .jsonl", param="rows")
