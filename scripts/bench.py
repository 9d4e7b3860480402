"""Runs every `benchmarks/bench_*.py` and keeps what each prints: one JSON object, in `benchmarks/results/NAME.json`.

`--only SCRIPT`, first, runs that script alone; what else is given goes to the scripts.

A benchmark that fails does not stop the others; the exit status says whether all ran.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BENCHMARK_S_MAX = 4 * 3600
"""A row against the slowest peer takes hours on two cores."""


def run_one(script: Path, arguments: list[str]) -> bool:
    """Runs one benchmark; its standard error passes through. Returns whether it printed one JSON object."""
    print(f"bench: {script.stem}", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            [sys.executable, str(script), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=BENCHMARK_S_MAX,
            cwd=ROOT,
            check=True,
        )
        result = json.loads(done.stdout)
    except (subprocess.SubprocessError, json.JSONDecodeError) as error:
        print(f"bench: {script.stem} failed: {error}", file=sys.stderr)
        return False
    if "--quick" not in arguments:
        target = ROOT / "benchmarks" / "results" / f"{result['benchmark']}.json"
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(result), flush=True)
    return True


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
