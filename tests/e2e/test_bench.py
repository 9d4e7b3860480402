"""`tailrace bench` as its users run it: a real process against a live worker, up to rows, page and exit code."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_worker import live_worker, write_text_model

from tailrace.measure.rows import read_records, read_rows
from tailrace.model.text import TextModel
from tailrace.worker.settings import WorkerSettings

TAILRACE = str(Path(sys.executable).parent / "tailrace")
RUN_S_MAX = 200
TOML = """
name = "e2e"
[[cohorts]]
prompt_tokens = { law = "uniform", low = 10, high = 30 }
output_tokens = { law = "uniform", low = 4, high = 12 }
"""
KEY = "sk-of-this-test"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("text-model"))


@pytest.fixture(scope="module")
def url(model_dir: Path) -> Iterator[str]:
    with live_worker(TextModel.load(model_dir), settings=WorkerSettings(port=0, api_key=KEY)) as worker:
        yield worker.url


@pytest.fixture
def workload(tmp_path: Path) -> str:
    path = tmp_path / "e2e.toml"
    path.write_text(TOML, encoding="utf-8")
    return str(path)


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [TAILRACE, "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=RUN_S_MAX)


@pytest.mark.slow
def test_a_run_from_the_address_to_rows_page_and_json(url: str, workload: str, tmp_path: Path) -> None:
    rows, page = tmp_path / "run.jsonl.gz", tmp_path / "run.html"
    done = bench(
        *(url, "--api-key", KEY, "-w", workload, "--arrivals", "poisson:30", "--requests", "120", "--warmup", "0.5"),
        *("--slo", "ttft_ms_p50<=5000", "--json", "--rows", str(rows), "--html", str(page), "--chunk-usage"),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["reports"][0]
    assert report["num_requests"] == 120
    assert report["outcomes"] == {"ok": 120}
    assert report["info"]["model"] == "modeled"
    assert report["info"]["client"]["null_run"]["num_requests"] > 0
    assert report["lengths"]["output"]["max"] <= 12
    info, table = read_rows(rows)
    assert info.run_id == report["info"]["run_id"]
    assert len(table) >= 120
    assert len({record.request_id for record in read_records(rows)}) == len(table)
    assert "Plotly.newPlot" in page.read_text(encoding="utf-8")
    for text in (done.stdout, done.stderr, page.read_text(encoding="utf-8")):
        assert KEY not in text


@pytest.mark.slow
def test_repeats_are_fresh_runs_of_one_thing(url: str, workload: str, tmp_path: Path) -> None:
    rows = tmp_path / "run.jsonl"
    done = bench(
        *(url, "--api-key", KEY, "-w", workload, "--arrivals", "closed:2", "--requests", "20", "--warmup", "0"),
        *("--repeats", "2", "--json", "--rows", str(rows), "--no-calibrate"),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [report["num_requests"] for report in result["reports"]] == [20, 20]
    assert len({report["info"]["run_id"] for report in result["reports"]}) == 2
    assert result["intervals"]["ttft_ms_p50"]["num_runs"] == 2
    assert sorted(path.name for path in tmp_path.glob("run-*")) == ["run-1.jsonl", "run-2.jsonl"]


@pytest.mark.slow
def test_the_output_is_counted_again_by_the_model_s_own_tokenizer(
    url: str, workload: str, model_dir: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "run.jsonl"
    for tokenizer in (str(model_dir), "endpoint"):
        done = bench(
            *(url, "--api-key", KEY, "-w", workload, "--requests", "5", "--warmup", "0", "--rows", str(rows)),
            *("--tokenizer", tokenizer, "--no-calibrate"),
        )
        assert done.returncode == 0, done.stderr
        records = [record for record in read_records(rows) if record.outcome == "ok"]
        assert len(records) >= 5
        assert all(record.num_output_tokens_client for record in records)
        assert "counted again" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_with_what_there_is(
    number: signal.Signals, url: str, workload: str, tmp_path: Path
) -> None:
    rows = tmp_path / "run.jsonl"
    command = [TAILRACE, "bench", url, "--api-key", KEY, "-w", workload, "--duration", "3000", "--warmup", "0"]
    command += ["--no-calibrate", "--rows", str(rows)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "requests ended" in line:
                break
        process.send_signal(number)
        out, err = process.communicate(timeout=RUN_S_MAX)
    assert process.returncode == 130
    assert "interrupted" in err
    assert "note: interrupted" in out
    assert len(read_rows(rows)[1]) > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--api-key", "wrong"], "answered 401"),
        ([], "does the service want an API key?"),
        (["--api-key", KEY, "--model", "other"], "it serves: modeled"),
    ],
)
def test_what_a_service_refuses_is_one_line(url: str, arguments: list[str], words: str) -> None:
    done = bench(url, *arguments, "--requests", "1", "--warmup", "0")
    assert done.returncode == 5
    assert done.stdout == ""
    assert words in done.stderr.splitlines()[-1]
    assert "wrong" not in done.stderr


@pytest.mark.slow
def test_check_turns_a_claim_that_cannot_be_made_into_an_exit_code(url: str, workload: str) -> None:
    done = bench(
        *(url, "--api-key", KEY, "-w", workload, "--requests", "5", "--warmup", "0", "--no-calibrate"),
        *("--slo", "ttft_ms_p99<=5000", "--check"),
    )
    assert done.returncode == 1
    assert "cannot say" in done.stdout
    assert "662 are needed" in done.stderr


@pytest.mark.slow
def test_at_a_terminal_the_run_is_shown_live_and_the_result_follows(url: str, workload: str) -> None:
    controller, terminal = pty.openpty()
    command = [TAILRACE, "bench", url, "--api-key", KEY, "-w", workload, "--duration", "2", "--warmup", "0"]
    with subprocess.Popen([*command, "--no-calibrate"], stdout=subprocess.PIPE, stderr=terminal, text=True) as process:
        os.close(terminal)
        shown = b""
        deadline = time.monotonic() + RUN_S_MAX
        while time.monotonic() < deadline:
            try:
                part = os.read(controller, 65_536)
            except OSError:  # the terminal's other end is closed: the process has ended
                break
            shown += part
        assert process.stdout is not None
        out = process.stdout.read()
    os.close(controller)
    assert process.returncode == 0
    assert b"awaiting first token" in shown
    assert "outcomes:" in out


@pytest.mark.slow
def test_a_search_makes_real_runs_and_reports_them_all(url: str, workload: str, tmp_path: Path) -> None:
    page = tmp_path / "saturation.html"
    command = [TAILRACE, "saturate", url, "--api-key", KEY, "-w", workload, "--slo", "ttft_ms_p50<=60000"]
    command += ["--requests-per-run", "120", "--warmup", "0", "--runs-max", "10"]
    command += ["--start", "60", "--floor", "60", "--ceiling", "60"]
    command += ["--json", "--html", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=RUN_S_MAX)
    found = json.loads(done.stdout)
    ends = (found["result"]["last_pass_per_s"], found["result"]["first_fail_per_s"])
    assert done.returncode == (1 if ends == (None, None) else 0), done.stderr  # a noisy machine may let none be judged
    assert found["info"]["arrivals"] == "poisson:60"
    assert {probe["summary"]["num_requests"] for probe in found["result"]["probes"]} == {120}
    assert [line.split()[0] for line in done.stderr.splitlines() if "TTFT p99" in line and "/s (" in line] == [
        f"{probe['rate_per_s']:g}/s" for probe in found["result"]["probes"]
    ]
    assert "How much it can take" in page.read_text(encoding="utf-8")
    assert KEY not in done.stdout + done.stderr
