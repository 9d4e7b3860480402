"""A launch is measured from exec to its first token, a failure is one readable line, and nothing is left running."""

import asyncio
import os
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tailrace.clock import monotonic_ns
from tailrace.errors import ClientFailed, ConfigError, StartFailed
from tailrace.workload.cold.coldstart import (
    Coldstart,
    ColdstartJob,
    ColdstartResult,
    Watch,
    measure_coldstart,
    parse_url,
)

PACING = str(Path(__file__).resolve().parents[3] / "golden" / "pacing_server.py")
PAGE = (
    "import http.server, sys\n"
    "class H(http.server.BaseHTTPRequestHandler):\n"
    "    protocol_version = 'HTTP/1.1'\n"
    '    def do_GET(self): self.reply(int(sys.argv[2]), b\'{"data": [{"id": "m"}]}\', \'application/json\')\n'
    "    def do_POST(self): self.reply(int(sys.argv[3]), sys.argv[4].encode(), sys.argv[5])\n"
    "    def reply(self, status, body, kind):\n"
    "        self.send_response(status); self.send_header('content-type', kind)\n"
    "        self.send_header('content-length', str(len(body))); self.end_headers(); self.wfile.write(body)\n"
    "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()\n"
)
SILENT = (
    "import socket, sys, time\n"
    "listener = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n"
    "print('listening and saying nothing', flush=True)\n"
    "time.sleep(600)\n"
)
STUBBORN = (
    "import os, runpy, signal, subprocess, sys\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "open(sys.argv[3], 'a').write(f'{os.getpid()} {child.pid}\\n')\n"
    "sys.argv = [sys.argv[2], '--port', sys.argv[1]]\n"
    "runpy.run_path(sys.argv[0], run_name='__main__')\n"
)


class Heard:
    def __init__(self) -> None:
        self.launches: list[Coldstart] = []
        self.logs: list[str] = []

    @property
    def watch(self) -> Watch:
        return Watch(
            on_start=lambda _: None, on_launch=lambda _, launch: self.launches.append(launch), on_log=self.logs.append
        )


def measure(job: ColdstartJob, heard: Heard | None = None) -> ColdstartResult:
    return asyncio.run(measure_coldstart(job, (heard or Heard()).watch))


def python(code: str, *arguments: str, **fields: object) -> ColdstartJob:
    return ColdstartJob(command=(sys.executable, "-c", code, "{port}", *arguments), **fields)  # type: ignore[arg-type]


