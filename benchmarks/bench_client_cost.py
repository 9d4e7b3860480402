"""What a streamed chunk costs the client: tailrace, guidellm and aiperf against the same null server, in turns.

256 streams, 10 ms pacing. Cost is the processor time (user and system) of the client's whole process tree, reports
included, as the slope between a short and a long run: starting a client and loading its libraries is in neither. The
server counts the chunks. Then the highest rate at which one tailrace sender keeps its send lag p99 within 5 ms, and
beside it the requests a second that each client completes with 256 callers and answers of one token.
A peer that is not installed (`python scripts/peers.py`) is reported as absent. Prints one JSON object.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from common import arguments, report, say, summary, target
from load import PROMPT_TOKENS, null_server, send, send_lags_ms, workload_toml
from servers import TAILRACE
from tailrace.workload.run.null_server import MODEL

PEERS = Path(__file__).resolve().parent.parent / ".peers"
STREAMS = 256
OUTPUT_TOKENS = 200
RATES = (200, 400, 800, 1_200, 1_600, 2_400, 3_200, 4_800, 6_400)
SEND_LAG_MS_MAX = 5.0
GUIDELLM_REQUESTS_PER_S = 362.0
"""Of guidellm 0.8.1 on two cores, with its own warning that the client was the bottleneck; where it runs here, its
own figure stands beside this one."""
_RUN_S_MAX = 900.0

# A process that adopts what its descendants leave behind, so that no processor time is lost with them, and ends its
# whole group with its parent.
_COUNTING = """
import ctypes, json, os, resource, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
began = time.monotonic()
with open(sys.argv[1], "wb") as log:
    code = subprocess.call(sys.argv[2:], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({"code": code, "cpu_s": used.ru_utime + used.ru_stime, "wall_s": time.monotonic() - began}))
