"""Runs every `benchmarks/bench_*.py` and keeps what it prints: one JSON object a result, in `benchmarks/results/`.

`--only SCRIPT`, first, runs that script alone; what else is given goes to the scripts.

A benchmark that fails does not stop the others; the exit status says whether all ran.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BENCHMARK_S_MAX = 4 * 3600
"""A row against the slowest peer takes hours on two cores."""


def run_one(script: Path, arguments: list[str]) -> bool:
    """Runs one benchmark; its standard error passes through. Returns whether it ended well and printed JSON objects,
    one after another. What it printed before it failed is kept."""
    print(f"bench: {script.stem}", file=sys.stderr, flush=True)
    results, failure = [], ""
    try:
        done = subprocess.run(
            [sys.executable, str(script), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=BENCHMARK_S_MAX,
            cwd=ROOT,
            check=False,
        )
        failure = f"exit code {done.returncode}" if done.returncode else ""
        results = _objects(done.stdout)
    except (subprocess.SubprocessError, json.JSONDecodeError) as error:
        failure = str(error)
    for result in results:
        if "--quick" not in arguments:
            _keep(result)
        print(json.dumps(result), flush=True)
    if failure or not results:
        print(f"bench: {script.stem} failed: {failure or 'it printed nothing'}", file=sys.stderr)
    return bool(results) and not failure


def _objects(text: str) -> list[dict[str, Any]]:
    decoder, found, position = json.JSONDecoder(), [], 0
    text = text.strip()
    while position < len(text):
        value, position = decoder.raw_decode(text, position)
        found.append(value)
        position += len(text[position:]) - len(text[position:].lstrip())
    return found


def _keep(result: dict[str, Any]) -> None:
    target = ROOT / "benchmarks" / "results" / f"{result['benchmark']}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> int:
    arguments, wanted = sys.argv[1:], "bench_*"
    if arguments[:1] == ["--only"]:
        wanted, arguments = arguments[1], arguments[2:]
    scripts = sorted((ROOT / "benchmarks").glob(f"{wanted}.py"))
    if not scripts:
        print(f"bench: no benchmarks/{wanted}.py", file=sys.stderr)
        return 2
    results = [run_one(script, arguments) for script in scripts]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