def is_alive(pid: int) -> bool:
    """A zombie waits for its new parent and is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_each_launch_is_its_own_and_its_instants_are_in_order() -> None:
    heard = Heard()
    before_ns = monotonic_ns()
    result = measure(ColdstartJob(command=(sys.executable, PACING, "--port", "{port}"), repeats=2), heard)
    took_ms = (monotonic_ns() - before_ns) / 1e6
    assert heard.launches == result.launches
    assert len(result.launches) == 2
    for each in result.launches:
        assert 0 < each.port_open_ms <= each.ready_ms <= each.first_token_ms <= each.answered_ms <= took_ms
        assert each.first_token_ms - each.ready_ms >= 20, "the server waits so long before its first token"
    assert result.model == "paced"
    for name, spread in result.since_exec.items():
        values = sorted(getattr(each, f"{name}_ms") for each in result.launches)
        assert (spread.min_ms, spread.max_ms) == (values[0], values[-1])
        assert spread.median_ms == pytest.approx(sum(values) / 2)
    means = [sum(phase) / 2 for phase in [(s.min_ms, s.max_ms) for s in result.phases.values()]]
    assert sum(means) == pytest.approx(result.since_exec["answered"].median_ms), "the phases are the whole"


def test_a_command_that_ends_early_is_told_with_its_exit_code_and_its_last_words() -> None:
    heard = Heard()
    with pytest.raises(StartFailed, match="exit code 3 before it opened port"):
        measure(python("import sys; print('no model here', file=sys.stderr); sys.exit(3)"), heard)
    assert heard.logs == ["no model here"]
    assert heard.launches == []


def test_a_command_killed_by_a_signal_is_told_so() -> None:
    with pytest.raises(StartFailed, match="signal SIGKILL"):
        measure(python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))


def test_a_port_that_never_opens_ends_at_the_deadline() -> None:
    with pytest.raises(StartFailed, match="never opened port"):
        measure(python("import time; time.sleep(600)", timeout_s=0.5))


def test_a_server_that_accepts_and_never_answers_ends_at_the_deadline() -> None:
    heard = Heard()
    with pytest.raises(StartFailed, match="never answered GET /v1/models"):
        measure(python(SILENT, timeout_s=1.5), heard)
    assert heard.logs == ["listening and saying nothing"]


def test_a_server_that_never_becomes_ready_is_told_with_its_last_answer() -> None:
    with pytest.raises(StartFailed, match="it answered 503"):
        measure(python(PAGE, "503", "200", "", "", timeout_s=1.5))


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        ("401", '{"error": {"message": "no key"}}', "application/json", "401: no key"),
        ("200", "<html>", "text/html", "text/html without a token"),
        ("200", '{"choices": []}', "application/json", "application/json without a token"),
        ("200", 'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\ndata: [DONE]\n\n', "text/event-stream", "token"),
        ("200", "data: {broken\n\n", "text/event-stream", "not one of completions"),
        ("200", 'data: {"error": {"message": "no memory"}}\n\n', "text/event-stream", "no memory"),
    ],
)  # fmt: skip
def test_a_first_request_that_fails_is_no_measurement(status: str, body: str, kind: str, words: str) -> None:
    with pytest.raises(ClientFailed, match=words):
        measure(python(PAGE, "200", status, body, kind))


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(StartFailed, match="cannot be run: No such file"):
        measure(ColdstartJob(command=("/no/such/command", "{port}")))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"port": None}, "--port or --url"),
        ({"api_key": "a\nb"}, "a character that a header cannot carry"),
        ({"ready_path": "/x\r\nY: z"}, "the ready path"),
        ({"host": "no.such.invalid"}, "the name no.such.invalid is not known"),
    ],
)
def test_of_a_job_that_cannot_be_nothing_is_started(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    job = ColdstartJob(command=("touch", str(tmp_path / "made")), port=9)
    with pytest.raises(ConfigError, match=said):
        measure(msgspec.structs.replace(job, **changed))
    assert not (tmp_path / "made").exists()


def test_a_port_in_use_is_refused_at_once_and_nothing_is_started(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        job = ColdstartJob(command=("touch", str(tmp_path / "made")), port=taken.getsockname()[1])
        with pytest.raises(StartFailed, match="taken by another process"):
            measure(job)
    assert not (tmp_path / "made").exists()


def test_a_group_that_ignores_the_request_to_end_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    measure(python(STUBBORN, PACING, str(pids), repeats=2, grace_s=0.2))
    launched = [int(pid) for pid in pids.read_text().split()]
    assert len(launched) == 4
    assert not any(map(is_alive, launched))


def test_a_cancelled_measurement_leaves_nothing(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    async def cancel_when_it_runs() -> None:
        task = asyncio.create_task(
            measure_coldstart(python(STUBBORN, PACING, str(pids), repeats=100, grace_s=0.1), Heard().watch)
        )
        for _ in range(2000):
            if pids.exists() and pids.read_text().count("\n"):
                break
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_when_it_runs())
    launched = [int(pid) for pid in pids.read_text().split()]
    assert launched
    assert not any(map(is_alive, launched))
    assert os.getpid() not in launched


def test_the_output_kept_is_bounded() -> None:
    heard = Heard()
    with pytest.raises(StartFailed):
        measure(python("import sys; sys.stdout.write('x' * 1_000_000 + ' the end'); sys.exit(1)"), heard)
    assert len(heard.logs[0]) <= 64 * 1024
    assert heard.logs[0].endswith("the end")


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("http://127.0.0.1:9", ("127.0.0.1", 9, "")),
        ("localhost:8000/v1", ("localhost", 8000, "")),
        ("http://[::1]:8000/base/v1/", ("::1", 8000, "/base")),
    ],
)
def test_an_address_is_read(url: str, wanted: tuple[str, int, str]) -> None:
    assert parse_url(url) == wanted


@pytest.mark.parametrize(
    "url", ["https://127.0.0.1:1", "http://", "http://a:b", "ftp://x", "http://u:p@x", "http://x/?a"]
)
def test_another_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        parse_url(url)