"""


class Run(NamedTuple):
    cpu_s: float
    wall_s: float
    num_streams: int
    num_chunks: int


Command = Callable[[str, Path, int, int], list[str]]
"""(address, scratch folder, requests, output tokens of each) -> what to run."""


def tailrace_command(url: str, folder: Path, num_requests: int, num_tokens: int) -> list[str]:
    workload = folder / "workload.toml"
    workload.write_text(workload_toml(num_tokens), encoding="utf-8")
    window = ["--arrivals", f"closed:{STREAMS}", "--requests", str(num_requests), "--warmup", "0"]
    output = ["--json", "--rows", str(folder / "rows.jsonl.gz")]
    return [TAILRACE, "bench", url, "--workload", str(workload), *window, "--senders", "1", "--no-calibrate", *output]


def guidellm_command(url: str, folder: Path, num_requests: int, num_tokens: int) -> list[str]:
    return [
        *(str(PEERS / "guidellm" / "bin" / "guidellm"), "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={url},model={MODEL}"),
        *("--profile", f"kind=concurrent,streams={STREAMS}", "--constraint", f"kind=max_requests,count={num_requests}"),
        *("--data", f"kind=json_file,path={_prompts(folder, num_requests, num_tokens)}"),
        *("--tokenizer", f"kind=hf_auto,model={_tokenizer(folder)}"),
        *("--output", f"kind=json,path={folder / 'guidellm.json'}"),
    ]


def aiperf_command(url: str, folder: Path, num_requests: int, num_tokens: int) -> list[str]:
    return [
        *(str(PEERS / "aiperf" / "bin" / "aiperf"), "profile", "--model", MODEL, "--url", url, "--ui", "none"),
        *("--endpoint-type", "chat", "--streaming", "--use-server-token-count"),
        *("--concurrency", str(STREAMS), "--request-count", str(num_requests)),
        *("--input-file", str(_prompts(folder, num_requests, num_tokens)), "--custom-dataset-type", "single_turn"),
        *("--tokenizer", str(_tokenizer(folder)), "--artifact-dir", str(folder / "aiperf")),
    ]


CLIENTS: dict[str, Command] = {
    "tailrace": tailrace_command,
    "guidellm": guidellm_command,
    "aiperf": aiperf_command,
}


def main() -> None:
    args = arguments(__doc__ or "", rounds=(int, 3, "rounds"), clients=(str, "", "which of them; all"))
    rounds, short, long = (1, STREAMS, 2 * STREAMS) if args.quick else (args.rounds, STREAMS, 6 * STREAMS)
    # Starting the peers alone takes minutes: a quick look leaves them out.
    names = args.clients or ("tailrace" if args.quick else ",".join(CLIENTS))
    wanted = {name: CLIENTS[name] for name in names.split(",")}
    present = {name: command for name, command in wanted.items() if name == "tailrace" or _path(name).exists()}
    results: dict[str, Any] = {name: "absent" for name in wanted if name not in present}
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in present}
    for number in range(rounds):
        order = list(present)
        random.Random(number).shuffle(order)
        for name in order:
            measured[name].append(one_round(present[name], short, long))
            say(f"round {number + 1} of {rounds}: {name}: {measured[name][-1]}")
    for name, rows in measured.items():
        results[name] = {key: summary([row[key] for row in rows]) for key in rows[0]} | {"rounds": rows}
    rates = rate_ladder(2.0 if args.quick else 10.0, RATES[:2] if args.quick else RATES)
    report(
        "client_cost",
        parameters={"streams": STREAMS, "pace_ms": 10, "output_tokens": OUTPUT_TOKENS, "requests": [short, long]},
        results=results | {"tailrace_rates": rates},
        targets=_targets(measured, max((row["rate_per_s"] for row in rates if row["kept"]), default=0.0)),
    )


def one_round(command: Command, short: int, long: int) -> dict[str, float]:
    """Slopes between a short and a long run, at 200 tokens an answer and at one."""
    a, b = (run(command, number, OUTPUT_TOKENS) for number in (short, long))
    many = 4 * (long - short)
    c, d = (run(command, number, 1) for number in (short, short + many))
    return {
        "cpu_us_per_chunk": (b.cpu_s - a.cpu_s) / (b.num_chunks - a.num_chunks) * 1e6,
        "cpu_us_per_request": (d.cpu_s - c.cpu_s) / (d.num_streams - c.num_streams) * 1e6,
        "requests_per_s": (d.num_streams - c.num_streams) / max(d.wall_s - c.wall_s, 1e-3),
        "chunks_per_s": (b.num_chunks - a.num_chunks) / max(b.wall_s - a.wall_s, 1e-3),
        "start_cpu_s": a.cpu_s,
    }


def run(command: Command, num_requests: int, num_tokens: int) -> Run:
    """One client to its end. Raises RuntimeError when it fails or sends less than it was asked to."""
    with tempfile.TemporaryDirectory() as scratch, null_server() as served:
        folder = Path(scratch)
        log = folder / "log"
        called = [sys.executable, "-c", _COUNTING, str(log), *command(served.url, folder, num_requests, num_tokens)]
        # guidellm would ask a hub for the tokenizer it has as a folder; aiperf, told to stay offline, refuses folders.
        environment = os.environ | ({"HF_HUB_OFFLINE": "1"} if "guidellm" in called[4] else {})
        with subprocess.Popen(called, stdout=subprocess.PIPE, env=environment, start_new_session=True) as child:
            try:
                printed, _ = child.communicate(timeout=_RUN_S_MAX)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, 9)
                raise
        counted = json.loads(printed)
        if counted["code"] != 0:
            tail = log.read_text(encoding="utf-8", errors="replace")[-2_000:]
            raise RuntimeError(f"{called[4]} ended with exit code {counted['code']}:\n{tail}")
    if served.num_streams < num_requests:
        raise RuntimeError(f"{called[4]} sent {served.num_streams} of {num_requests} requests")
    say(f"{Path(called[4]).name}: {num_requests} requests of {num_tokens} tokens: {counted}")
    return Run(counted["cpu_s"], counted["wall_s"], served.num_streams, served.num_chunks)


def rate_ladder(seconds: float, rates: tuple[int, ...]) -> list[dict[str, Any]]:
    """Rising rates until one is not kept twice."""
    rows: list[dict[str, Any]] = []
    with null_server() as served:
        for rate in rates:
            result, records = send(served.url, f"poisson:{rate}", num_output_tokens=1, duration_s=seconds, warmup_s=1.0)
            lags_ms = summary(send_lags_ms(records))
            num_ok = sum(record.outcome == "ok" for record in records)
            kept = lags_ms["p99"] <= SEND_LAG_MS_MAX and num_ok == len(records)
            cpu_ratio = result.finished[0].cpu_ratio
            rows.append({"rate_per_s": rate, "send_lag_ms": lags_ms, "cpu_ratio": cpu_ratio, "kept": kept})
            say(f"{rate} requests/s: send lag p99 {lags_ms['p99']:.3f} ms, processor {cpu_ratio:.2f}")
            if len(rows) >= 2 and not rows[-1]["kept"] and not rows[-2]["kept"]:
                break
    return rows


def _targets(measured: dict[str, list[dict[str, float]]], rate_per_s: float) -> list[dict[str, object]]:
    def middle(name: str, key: str) -> float:
        return median(row[key] for row in measured[name])

    found = [
        target(
            "requests/s kept at send lag p99 <= 5 ms by one sender", rate_per_s, at_least=4 * GUIDELLM_REQUESTS_PER_S
        )
    ]
    if "tailrace" not in measured:
        return found
    for name, times in (("guidellm", 4.0), ("aiperf", 1.5)):
        if name in measured:
            cost = middle(name, "cpu_us_per_chunk") / middle("tailrace", "cpu_us_per_chunk")
            rate = rate_per_s / middle(name, "requests_per_s")
            found.append(target(f"processor time a chunk: {name}'s / ours", cost, at_least=times))
            found.append(target(f"requests/s kept at send lag p99 <= 5 ms / {name}'s most", rate, at_least=times))
    return found


def _path(name: str) -> Path:
    return PEERS / name / "bin" / name


def _prompts(folder: Path, num_requests: int, num_tokens: int) -> Path:
    path = folder / "prompts.jsonl"
    with path.open("w", encoding="utf-8") as out:
        for number in range(num_requests):
            text = f"{number} " + "word " * PROMPT_TOKENS
            # Each peer has its own names for the same two columns.
            row = {"text": text, "output_length": num_tokens, "prompt": text, "output_tokens_count": num_tokens}
            out.write(json.dumps(row) + "\n")
    return path


def _tokenizer(folder: Path) -> Path:
    """Both peers want one; words of a list of two are the cheapest."""
    path = folder / "tokenizer"
    path.mkdir(exist_ok=True)
    model = {"type": "WordLevel", "vocab": {"[UNK]": 0, "word": 1}, "unk_token": "[UNK]"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "model_max_length": 100_000}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (path / "config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8")
    return path


if __name__ == "__main__":
    main()
