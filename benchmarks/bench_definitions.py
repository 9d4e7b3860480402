"""One stream, three load generators: what each reports of the same instants, and the formula that explains it.

A server with known instants (`tests/golden/pacing_server.py`) answers tailrace's senders, `vllm bench serve` and
guidellm alike: a role chunk at 2 ms, the first three tokens at 20 ms, then chunks of 2, 1 and 4 tokens every 10 ms,
the finish reason 30 ms after the last token. For each tool the server's log gives the true figures of the very
requests it sent, and what the tool's own formula makes of them; what is left is delay, of the tool and of this machine.

`--page` writes the table of the kept result (`benchmarks/results/definitions.json`) into docs/definitions_compared.md.
A tool that is not in `.peers/` (`make peers`) is reported as absent.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from common import arguments, report, say, target
from engines import prepared_model

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "golden"))

from paced_run import PacingServer, ServedRequest, pacing_server  # noqa: E402

VLLM = ROOT / ".peers" / "vllm" / "bin" / "python"
GUIDELLM = ROOT / ".peers" / "guidellm" / "bin" / "guidellm"
PAGE = ROOT / "docs" / "definitions_compared.md"
RESULT = ROOT / "benchmarks" / "results" / "definitions.json"
PEER_S_MAX = 900
SCRIPT: dict[str, Any] = {
    "role_ms": 2, "first_ms": 20, "first_tokens": 3, "tokens": [2, 1, 4], "gaps_ms": [10], "tail_ms": 30,
}  # fmt: skip
METRICS = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
Figures = dict[str, float]
# The command of vLLM's console script asks for a distribution named `vllm`, which the CPU build is not.
_VLLM_MAIN = (
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "parser = FlexibleArgumentParser(); add_cli_args(parser); main(parser.parse_args())\n"
)


def main() -> None:
    if sys.argv[1:] == ["--page"]:
        write_page(json.loads(RESULT.read_text(encoding="utf-8"))["results"])
        return
    options = arguments(
        __doc__.splitlines()[0],
        requests=(int, 100, "of each tool"),
        rate=(float, 4.0, "requests a second"),
        output_tokens=(int, 24, "tokens of each answer"),
    )
    num, rate = (6, 20.0) if options.quick else (options.requests, options.rate)
    tools: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="tailrace-definitions-") as folder, pacing_server() as server:
        tokenizer = tokenizer_folder(options.model, Path(folder) / "tokenizer")
        run = Run(server, Path(folder), tokenizer, num, rate, options.output_tokens)
        for name, measure, formulas in TOOLS:
            # Importing a peer takes longer than everything else of a quick run.
            reported = None if options.quick and name != "tailrace" else measure(run)
            tools[name] = {"absent": True} if reported is None else compared(reported, run.log(), formulas)
            say(f"{name}: {tools[name]}")
    ours = tools["tailrace"]
    report(
        "definitions",
        parameters={"script": SCRIPT, "num_requests": num, "rate_per_s": rate, "num_output_tokens": run.num_tokens},
        results={"tools": tools},
        targets=[
            target("tailrace tpot mean: reported - true, ms", abs(ours["difference"]["tpot_ms"]), at_most=0.2),
            target("tailrace itl mean: reported - true, ms", abs(ours["difference"]["itl_ms"]), at_most=0.2),
            target("tailrace requests counted - sent", abs(ours["reported"]["num_requests"] - num), at_most=0),
        ],
    )


class Run:
    """What every tool is told, and the log of what it sent."""

    def __init__(
        self, server: PacingServer, folder: Path, tokenizer: Path, num: int, rate: float, num_tokens: int
    ) -> None:
        self.server, self.folder, self.tokenizer = server, folder, tokenizer
        self.num, self.rate, self.num_tokens = num, rate, num_tokens

    def log(self) -> list[ServedRequest]:
        """Of the measured requests: tools may send one to try the address, before."""
        return [each for each in self.server.log() if each.stream and each.done_ns is not None][-self.num :]


def measure_tailrace(run: Run) -> Figures:
    done = run.server.run(
        SCRIPT,
        num_requests=run.num,
        arrivals=f"constant:{run.rate:g}",
        num_output_tokens=run.num_tokens,
        chunk_usage=True,
    )
    metrics, rates = done.report.metrics, done.report.rates
    means = {name: metrics[name].mean_ms for name in METRICS}
    assert all(mean is not None for mean in means.values()), "every request ended well"
    return {name: float(mean or 0) for name, mean in means.items()} | {
        "output_tokens_per_s": float(rates.output_tokens_per_s or 0),
        "num_requests": done.report.num_requests,
    }


def measure_vllm(run: Run) -> Figures | None:
    if not VLLM.exists():
        return None
    run.server.set_script(SCRIPT)
    command = [str(VLLM), "-c", _VLLM_MAIN, "--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
    command += ["--base-url", run.server.url, "--model", "paced", "--tokenizer", str(run.tokenizer)]
    command += ["--dataset-name", "random", "--random-input-len", "16"]
    command += ["--random-output-len", str(run.num_tokens), "--num-prompts", str(run.num), "--ignore-eos"]
    command += ["--request-rate", str(run.rate), "--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result"]
    run_peer([*command, "--result-dir", str(run.folder), "--result-filename", "vllm.json"], run.folder)
    found = json.loads((run.folder / "vllm.json").read_text())
    return {
        "ttft_ms": found["mean_ttft_ms"],
        "tpot_ms": found["mean_tpot_ms"],
        "itl_ms": found["mean_itl_ms"],
        "e2e_ms": found["mean_e2el_ms"],
        "output_tokens_per_s": found["output_throughput"],
        "num_requests": found["completed"],
    }


def measure_guidellm(run: Run) -> Figures | None:
    if not GUIDELLM.exists():
        return None
    run.server.set_script(SCRIPT)
    output = run.folder / "guidellm.json"
    command = [str(GUIDELLM), "run", "--disable-console-interactive", "--output", f"kind=json,path={output}"]
    command += ["--backend", f"kind=openai_http,target={run.server.url},model=paced"]
    command += ["--profile", f"kind=constant,rate={run.rate:g}", "--constraint", f"kind=max_requests,count={run.num}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={run.tokenizer}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens=16,output_tokens={run.num_tokens}"]
    run_peer(command, run.folder)
    metrics = json.loads(output.read_text())["benchmarks"][0]["metrics"]

    def mean(name: str) -> float:
        return float(metrics[name]["successful"]["mean"])

    return {
        "ttft_ms": mean("time_to_first_token_ms"),
        "tpot_ms": mean("time_per_output_token_ms"),
        "itl_ms": mean("inter_token_latency_ms"),
        "e2e_ms": 1000 * mean("request_latency"),
        "output_tokens_per_s": mean("output_tokens_per_second"),
        "num_requests": metrics["request_latency"]["successful"]["count"],
    }


def run_peer(command: list[str], folder: Path) -> None:
    """Raises RuntimeError with the end of the peer's own output."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, timeout=PEER_S_MAX, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed: {done.stdout[-2000:].decode('utf-8', 'replace')}")


