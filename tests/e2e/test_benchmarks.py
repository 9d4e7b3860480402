"""Every benchmark runs with tiny inputs, so that none can rot: the figures mean nothing, the report's shape does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "benchmarks").glob("bench_*.py"))


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_benchmark_prints_one_report(script: Path, smollm2_dir: Path) -> None:
    assert smollm2_dir.is_dir()  # converted before the benchmark's own clock starts
    done = subprocess.run(
        [sys.executable, str(script), "--quick"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["benchmark"] == script.stem.removeprefix("bench_")
    assert report["targets"], "a benchmark holds its figures against targets"
    assert {"name", "value", "at_most", "at_least", "met"} == set(report["targets"][0])
    assert report["machine"]["num_cores"] >= 1
