"""`tailrace coldstart` of our own service with the packaged model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TAILRACE = str(Path(sys.executable).parent / "tailrace")


@pytest.mark.model
@pytest.mark.slow
def test_our_own_service_is_launched_measured_and_ended(smollm2_dir: Path) -> None:
    assert smollm2_dir.is_dir()
    command = [TAILRACE, "serve", "smollm2", "--port", "{port}", "--kv-memory", "200MB", "--context-tokens-max", "512"]
    done = subprocess.run(
        [TAILRACE, "coldstart", "--repeats", "1", "--json", "--", *command],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    (launch,) = result["launches"]
    assert 0 < launch["port_open_ms"] <= launch["ready_ms"] <= launch["first_token_ms"] <= launch["answered_ms"]
    assert result["model"]