def tokenizer_folder(model: str, folder: Path) -> Path:
    """The model's tokenizer as a directory that the peers load without a network."""
    folder.mkdir()
    prepared = prepared_model(model).directory
    shutil.copy(prepared / "tokenizer.json", folder)
    shutil.copy(prepared / "chat_template.jinja", folder)
    settings = json.loads((prepared / "tokenizer_config.json").read_text()) | {"model_max_length": 8192}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 49152}')
    return folder


# What is true of a request, and what each tool's formula makes of the same instants. ms, from the request's arrival
# at the server; `texts` are the chunks with tokens, `chunks` all with a choice (role, empty and finish too).


def true_figures(request: ServedRequest) -> Figures:
    """By docs/measurement.md."""
    at, tokens = instants(request, only_texts=True), [chunk.tokens for chunk in request.texts]
    after_first = sum(tokens) - tokens[0]
    return {
        "ttft_ms": at[0],
        "tpot_ms": (at[-1] - at[0]) / after_first,
        # Chunk i gives k samples of gap / k: their mean is TPOT's within one request.
        "itl_ms": (at[-1] - at[0]) / after_first,
        "e2e_ms": at[-1],
    }


def vllm_figures(request: ServedRequest) -> Figures:
    """vLLM 0.32.0, benchmarks/lib/endpoint_request_func.py `async_request_openai_chat_completions` and
    benchmarks/serve.py `calculate_metrics`."""
    at, num = instants(request, only_texts=False), sum(chunk.tokens for chunk in request.texts)
    return {
        "ttft_ms": at[0],
        "tpot_ms": (at[-1] - at[0]) / (num - 1),
        "itl_ms": fmean(after - before for before, after in pairwise(at)),
        "e2e_ms": at[-1],
    }


