"""What every benchmark shares: what machine this is, how a figure is summarised, how one request is timed.

A benchmark prints exactly one JSON object on standard output (`report`) and talks on standard error.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence as Seq
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import msgspec
import numpy as np

from tailrace.request import FinishReason, RequestId, SamplingParams
from tailrace.worker.channel import Submit
from tailrace.worker.engine_client import EngineClient

NS_PER_MS = 1_000_000
NORMAL_ENDS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED)


def arguments(description: str, **extra: tuple[type, object, str]) -> argparse.Namespace:
    """`--model`, `--quick` (tiny inputs: the figures mean nothing), and `extra`: name -> (type, default, help)."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="packaged name, GGUF file or IR directory")
    parser.add_argument("--quick", action="store_true", help="tiny inputs, to see that it runs")
    for name, (kind, default, text) in extra.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=text)
    return parser.parse_args()


def machine() -> dict[str, object]:
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    fields = dict(line.split(":", 1) for line in cpuinfo.split("\n\n")[0].splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    flags = set(fields.get("flags", "").split())
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16")
    return {
        "cpu": fields.get("model name", platform.processor()),
        "cpu_family_model": f"{fields.get('cpu family')}/{fields.get('model')}",
        "isa": [flag for flag in wanted if flag in flags],
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def report(name: str, *, parameters: object, results: object, targets: Seq[dict[str, object]] = ()) -> None:
    """Prints the one JSON object. A target is {"name", "value", "limit", "met"}."""
    packages = {each: version(each) for each in ("tailrace", "openvino", "openvino-genai", "numpy")}
    document = {
        "benchmark": name,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "packages": packages,
        "commit": _commit(),
        "command": " ".join(["python", _relative(sys.argv[0]), *sys.argv[1:]]),
        "parameters": parameters,
        "targets": list(targets),
        "results": results,
    }
    print(json.dumps(msgspec.to_builtins(document), indent=2))


def target(
    name: str, value: float, *, at_most: float | None = None, at_least: float | None = None
) -> dict[str, object]:
    """One row of the table of targets, with its verdict."""
    met = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
    return {"name": name, "value": round(value, 4), "at_most": at_most, "at_least": at_least, "met": bool(met)}


def summary(values: Seq[float]) -> dict[str, float]:
    """Nearest-rank percentiles: no value that was not measured."""
    ranked = np.sort(np.asarray(values, dtype=np.float64))
    picked = {f"p{p}": ranked[max(int(np.ceil(p / 100 * len(ranked))) - 1, 0)] for p in (5, 50, 95, 99)}
    rounded = {"n": len(ranked), "min": ranked[0], **picked, "max": ranked[-1], "mean": ranked.mean()}
    return {key: round(float(value), 4) for key, value in rounded.items()}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _relative(script: str) -> str:
    """From the folder of the repository, wherever that lies."""
    return os.path.relpath(Path(script).resolve(), Path(__file__).resolve().parents[1])


def _commit() -> str:
    root = Path(__file__).resolve().parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


class Timeline(msgspec.Struct, kw_only=True):
    """One request as its reader saw it; monotonic ns."""

    sent_ns: int
    token_ns: list[int] = []
    """Arrival of each output token."""
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None

    @property
    def ttft_ms(self) -> float:
        return (self.token_ns[0] - self.sent_ns) / NS_PER_MS

    def gaps_ms(self, after_ns: int = 0, before_ns: int = 1 << 62) -> list[float]:
        """Inter-token gaps that overlap the span given."""
        pairs = zip(self.token_ns, self.token_ns[1:], strict=False)
        return [(b - a) / NS_PER_MS for a, b in pairs if b >= after_ns and a <= before_ns]


async def run_request(
    engine: EngineClient,
    name: str,
    prompt_token_ids: list[int],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Timeline:
    """Submits one sequence and reads it to its end; raises RuntimeError when it fails (a cancel is no failure)."""
    sent_ns = time.monotonic_ns()
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, ignore_eos=True)
    stream = engine.submit(
        Submit(
            request_id=RequestId(name),
            sequence_ids=engine.new_sequence_ids(1),
            prompt_token_ids=prompt_token_ids,
            params=params,
            arrival_ns=sent_ns,
        )
    )
    timeline = Timeline(sent_ns=sent_ns)
    async for events in stream:
        now_ns = time.monotonic_ns()
        for event in events:
            timeline.token_ns.extend([now_ns] * len(event.token_ids))
            timeline.num_cached_tokens = event.num_cached_tokens or timeline.num_cached_tokens
            if event.finish_reason is not None:
                timeline.finish_reason = event.finish_reason
                if event.finish_reason not in NORMAL_ENDS:
                    raise RuntimeError(f"{name} ended with {event.error_label}: {event.error_message}")
    return timeline


def random_prompt(rng: np.random.Generator, num_tokens: int) -> list[int]:
    """Ordinary tokens of a vocabulary of 49,152 (no control tokens)."""
    return [int(each) for each in rng.integers(100, 40_000, num_tokens)]
