"""The worker over raw HTTP: hostile bodies, limits, clients that leave, engines that die, the end of the process."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import pytest
from live_worker import CONTEXT_MAX, WAIT_S, LiveWorker, live_worker

from tailrace.engine.config import EngineConfig
from tailrace.errors import StartFailed
from tailrace.model.text import TextModel
from tailrace.wire.sse import SseEvent, SseParser
from tailrace.worker.channel import ModeledFaults
from tailrace.worker.serve import Phase, ServerEnd, bind
from tailrace.worker.settings import WorkerSettings

CHAT = {"model": "modeled", "messages": [{"role": "user", "content": "the stream"}], "max_tokens": 4, "temperature": 0}
ENDLESS = CHAT | {"max_tokens": None, "ignore_eos": True}


class Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return str(self.json["error"]["code"])


def connect(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    assert parts.hostname == "127.0.0.1"
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=WAIT_S)


def call(worker: LiveWorker, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection = connect(worker.url)
    try:
        connection.request(method, path, data, headers or {})
        response = connection.getresponse()
        received = {key.lower(): value for key, value in response.getheaders()}
        return Answer(response.status, received, response.read())
    finally:
        connection.close()


def post(worker: LiveWorker, path: str, body: Any, **headers: str) -> Answer:
    return call(worker, "POST", path, body, {key.replace("_", "-"): value for key, value in headers.items()})


def metric(worker: LiveWorker, name: str, **labels: str) -> float:
    for line in call(worker, "GET", "/metrics").body.decode().splitlines():
        match = re.fullmatch(r"([^{ ]+)(?:\{([^}]*)\})? (\S+)", line)
        if match and match[1] == name and all(f'{key}="{value}"' in (match[2] or "") for key, value in labels.items()):
            return float(match[3])
    raise AssertionError(f"no metric {name} {labels}")


def wait_for_metric(worker: LiveWorker, wanted: float, name: str, **labels: str) -> None:
    """A scrape is the only way in from outside, so it is repeated; the bound is only for a hang."""
    until = time.monotonic() + WAIT_S
    while metric(worker, name, **labels) != wanted:
        assert time.monotonic() < until, f"{name} did not become {wanted}"


class HasUrl(Protocol):
    url: str


class OpenStream:
    """A stream whose client reads when it wants to, and may leave."""

    def __init__(self, worker: HasUrl, body: Any = None) -> None:
        self._connection = connect(worker.url)
        self._connection.request("POST", "/v1/chat/completions", json.dumps(ENDLESS | {"stream": True} | (body or {})))
        self._parser = SseParser()

    def first_event(self) -> SseEvent:
        self.response = self._connection.getresponse()
        assert self.response.status == 200
        events: list[SseEvent] = []
        while not events:
            events = self._parser.feed(self.response.read1(65536))
        return events[0]

    def rest(self) -> list[SseEvent]:
        return self._parser.feed(self.response.read())

    def leave(self) -> None:
        sock = self._connection.sock
        if sock is not None:
            sock.close()
        if hasattr(self, "response"):
            self.response.close()
        self._connection.close()


HOSTILE = [
    b"",
    b"{",
    b"[]",
    b"\xff\xfe\x00",
    b'{"model":"modeled","messages":[{"role":"user","content":"\xc3\x28"}]}',
    b'{"model":"modeled","messages":[{"role":"user","content":"\\ud83d"}]}',
    b'{"model":"modeled","messages":[]}',
    b'{"model":"modeled","temperature":NaN}',
    b'{"model":"modeled","max_tokens":-5,"messages":[{"role":"user","content":"x"}]}',
    b'{"model":"modeled","max_tokens":' + b"9" * 500 + b',"messages":[{"role":"user","content":"x"}]}',
    b'{"model":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", HOSTILE)
def test_a_hostile_body_is_refused_in_openais_shape(worker: LiveWorker, path: str, body: bytes) -> None:
    answer = post(worker, path, body)
    assert answer.status == 400
    assert answer.code == "invalid_request"
    assert set(answer.json["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "modeled", "prompt": ["the stream " * 10] * 128}),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "", "name": "n" * 10_000}]}),
        ("/tokenize", {"messages": [{"role": "user", "content": "hi"}] * 500}),
    ],
    ids=["many short prompts", "a long name", "many short messages"],
)
def test_much_text_is_tokenised_beside_the_event_loop(
    worker: LiveWorker, monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    names: set[str] = set()
    for method in ("encode", "encode_chat"):
        tokenise = getattr(TextModel, method)

        def recorded(*args: Any, tokenise: Any = tokenise, **options: Any) -> Any:
            names.add(threading.current_thread().name)
            return tokenise(*args, **options)

        monkeypatch.setattr(TextModel, method, recorded)
    assert post(worker, path, body).status in (200, 400)
    assert names
    assert all(name.startswith("tokenise") for name in names), names


def test_routes_that_do_not_exist_are_answered_in_openais_shape(worker: LiveWorker) -> None:
    missing = call(worker, "GET", "/v2/nothing")
    assert (missing.status, missing.code) == (404, "not_found")
    wrong = call(worker, "GET", "/v1/chat/completions")
    assert (wrong.status, wrong.code, wrong.headers["allow"]) == (405, "method_not_allowed", "POST")


def test_the_step_log_is_off_by_default(worker: LiveWorker) -> None:
    assert call(worker, "GET", "/debug/steps").code == "not_found"


def test_every_answer_has_a_request_id(worker: LiveWorker) -> None:
    assert post(worker, "/v1/chat/completions", CHAT, x_request_id="mine-1").headers["x-request-id"] == "mine-1"
    assert post(worker, "/v1/chat/completions", {}, x_request_id="a b\tc").headers["x-request-id"].startswith("req-")
    assert call(worker, "GET", "/health").headers["x-request-id"].startswith("req-")


def test_probes_answer(worker: LiveWorker) -> None:
    assert call(worker, "GET", "/health").json == {"status": "ok"}
    assert call(worker, "GET", "/ready").json == {"status": "ready"}
    assert call(worker, "GET", "/version").json.keys() == {"version"}


def test_tokenize_and_detokenize_are_inverse(worker: LiveWorker) -> None:
    text = "the tail 🌊"
    answer = post(worker, "/tokenize", {"prompt": text, "return_token_strs": True}).json
    assert answer["tokens"] == worker.text_model.encode(text, special=True)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), CONTEXT_MAX)
    assert len(answer["token_strs"]) == answer["count"]
    assert post(worker, "/detokenize", {"tokens": answer["tokens"]}).json == {"prompt": text}


def test_tokenize_counts_what_a_chat_costs(worker: LiveWorker) -> None:
    counted = post(worker, "/tokenize", {"messages": CHAT["messages"]}).json["count"]
    answer = post(worker, "/v1/chat/completions", CHAT).json
    assert answer["usage"]["prompt_tokens"] == counted


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "colour": 1}, "colour"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ],
)
def test_bad_tokenize_bodies_are_named(worker: LiveWorker, path: str, body: Any, param: str) -> None:
    answer = post(worker, path, body)
    assert (answer.status, answer.json["error"]["param"]) == (400, param)


@pytest.mark.parametrize("value", ["0", "soon", "-3"])
def test_an_absurd_timeout_is_refused(worker: LiveWorker, value: str) -> None:
    answer = post(worker, "/v1/chat/completions", CHAT, x_request_timeout_ms=value)
    assert (answer.status, answer.json["error"]["param"]) == (400, "x-request-timeout-ms")


def test_a_stream_has_the_headers_of_one(worker: LiveWorker) -> None:
    answer = post(worker, "/v1/chat/completions", CHAT | {"stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.body.endswith(b"\n\ndata: [DONE]\n\n")


def test_a_long_prompt_that_does_not_fit_is_refused_with_both_numbers(worker: LiveWorker) -> None:
    body = {"model": "modeled", "prompt": "the stream " * 20_000}
    answer = post(worker, "/v1/completions", body)
    assert (answer.status, answer.code) == (400, "context_length_exceeded")
    count = post(worker, "/tokenize", {"prompt": body["prompt"]}).json["count"]
    assert str(count) in answer.json["error"]["message"]
    assert str(CONTEXT_MAX) in answer.json["error"]["message"]


# Limits, keys, browsers


@pytest.fixture(scope="module")
def guarded(text_model: TextModel) -> Iterator[LiveWorker]:
    settings = WorkerSettings(
        port=0,
        api_key="schlüsselà",
        body_bytes_max=2_000,
        cors_origins=("https://app.example",),
        debug_steps=True,
        requests_max=2,
        keep_alive_s=1,
        seed=11,
    )
    with live_worker(text_model, settings=settings) as live:
        yield live


KEY = {"authorization": "Bearer schlüsselà".encode().decode("latin-1")}


def test_a_key_is_wanted_and_checked(guarded: LiveWorker) -> None:
    for headers in ({}, {"authorization": "Bearer other"}, {"authorization": "schl"}, {"authorization": "Basic x"}):
        answer = call(guarded, "POST", "/v1/chat/completions", CHAT, headers)
        assert (answer.status, answer.code, answer.headers["www-authenticate"]) == (401, "invalid_api_key", "Bearer")
    assert call(guarded, "POST", "/v1/chat/completions", CHAT, KEY).status == 200


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics"])
def test_probes_need_no_key(guarded: LiveWorker, path: str) -> None:
    assert call(guarded, "GET", path).status == 200


def test_the_step_log_shows_steps(guarded: LiveWorker) -> None:
    call(guarded, "POST", "/v1/chat/completions", CHAT, KEY)
    assert call(guarded, "GET", "/debug/steps").status == 401
    steps = call(guarded, "GET", "/debug/steps", None, KEY).json["steps"]
    assert steps
    assert steps[-1]["num_decode_rows"] >= 1


def test_a_body_above_the_limit_is_refused_before_it_is_read(guarded: LiveWorker) -> None:
    connection = connect(guarded.url)
    connection.putrequest("POST", "/v1/chat/completions")
    for name, value in (KEY | {"content-length": "10000000"}).items():
        connection.putheader(name, value)
    connection.endheaders()  # the body itself is never sent
    response = connection.getresponse()
    assert response.status == 413
    assert json.loads(response.read())["error"]["code"] == "body_too_large"
    connection.close()


def test_a_body_without_a_length_is_refused_while_it_is_read(guarded: LiveWorker) -> None:
    connection = connect(guarded.url)
    connection.putrequest("POST", "/v1/chat/completions")
    for name, value in (KEY | {"transfer-encoding": "chunked"}).items():
        connection.putheader(name, value)
    connection.endheaders()
    connection.send(b"%x\r\n%b\r\n" % (3_000, b" " * 3_000))  # the last chunk never comes
    assert connection.getresponse().status == 413
    connection.close()


def test_a_body_that_does_not_arrive_is_refused(text_model: TextModel) -> None:
    with live_worker(text_model, settings=WorkerSettings(port=0, body_timeout_s=0.1)) as worker:
        connection = connect(worker.url)
        connection.putrequest("POST", "/v1/chat/completions")
        connection.putheader("content-length", "100")
        connection.endheaders()
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())["error"]["code"]) == (400, "invalid_request")
        connection.close()


def test_a_browser_of_an_allowed_origin_may_call(guarded: LiveWorker) -> None:
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    allowed = call(guarded, "OPTIONS", "/v1/chat/completions", None, preflight | {"origin": "https://app.example"})
    assert (allowed.status, allowed.headers["access-control-allow-origin"]) == (200, "https://app.example")
    refused = call(guarded, "OPTIONS", "/v1/chat/completions", None, preflight | {"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in refused.headers


def test_requests_beyond_the_bound_are_told_to_come_back(guarded: LiveWorker) -> None:
    bodies = []
    for _ in range(2):
        connection = connect(guarded.url)
        connection.putrequest("POST", "/v1/chat/completions")
        for name, value in (KEY | {"content-length": "100"}).items():
            connection.putheader(name, value)
        connection.endheaders()  # a body that does not arrive holds its slot
        bodies.append(connection)
    wait_for_metric(guarded, 2, "tailrace_requests_open")
    answer = call(guarded, "POST", "/v1/chat/completions", CHAT, KEY)
    assert (answer.status, answer.code, answer.headers["retry-after"]) == (429, "overloaded", "1")
    for connection in bodies:
        connection.close()
    wait_for_metric(guarded, 0, "tailrace_requests_open")
    assert call(guarded, "POST", "/v1/chat/completions", CHAT, KEY).status == 200


def test_a_connection_that_says_nothing_is_closed(guarded: LiveWorker) -> None:
    parts = urlsplit(guarded.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=WAIT_S) as sock:
        assert sock.recv(1) == b""


def test_a_worker_with_a_seed_gives_each_request_another_one(guarded: LiveWorker) -> None:
    body = CHAT | {"temperature": 1, "max_tokens": 12}
    answers = [call(guarded, "POST", "/v1/chat/completions", body, KEY).json for _ in range(2)]
    texts = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert texts[0] != texts[1]


# Clients that leave


@pytest.fixture(scope="module")
def slow(text_model: TextModel) -> Iterator[LiveWorker]:
    """One sequence at a time, steps of 20 ms: others queue."""
    config = EngineConfig(sequences_max=1, waiting_max=2)
    with live_worker(text_model, step_fixed_ms=20.0, engine=config) as live:
        yield live


def blocks_held(worker: LiveWorker) -> float:
    return metric(worker, "tailrace_kv_blocks", state="held")


def test_a_client_that_leaves_while_its_answer_streams_frees_its_blocks(slow: LiveWorker) -> None:
    before = metric(slow, "tailrace_requests_total", label="cancelled")
    stream = OpenStream(slow)
    stream.first_event()
    wait_for_metric(slow, 1, "vllm:num_requests_running")
    stream.leave()
    wait_for_metric(slow, 0, "vllm:num_requests_running")
    assert blocks_held(slow) == 0
    wait_for_metric(slow, before + 1, "tailrace_requests_total", label="cancelled")


def test_a_client_that_leaves_while_it_waits_for_a_whole_answer_frees_its_blocks(slow: LiveWorker) -> None:
    stream = OpenStream(slow, {"stream": False})
    wait_for_metric(slow, 1, "vllm:num_requests_running")
    stream.leave()
    wait_for_metric(slow, 0, "vllm:num_requests_running")
    assert blocks_held(slow) == 0


def test_a_client_that_leaves_while_queued_is_forgotten(slow: LiveWorker) -> None:
    running = OpenStream(slow)
    running.first_event()
    queued = OpenStream(slow)
    wait_for_metric(slow, 1, "vllm:num_requests_waiting")
    queued.leave()
    wait_for_metric(slow, 0, "vllm:num_requests_waiting")
    assert metric(slow, "vllm:num_requests_running") == 1
    running.leave()
    wait_for_metric(slow, 0, "tailrace_requests_open")


def test_what_the_engine_refuses_keeps_its_own_status(slow: LiveWorker) -> None:
    running = OpenStream(slow)
    running.first_event()
    queued = [OpenStream(slow) for _ in range(2)]
    wait_for_metric(slow, 2, "vllm:num_requests_waiting")
    answer = post(slow, "/v1/chat/completions", ENDLESS | {"stream": True})
    assert (answer.status, answer.code, answer.headers["retry-after"]) == (429, "overloaded", "1")
    for stream in [running, *queued]:
        stream.leave()
    wait_for_metric(slow, 0, "tailrace_requests_open")
    wait_for_metric(slow, 0, "vllm:num_requests_running")


def test_clients_that_come_and_leave_do_not_stop_an_honest_one(slow: LiveWorker) -> None:
    honest = OpenStream(slow, {"max_tokens": 30})
    honest.first_event()
    for _ in range(20):
        OpenStream(slow).leave()
    events = honest.rest()
    assert events[-1].is_done
    honest.leave()
    wait_for_metric(slow, 0, "tailrace_requests_open")


# A client that takes nothing


LARGE = ENDLESS | {"n": 2, "logprobs": True, "top_logprobs": 8, "seed": 1}
"""Logprobs make an answer of a megabyte, more than the buffers on the way hold."""


@pytest.fixture
def hasty(text_model: TextModel) -> Iterator[LiveWorker]:
    settings = WorkerSettings(port=0, stall_timeout_s=0.2)
    with live_worker(text_model, settings=settings, send_buffer_bytes=8_192) as worker:
        yield worker


@pytest.fixture
def unread(hasty: LiveWorker) -> Iterator[socket.socket]:
    """A connection whose client reads nothing."""
    parts = urlsplit(hasty.url)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        sock.connect((parts.hostname, parts.port))
        yield sock


def send_chat(sock: socket.socket, request: dict[str, Any]) -> None:
    body = json.dumps(request).encode()
    sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


def test_a_client_that_takes_nothing_is_disconnected(hasty: LiveWorker, unread: socket.socket) -> None:
    send_chat(unread, LARGE | {"stream": True})
    wait_for_metric(hasty, 1, "tailrace_requests_total", label="cancelled")
    wait_for_metric(hasty, 0, "tailrace_requests_open")
    wait_for_metric(hasty, 0, "vllm:num_requests_running")


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_an_answer_behind_one_that_nobody_takes_holds_no_slot(
    hasty: LiveWorker, unread: socket.socket, is_stream: bool
) -> None:
    """Its first bytes, perhaps also its last, wait for the client, who never comes."""
    send_chat(unread, LARGE)
    wait_for_metric(hasty, 1, "tailrace_requests_total", label="ok")
    send_chat(unread, CHAT | {"stream": is_stream})
    wait_for_metric(hasty, 1, "tailrace_requests_total", label="cancelled")
    wait_for_metric(hasty, 0, "tailrace_requests_open")


# Engines that fail


def test_a_killed_engine_ends_its_streams_with_a_label_and_the_next_one_serves(text_model: TextModel) -> None:
    with live_worker(text_model, step_fixed_ms=5.0) as worker:
        streams = [OpenStream(worker), OpenStream(worker, {"n": 2})]
        for stream in streams:
            stream.first_event()
        pid = worker.engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        for stream in streams:
            last = stream.rest()[-1]
            assert json.loads(last.data)["error"]["code"] == "engine_died"
            stream.leave()
        wait_for_metric(worker, 1, "tailrace_engine_ready")
        assert metric(worker, "tailrace_engine_restarts_total") == 1
        assert metric(worker, "tailrace_requests_total", label="engine_died") == 2
        assert post(worker, "/v1/chat/completions", CHAT).status == 200


def test_a_whole_answer_whose_engine_dies_is_a_bad_gateway(text_model: TextModel) -> None:
    with live_worker(text_model, faults=ModeledFaults(die_token=7)) as worker:
        answer = post(worker, "/v1/completions", {"model": "modeled", "prompt": [7, 8]})
        assert (answer.status, answer.code) == (502, "engine_died")


def test_a_step_that_fails_ends_only_its_culprit(text_model: TextModel) -> None:
    with live_worker(text_model, faults=ModeledFaults(fail_token=7), step_fixed_ms=5.0) as worker:
        honest = OpenStream(worker, {"max_tokens": 40})
        honest.first_event()
        answer = post(worker, "/v1/completions", {"model": "modeled", "prompt": [[8, 9], [7, 8]], "stream": True})
        last = SseParser().feed(answer.body)[-1].data if answer.status == 200 else answer.body
        assert json.loads(last)["error"]["code"] == "engine_failed"
        assert honest.rest()[-1].is_done
        honest.leave()


# The end of the process


def test_a_drain_finishes_what_runs_and_refuses_what_comes(text_model: TextModel) -> None:
    with live_worker(text_model, step_fixed_ms=10.0) as worker:
        stream = OpenStream(worker, {"max_tokens": 60})
        stream.first_event()
        worker.press_stop()
        until = time.monotonic() + WAIT_S
        while Phase.DRAINING not in worker.phases:
            assert time.monotonic() < until
        refused = post(worker, "/v1/chat/completions", CHAT)
        assert (refused.status, refused.code, refused.headers["retry-after"]) == (503, "draining", "1")
        assert call(worker, "GET", "/ready").status == 503
        assert stream.rest()[-1].is_done
        stream.leave()
        assert worker.join() is ServerEnd.DRAINED


def test_a_drain_that_takes_too_long_ends_what_runs_with_a_label(text_model: TextModel) -> None:
    settings = WorkerSettings(port=0, drain_timeout_s=0.05)
    with live_worker(text_model, settings=settings, step_fixed_ms=20.0) as worker:
        stream = OpenStream(worker)
        stream.first_event()
        worker.press_stop()
        assert json.loads(stream.rest()[-1].data)["error"]["code"] == "draining"
        stream.leave()
        assert worker.join() is ServerEnd.DRAIN_TIMEOUT


def test_a_second_signal_stops_at_once(text_model: TextModel) -> None:
    with live_worker(text_model, step_fixed_ms=20.0) as worker:
        stream = OpenStream(worker)
        stream.first_event()
        worker.press_stop()
        worker.press_stop()
        assert worker.join() is ServerEnd.STOPPED
        stream.leave()


class Process:
    """A worker in a process of its own, which the real signals reach."""

    def __init__(self, folder: Path) -> None:
        script = str(Path(__file__).with_name("live_worker.py"))
        self.popen = subprocess.Popen([sys.executable, script, str(folder)], stdout=subprocess.PIPE, text=True)
        phase, url = self.line().split()
        assert phase == Phase.LISTENING
        self.url = url

    def line(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().strip()

    def end(self) -> tuple[int, str]:
        """Exit code and the last line."""
        out, _ = self.popen.communicate(timeout=WAIT_S)
        return self.popen.returncode, out.splitlines()[-1]


@pytest.fixture
def process(text_folder: Path) -> Iterator[Process]:
    started = Process(text_folder)
    yield started
    if started.popen.poll() is None:
        started.popen.kill()
        started.popen.communicate()


def test_sigterm_drains_and_exits_with_zero(process: Process) -> None:
    stream = OpenStream(process, {"max_tokens": 20})
    stream.first_event()
    process.popen.send_signal(signal.SIGTERM)
    assert process.line().split()[0] == Phase.DRAINING
    assert stream.rest()[-1].is_done
    stream.leave()
    assert process.end() == (0, ServerEnd.DRAINED)


def test_a_second_sigterm_stops_the_process_at_once(process: Process) -> None:
    stream = OpenStream(process)
    stream.first_event()
    process.popen.send_signal(signal.SIGTERM)
    assert process.line().split()[0] == Phase.DRAINING
    process.popen.send_signal(signal.SIGTERM)
    assert process.end() == (0, ServerEnd.STOPPED)
    stream.leave()


def test_a_port_in_use_is_named(worker: LiveWorker) -> None:
    port = urlsplit(worker.url).port
    assert port is not None
    with pytest.raises(StartFailed, match=f"port {port} on 127.0.0.1 is in use.*--port"):
        bind(WorkerSettings(port=port))


def test_an_address_that_is_not_ours_is_named() -> None:
    for host in ("192.0.2.1", "a..b", "a" * 300):
        with pytest.raises(StartFailed, match="--host"):
            bind(WorkerSettings(host=host, port=0))