def guidellm_figures(request: ServedRequest) -> Figures:
    """guidellm 0.8.1, schemas/base/request_stats.py `GenerativeRequestStats`; backends/openai/http.py."""
    at, num = instants(request, only_texts=True), sum(chunk.tokens for chunk in request.texts)
    assert request.done_ns is not None
    return {
        "ttft_ms": at[0],
        "tpot_ms": at[-1] / num,
        "itl_ms": (at[-1] - at[0]) / (num - 1),
        "e2e_ms": (request.done_ns - request.read_ns) / 1e6,
    }


def instants(request: ServedRequest, *, only_texts: bool) -> list[float]:
    chunks = request.texts if only_texts else request.chunks
    return [(chunk.before_ns - request.read_ns) / 1e6 for chunk in chunks]


Formulas = Callable[[ServedRequest], Figures]
TOOLS: tuple[tuple[str, Callable[[Run], Figures | None], Formulas], ...] = (
    ("tailrace", measure_tailrace, true_figures),
    ("vllm bench serve", measure_vllm, vllm_figures),
    ("guidellm", measure_guidellm, guidellm_figures),
)


def compared(reported: Figures, log: list[ServedRequest], formulas: Formulas) -> dict[str, Any]:
    """Means over the requests: reported, true, what the tool's formula gives, and what neither explains."""
    true, explained = (
        {name: fmean(figures(each)[name] for each in log) for name in METRICS} for figures in (true_figures, formulas)
    )
    span_s = (max(each.chunks[-1].before_ns for each in log) - min(each.read_ns for each in log)) / 1e9
    true["output_tokens_per_s"] = sum(chunk.tokens for each in log for chunk in each.texts) / span_s
    return {
        "absent": False,
        "reported": rounded(reported),
        "true": rounded(true),
        "by_its_formula": rounded(explained),
        "difference": rounded({name: reported[name] - true[name] for name in METRICS}),
        "left_unexplained": rounded({name: reported[name] - explained[name] for name in METRICS}),
        "num_requests_seen_by_server": len(log),
    }


def rounded(figures: Figures) -> Figures:
    return {name: round(value, 3) for name, value in figures.items()}


# The page

_LABELS = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2e_ms": "E2E"}
_BEGIN, _END = "<!-- table:begin -->", "<!-- table:end -->"


def write_page(results: dict[str, Any]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    PAGE.write_text(f"{before}{_BEGIN}\n{table(results)}\n{_END}{after}", encoding="utf-8")


def table(results: dict[str, Any]) -> str:
    """One row a metric and tool, ms."""
    lines = ["| mean, ms | tool | reported | true | its formula gives | left |", "|---|---|---|---|---|---|"]
    for metric, label in _LABELS.items():
        for tool, row in results["tools"].items():
            if row["absent"]:
                lines.append(f"| {label} | {tool} | not installed | | | |")
                continue
            cells = [row[part][metric] for part in ("reported", "true", "by_its_formula", "left_unexplained")]
            lines.append(f"| {label} | {tool} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
