"""The life of `tailrace serve`: starts that fail, engines that are killed or stopped, signals."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from serving import ANSWER, ENDLESS, MODEL, TAILRACE, WAIT_S, Served, Stream, finish_reason, served

from tiny_gguf import write_tiny_gguf

# Starts that fail


def refused_start(*arguments: str) -> tuple[int, str]:
    """Exit code and what was said: one line, without a traceback and with nothing on standard output."""
    done = subprocess.run(
        [TAILRACE, "serve", *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    *progress, line = done.stderr.splitlines()
    assert line.startswith("tailrace: ")
    assert not any(earlier.startswith("tailrace: ") for earlier in progress)
    return done.returncode, line


def test_a_port_in_use_is_told_before_the_model_is_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        code, line = refused_start("no-such-model.gguf", "--port", str(port))
    assert code == 4
    assert f"port {port}" in line
    assert "--port" in line, "it says what to do"


def _cut(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


def _header_only(data: bytes) -> bytes:
    return data[:20]


def _absurd_count(data: bytes) -> bytes:
    """The number of tensors, eight bytes after magic and version."""
    return data[:8] + b"\xff" * 8 + data[16:]


def _not_gguf(data: bytes) -> bytes:
    return b"<html>" + data[6:]


def _empty(data: bytes) -> bytes:
    del data
    return b""


@pytest.mark.parametrize("corrupt", [_cut, _header_only, _absurd_count, _not_gguf, _empty])
def test_a_corrupt_gguf_ends_the_start_with_one_line(tmp_path: Path, corrupt: Callable[[bytes], bytes]) -> None:
    source = write_tiny_gguf(tmp_path / "whole.gguf")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(corrupt(source.read_bytes()))
    cache = tmp_path / "cache"
    code, line = refused_start(str(broken), "--port", "0", "--set", f"model.cache_dir={cache}")
    assert code == 3
    assert "broken.gguf" in line
    assert sorted(path.name for path in tmp_path.iterdir() if path != cache) == ["broken.gguf", "whole.gguf"]


def test_a_model_that_is_not_there_ends_the_start_with_one_line(tmp_path: Path) -> None:
    code, line = refused_start(str(tmp_path / "nothing.gguf"), "--port", "0")
    assert code == 3
    assert "nothing.gguf" in line


# Engines that fail


@pytest.fixture(scope="module")
def service(smollm2_dir: Path) -> Iterator[Served]:
    """Small steps and a small pool make the bound of a hang its floor of ten seconds."""
    del smollm2_dir  # converted before the service counts its start
    with served("--token-budget", "64", "--kv-memory", "13MB", "--sequences-max", "4") as running:
        yield running


def assert_replaced(service: Served, old_pid: int, stream: Stream) -> None:
    """The stream ended with the label, the service went unready and came back, with another engine."""
    last = stream.rest()[-1]
    assert json.loads(last.data)["error"]["code"] == "engine_died"
    assert service.get("/ready").status == 503
    refused = service.post("/v1/chat/completions", ANSWER)
    assert (refused.status, refused.code, refused.headers["retry-after"]) == (503, "not_ready", "1")
    assert service.get("/health").status == 200, "a supervisor must not kill what mends itself"
    service.wait_for(lambda: service.get("/ready").status == 200, "a new engine")
    assert service.engine_pid() != old_pid
    with pytest.raises(ProcessLookupError):
        os.kill(old_pid, 0)
    assert service.metric("vllm:num_requests_running") == 0
    answer = service.post("/v1/chat/completions", ANSWER | {"max_tokens": 4})
    assert answer.status == 200
    assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.model
def test_a_killed_engine_is_replaced_and_its_stream_told(service: Served) -> None:
    restarts = service.metric("tailrace_engine_restarts_total")
    stream = Stream(service, ENDLESS)
    stream.first_text()
    pid = service.engine_pid()
    os.kill(pid, signal.SIGKILL)
    assert_replaced(service, pid, stream)
    assert service.metric("tailrace_engine_restarts_total") == restarts + 1


@pytest.mark.model
@pytest.mark.slow
def test_a_stopped_engine_is_taken_for_hung_and_replaced(service: Served) -> None:
    stream = Stream(service, ENDLESS)
    stream.first_text()
    pid = service.engine_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        assert_replaced(service, pid, stream)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


# The end


@pytest.mark.model
def test_sigterm_finishes_what_runs_refuses_what_comes_and_exits_with_zero(smollm2_dir: Path) -> None:
    del smollm2_dir
    with served() as service:
        engine = service.engine_pid()
        stream = Stream(service, ENDLESS | {"max_tokens": 80})
        stream.first_text()
        service.process.send_signal(signal.SIGTERM)
        service.wait_said("draining: 1 requests run")
        refused = service.post("/v1/chat/completions", ANSWER)
        assert (refused.status, refused.code, refused.headers["retry-after"]) == (503, "draining", "1")
        assert service.get("/ready").status == 503
        assert finish_reason(stream.rest()) == "length"
        assert service.wait_exit() == 0
        assert service.said.splitlines()[-1] == "stopped"
        assert "Traceback" not in service.said
        with pytest.raises(ProcessLookupError):
            os.kill(engine, 0)


@pytest.mark.model
def test_a_second_sigterm_stops_at_once(smollm2_dir: Path) -> None:
    del smollm2_dir
    with served() as service:
        engine = service.engine_pid()
        stream = Stream(service, ENDLESS)
        stream.first_text()
        service.process.send_signal(signal.SIGTERM)
        service.wait_said("draining: 1 requests run")
        service.process.send_signal(signal.SIGTERM)
        assert service.wait_exit() == 0
        assert b"[DONE]" not in stream.raw, "it did not wait for the answer"
        stream.leave()
        assert "Traceback" not in service.said
        with pytest.raises(ProcessLookupError):
            os.kill(engine, 0)


@pytest.mark.model
def test_an_engine_leaves_when_its_service_is_killed(smollm2_dir: Path) -> None:
    del smollm2_dir
    with served() as service:
        engine = service.engine_pid()
        # Of the engine itself: its end cannot be waited for, it is no child of ours.
        watched = os.pidfd_open(engine)
        stream = Stream(service, {"model": MODEL, "prompt": [5 + i for i in range(450)], "max_tokens": 60})
        service.wait_for(lambda: service.metric("vllm:num_requests_running") == 1, "the engine works")
        service.process.kill()
        stream.leave()
        assert service.wait_exit() == -signal.SIGKILL
        try:
            assert _ends(watched), "the engine outlived its service"
        finally:
            os.close(watched)


def _ends(pidfd: int) -> bool:
    """A pidfd becomes readable when its process ends."""
    return bool(select.select([pidfd], [], [], WAIT_S)[0])
