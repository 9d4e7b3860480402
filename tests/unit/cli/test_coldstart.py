"""What `tailrace coldstart` prints, and how it ends."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.cli import main

PACING = str(Path(__file__).resolve().parents[2] / "golden" / "pacing_server.py")
TAILRACE = str(Path(sys.executable).parent / "tailrace")
WAIT_S = 60


def test_json_holds_every_launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cold.json"
    command = ["--repeats", "2", "--json", "--out", str(out), "--", sys.executable, PACING, "--port", "{port}"]
    assert main.run(["coldstart", *command]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert len(result["launches"]) == 2
    assert set(result["phases"]) == {
        "exec_to_port", "port_to_ready", "ready_to_first_token", "first_token_to_answered"
    }  # fmt: skip
    assert json.loads(out.read_text()) == result
    notes = captured.err.splitlines()
    assert notes[0] == "launch 1 of 2"
    assert notes[1].startswith("launch 1 of 2: first token after")
    assert notes[-1] == f"JSON: {out}"


def test_the_table_says_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--repeats", "1", "--api", "completions", "--model", "m", "-n", "3"]
    assert main.run(["coldstart", *arguments, "--", sys.executable, PACING, "--port", "{port}"]) == 0
    captured = capsys.readouterr()
    for words in ("port open", "ready to first token", "first answer whole", "1 launch"):
        assert words in captured.out
    assert "page cache was warm" in captured.err


def test_a_failure_is_the_commands_output_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["coldstart", "--", "sh", "-c", "echo out of luck >&2; exit 7", "{port}"]) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "out of luck" in captured.err
    assert captured.err.splitlines()[-1].startswith("tailrace: the command ended with exit code 7")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--url", "http://127.0.0.1:1", "--port", "1", "--", "true"],
        ["--api", "tokens", "--", "true", "{port}"],
        ["--ready-path", "health", "--", "true", "{port}"],
        ["--repeats", "0", "--", "true", "{port}"],
        ["--", "true"],
        ["--url", "http://me:hush@127.0.0.1:1", "--", "true"],
    ],
)
def test_wrong_usage_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["coldstart", *arguments]) == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_command_too(number: signal.Signals, code: int, tmp_path: Path) -> None:
    said = tmp_path / "pid"
    script = f"echo $$ > {said}.new; mv {said}.new {said}; exec sleep 600"
    process = subprocess.Popen(
        [TAILRACE, "coldstart", "--grace", "5", "--", "sh", "-c", script, "{port}"], stderr=subprocess.PIPE
    )
    try:
        for _ in range(WAIT_S * 100):
            if said.exists() or process.poll() is not None:
                break
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.01)
        pid = int(said.read_text())
        process.send_signal(number)
        _, errors = process.communicate(timeout=WAIT_S)
        assert process.returncode == code
        assert b"Traceback" not in errors
        assert not Path(f"/proc/{pid}").exists(), "its end was waited for"
    finally:
        process.kill()
        process.wait()
