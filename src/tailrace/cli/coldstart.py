"""`tailrace coldstart`: how long a server takes from its start to its first token."""

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from tailrace.cli import options

if TYPE_CHECKING:
    from tailrace.workload.cold.coldstart import ColdstartJob, ColdstartResult

EPILOG = """\b
Examples:
  tailrace coldstart -- tailrace serve smollm2 --port {port}
  tailrace coldstart --repeats 5 --json -- llama-server -m model.gguf --port {port}
  tailrace coldstart --port 8000 --ready-path /health -- ./start.sh"""

_COMMAND: Any = typer.Argument(metavar="-- COMMAND...", help="How to start it; {port} becomes a free port.")


def coldstart(
    command: list[str] = _COMMAND,
    repeats: int = typer.Option(3, "--repeats", min=1, max=100, help="Launches."),
    url: str | None = typer.Option(None, "--url", help="Where it will listen, when that is fixed."),
    port: int | None = typer.Option(None, "--port", "-p", min=1, max=65535, help="The same, on 127.0.0.1."),
    timeout: float = typer.Option(300.0, "--timeout", min=0.1, help="Seconds for one launch, to its first answer."),
    grace: float = typer.Option(10.0, "--grace", min=0.0, help="Seconds between SIGTERM and SIGKILL."),
    ready_path: str = typer.Option("/v1/models", "--ready-path", help="It is ready when this answers 200."),
    api: str = typer.Option("chat", "--api", metavar="chat|completions", help="Route of the first request."),
    model: str | None = typer.Option(None, "--model", help="Asked for.  [default: the first that it lists]"),
    prompt: str = typer.Option("Say hello.", "--prompt", help="Of the first request."),
    max_tokens: int = typer.Option(1, "--max-tokens", "-n", min=1, help="Of the first request."),
    api_key: str | None = typer.Option(None, "--api-key", help="Sent as bearer token."),
    as_json: bool = options.JSON,
    out: str | None = typer.Option(None, "--out", metavar="FILE", help="Write the JSON to a file."),
) -> None:
    """Start a server and time it to its first token, by phase. The page cache stays warm: files are not read anew."""
    from tailrace.cli.bench_result import check_writable, write_file
    from tailrace.cli.output import note, print_json
    from tailrace.workload.cold.coldstart import ColdstartJob, parse_url

    if url is not None and port is not None:
        raise typer.BadParameter("one of --url and --port")
    if api not in ("chat", "completions"):
        raise typer.BadParameter("chat or completions", param_hint="--api")
    if not ready_path.startswith("/"):
        raise typer.BadParameter("a path begins with /", param_hint="--ready-path")
    if out is not None:
        check_writable(out)
    host, base_path = "127.0.0.1", ""
    if url is not None:
        host, port, base_path = parse_url(url)
    job = ColdstartJob(
        command=tuple(command),
        host=host,
        port=port,
        base_path=base_path,
        repeats=repeats,
        timeout_s=timeout,
        grace_s=grace,
        ready_path=ready_path,
        api=api,
        model=model,
        prompt=prompt,
        max_tokens=max_tokens,
        api_key=api_key,
    )
    result = _measure(job)
    if out is not None:
        write_file(out, msgspec.json.format(msgspec.json.encode(result), indent=1))
    if as_json:
        print_json(result)
    else:
        print(coldstart_text(result), flush=True)
        _say_how(result)
    if out is not None:
        note(f"JSON: {out}")


def _say_how(result: "ColdstartResult") -> None:
    from tailrace.cli.output import note

    note(f"found by polling every {result.quantum_ms:g} ms; the page cache was warm; model {result.model}")


def _measure(job: "ColdstartJob") -> "ColdstartResult":
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure_until_told(job))


async def _measure_until_told(job: "ColdstartJob") -> "ColdstartResult":
    """SIGTERM and SIGHUP end the command as Ctrl-C does: nobody else would."""
    from tailrace.cli.output import note
    from tailrace.workload.cold.coldstart import Coldstart, Watch, measure_coldstart

    def on_start(number: int) -> None:
        note(f"launch {number} of {job.repeats}")

    def on_launch(number: int, launch: Coldstart) -> None:
        note(f"launch {number} of {job.repeats}: first token after {launch.first_token_ms:,.0f} ms")

    def on_log(text: str) -> None:
        note(f"last output of the command:\n{text}" if text else "the command wrote nothing")

    task = asyncio.current_task()
    assert task is not None
    told: list[int] = []

    def tell(number: int) -> None:
        told.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, tell, number)
    with contextlib.suppress(asyncio.CancelledError):
        return await measure_coldstart(job, Watch(on_start=on_start, on_launch=on_launch, on_log=on_log))
    # Cancelled: by one of these signals, or by Ctrl-C, which the runner turns into KeyboardInterrupt.
    if told:
        raise SystemExit(128 + told[0])
    raise asyncio.CancelledError


def coldstart_text(result: "ColdstartResult") -> str:
    """Two tables: since the start, and phase by phase."""
    from tailrace.cli.output import table

    def rows(names: dict[str, str], spreads: dict[str, Any]) -> list[list[str]]:
        return [
            [label, *(f"{value:,.0f}" for value in (spreads[n].median_ms, spreads[n].min_ms, spreads[n].max_ms))]
            for n, label in names.items()
        ]

    header = ["median ms", "min", "max"]
    right = frozenset({1, 2, 3})
    since = table(["since start", *header], rows(_INSTANTS, result.since_exec), right)
    phases = table(["phase", *header], rows(_PHASES, result.phases), right)
    num = len(result.launches)
    return f"{since}\n\n{phases}\n\n{num} launch{'es' if num > 1 else ''}"


_INSTANTS = {"port_open": "port open", "ready": "ready", "first_token": "first token", "answered": "first answer whole"}
_PHASES = {
    "exec_to_port": "start to port open",
    "port_to_ready": "port open to ready",
    "ready_to_first_token": "ready to first token",
    "first_token_to_answered": "first token to whole answer",
}
