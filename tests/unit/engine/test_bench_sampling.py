"""The benchmark of draws runs and prints one JSON object."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "bench_sampling.py"


def test_the_benchmark_prints_one_json_object() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--quick"], capture_output=True, text=True, check=True, timeout=120)
    printed = json.loads(done.stdout)
    assert printed["benchmark"] == "sampling"
    by_setting = printed["results"]["ms_by_vocabulary"]["1000"]
    assert len(by_setting) >= 10
    assert all(value > 0 for value in by_setting.values())
