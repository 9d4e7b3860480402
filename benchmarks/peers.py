"""The same weights served by tailrace, vLLM and llama-server, measured through HTTP by `tailrace bench`, in turns.

    python scripts/peers.py                        installs them
    python benchmarks/peers.py --row single        one row; one JSON object a row on standard output
    make bench-peers                               every row, into benchmarks/results/peers_ROW.json

One service computes at a time: the others are stopped (SIGSTOP), so that a round can go through all of them without
starting any again. Rounds are in random order; a row's figure is the median over rounds, its spread lowest to highest.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from common import report, say, target
from peer_engines import MODEL, ROOT, Engine, Running, llama_server, running, tailrace, vllm
from peer_rates import highest_rate
from servers import TAILRACE

SLO = "ttft_ms_p99<=500, tpot_ms_p99<=60"
BENCH_S_MAX = 3600
SEED = 20261130

Report = dict[str, Any]


class Row(NamedTuple):
    """One line of the table: a workload, and the figure that is compared."""

    title: str
    workload: str
    arrivals: str
    num_requests: int
    warmup_s: float
    figure: str
    unit: str
    read: Callable[[Report], float]
    lower_is_better: bool
    limits: dict[str, float]
    """Engine -> target for ours / theirs: at most where lower is better, else at least."""


def quantile_ms(metric: str, name: str) -> Callable[[Report], float]:
    return lambda report: float(report["metrics"][metric]["percentiles"][name])


def output_tokens_per_s(report: Report) -> float:
    return float(report["rates"]["output_tokens_per_s"])


ROWS: dict[str, Row] = {
    "single": Row(
        "one stream, 256 in / 128 out", "single-256-128", "closed:1", 6, 0,
        "TPOT p50", "ms", quantile_ms("tpot_ms", "p50"), True, {"vllm": 0.5, "llama": 1.0},
    ),
    "prompt": Row(
        "one prompt of 2,048 tokens", "prompt-2048", "closed:1", 3, 0,
        "TTFT p50", "ms", quantile_ms("ttft_ms", "p50"), True, {"vllm": 0.85, "llama": 0.5},
    ),
    "shared": Row(
        "64 clients, 900 shared + 60 own in / 48 out", "shared-900-60-48", "closed:64", 256, 30,
        "output tokens/s", "tokens/s", output_tokens_per_s, False, {"vllm": 1.3, "llama": 2.5},
    ),
    "own": Row(
        "64 clients, 1,000 own in / 64 out", "own-1000-64", "closed:64", 128, 60,
        "output tokens/s", "tokens/s", output_tokens_per_s, False, {"vllm": 1.1, "llama": 2.2},
    ),
    "decode": Row(
        "64 clients, 128 in / 512 out", "own-128-512", "closed:64", 128, 60,
        "output tokens/s", "tokens/s", output_tokens_per_s, False, {"vllm": 1.15, "llama": 1.8},
    ),
    "mixed": Row(
        "long and short prompts mixed", "mixed-long-short", "closed:8", 96, 20,
        "ITL p99", "ms", quantile_ms("itl_ms", "p99"), True, {},
    ),
}  # fmt: skip


SOLO_ROWS = ("single", "prompt")
"""One request at a time: services are started for that, not for 64."""
LAUNCH_LIMITS = {"vllm": 0.1}
OPEN_LIMITS = {"vllm": 1.3, "llama": 2.5}
OPEN_WORKLOAD = "shared-900-60-48"


def engines(row: str) -> list[Engine]:
    """What is compared in a row; of llama-server several settings, the best of which counts."""
    kv = ("--kv-memory", "2GiB")
    ours = [tailrace("tailrace", *kv)]
    if row == "mixed":
        ours.append(tailrace("tailrace-itl", *kv, "--itl-target-ms", "60"))
    slots: tuple[str, ...]
    if row in (*SOLO_ROWS, "launch"):
        slots = ("--parallel", "1", "--ctx-size", "4096")
    else:
        slots = ("--parallel", "64", "--kv-unified", "--ctx-size", "98304")
    theirs = [llama_server(f"llama-{file}", file, *slots) for file in ("q8_0", "q4_1")]
    # `auto` is bf16, which a CPU without bf16 instructions computes piece by piece.
    return [*ours, vllm("vllm-auto", "auto"), vllm("vllm-f32", "float32"), *theirs]


def tailrace_json(arguments: list[str]) -> Any:
    """What one call of `tailrace` prints with `--json`. Raises RuntimeError with its message when it fails."""
    command = [TAILRACE, *arguments, "--json"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=BENCH_S_MAX, check=False)
    if done.returncode != 0:
        raise RuntimeError((done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1])
    return json.loads(done.stdout)


def bench(url: str, workload: str, arrivals: str, num_requests: int, warmup_s: float, seed: int) -> Report:
    """One run of `tailrace bench`."""
    arguments = ["bench", url, "--model", MODEL, "--api", "completions", "--workload", workload, "--slo", SLO]
    arguments += ["--arrivals", arrivals, "--requests", str(num_requests), "--warmup", str(warmup_s)]
    return tailrace_json([*arguments, "--seed", str(seed), "--timeout", "1200"])["reports"][0]  # type: ignore[no-any-return]


def in_turns(services: list[Running], rounds: int, act: Callable[[Running, int], None]) -> None:
    """Every service in every round, in random order, alone: the others are stopped."""
    order = random.Random(SEED)
    for number in range(rounds):
        for service in order.sample(services, len(services)):
            service.resume()
            started = time.monotonic()
            try:
                act(service, number)
            finally:
                service.pause()
            say(f"round {number + 1}: {service.engine.name} took {time.monotonic() - started:.0f} s")


def measure_row(row: Row, services: list[Running], rounds: int, num_requests: int, warmup_s: float) -> dict[str, Any]:
    """Figures by engine, one a round."""
    values: dict[str, list[float]] = {each.engine.name: [] for each in services}
    reports: dict[str, list[Report]] = {each.engine.name: [] for each in services}

    def act(service: Running, number: int) -> None:
        name = service.engine.name
        result = bench(service.url, row.workload, row.arrivals, num_requests, warmup_s, SEED + number)
        values[name].append(row.read(result))
        reports[name].append(result)
        say(f"{name}: {values[name][-1]:.4g} {row.unit}")

    in_turns(services, rounds, act)
    return {name: _engine_result(values[name], reports[name]) for name in values}


def measure_open(services: list[Running], num_screen: int, num_confirm: int) -> dict[str, Any]:
    """The highest rate of each service."""
    results: dict[str, Any] = {}

    def act(service: Running, number: int) -> None:
        def run(rate: float, num: int) -> Report:
            return bench(service.url, OPEN_WORKLOAD, f"poisson:{rate:g}", num, 10.0, SEED + number)

        found = highest_rate(run, num_screen, num_confirm)
        results[service.engine.name] = {"median": found["rate_per_s"], **found}

    in_turns(services, 1, act)
    return results


def measure_launch(chosen: list[Engine], rounds: int) -> dict[str, Any]:
    """Launch to first token of each service, cold but for the page cache."""
    results = {}
    for engine in chosen:
        environment = [f"{name}={value}" for name, value in engine.environment.items()]
        options = ["--repeats", str(rounds), "--timeout", "900", "--ready-path", "/health", "--api", "completions"]
        result = tailrace_json(
            ["coldstart", *options, "--model", MODEL, "--", "env", *environment, *engine.command("{port}")]
        )
        spread = result["since_exec"]["first_token"]
        results[engine.name] = {"median": round(spread["median_ms"], 1), "since_exec": result["since_exec"]}
        say(f"{engine.name}: {results[engine.name]['median']:.0f} ms")
    return results


def _engine_result(values: list[float], reports: list[Report]) -> dict[str, Any]:
    last = reports[-1]
    return {
        "median": round(median(values), 4),
        "lowest": round(min(values), 4),
        "highest": round(max(values), 4),
        "rounds": [round(each, 4) for each in values],
        "outcomes": last["outcomes"],
        "verdicts": {name: each["state"] for name, each in last["verdicts"].items()},
        "prompt_tokens_mean": last["lengths"]["prompt"]["mean"],
        "output_tokens_mean": last["lengths"]["output"]["mean"],
        "percentiles": {
            name: last["metrics"][name]["percentiles"] for name in ("ttft_ms", "tpot_ms", "itl_ms", "stall_ms")
        },
        "output_tokens_per_s": last["rates"]["output_tokens_per_s"],
        "cached_tokens": last["cache"]["num_cached_tokens"],
        "client": last["info"]["client"],
    }


def targets(title: str, limits: dict[str, float], lower_is_better: bool, results: dict[str, Any]) -> list[Any]:
    """Ours / theirs; of several settings of one engine the best counts."""
    made = []
    ours = results.get("tailrace", {}).get("median")
    for peer, limit in limits.items():
        theirs = [each["median"] for name, each in results.items() if name.startswith(peer) and each["median"]]
        if not theirs or not ours:
            continue
        best = min(theirs) if lower_is_better else max(theirs)
        bound = {"at_most": limit} if lower_is_better else {"at_least": limit}
        made.append(target(f"{title}, tailrace / {peer}", ours / best, **bound))
    return made


def _command_text(engine: Engine) -> str:
    """As a reader would type it, from the folder of the repository."""
    return " ".join(engine.command("PORT")).replace(f"{ROOT}/", "")


@contextmanager
def _started(chosen: list[Engine]) -> Iterator[list[Running]]:
    """All services, ready and stopped."""
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
        services = []
        for engine in chosen:
            services.append(stack.enter_context(running(engine, logs / f"{engine.name}.log")))
            services[-1].pause()
            say(f"{engine.name}: ready after {services[-1].ready_s:.1f} s")
        yield services


class Measured(NamedTuple):
    parameters: dict[str, Any]
    results: dict[str, Any]
    targets: list[Any]


def launch_row(chosen: list[Engine], rounds: int) -> Measured:
    results = measure_launch(chosen, rounds)
    parameters: dict[str, Any] = {"row": "launch to first token, model on disk", "unit": "ms", "rounds": rounds}
    return Measured(parameters, results, targets("launch to first token", LAUNCH_LIMITS, True, results))


def open_row(services: list[Running], quick: bool) -> Measured:
    screen, confirm = (4, 8) if quick else (150, 1000)
    results = measure_open(services, screen, confirm)
    parameters: dict[str, Any] = {"row": "900 shared + 60 own in / 48 out, open loop", "unit": "requests/s", "slo": SLO}
    parameters |= {"workload": OPEN_WORKLOAD, "screen_requests": screen, "requests": confirm}
    return Measured(parameters, results, targets("highest rate within the SLO", OPEN_LIMITS, False, results))


def closed_row(row: Row, services: list[Running], quick: bool, rounds: int) -> Measured:
    num, warmup_s, rounds = (2, 0.0, 1) if quick else (row.num_requests, row.warmup_s, rounds)
    results = measure_row(row, services, rounds, num, warmup_s)
    parameters: dict[str, Any] = {"row": row.title, "unit": row.unit, "figure": row.figure, "workload": row.workload}
    parameters |= {"arrivals": row.arrivals, "requests": num, "warmup_s": warmup_s, "rounds": rounds}
    made = targets(f"{row.title}: {row.figure}", row.limits, row.lower_is_better, results)
    return Measured(parameters, results, made)


def run_rows(names: list[str], options: argparse.Namespace) -> None:
    """Rows that the same services can answer, one after the other: vLLM takes minutes to start."""
    wanted = {each.name: each for name in names for each in engines(name)}
    kept = [each for each in wanted.values() if options.only is None or each.name in options.only]
    chosen = [each for each in kept if each.installed()]
    absent = [each.name for each in kept if each not in chosen]
    if absent:
        say(f"not installed: {', '.join(absent)}; `make peers` installs them")
    for engine in chosen:
        engine.prepare()

    def tell(name: str, row: Measured) -> None:
        commands = {each.name: _command_text(each) for each in chosen if each.name in row.results}
        parameters = row.parameters | {"absent": absent, "commands": commands}
        report(f"peers_{name}", parameters=parameters, results=row.results, targets=row.targets)

    if names == ["launch"]:
        tell("launch", launch_row(chosen, 1 if options.quick else options.rounds))
        return
    with _started(chosen) as services:
        for name in names:
            own = {each.name for each in engines(name)}
            able = [each for each in services if each.engine.name in own]
            if name == "open":
                tell(name, open_row(able, options.quick))
            else:
                tell(name, closed_row(ROWS[name], able, options.quick, options.rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", choices=[*ROWS, "launch", "open"], action="append", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", help="names of engines, instead of all that are installed")
    parser.add_argument("--quick", action="store_true", help="few requests, to see that it runs")
    options = parser.parse_args()
    # SIGTERM unwinds as Ctrl-C does, so that the services end too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for group in (SOLO_ROWS, tuple(name for name in (*ROWS, "open") if name not in SOLO_ROWS), ("launch",)):
        names = [name for name in group if name in options.row]
        if names:
            run_rows(names, options)


if __name__ == "__main__":
    main()
