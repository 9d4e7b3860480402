"""Connections that never become a request: what they may hold of the worker, in bytes and seconds."""

import json
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from live_worker import WAIT_S, LiveWorker, live_worker

from tailrace.model.text import TextModel
from tailrace.worker.serve import HEAD_BYTES_MAX
from tailrace.worker.settings import WorkerSettings

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
TOO_MUCH = 64 * HEAD_BYTES_MAX


@pytest.fixture(scope="module")
def hasty(text_model: TextModel) -> Iterator[LiveWorker]:
    with live_worker(text_model, settings=WorkerSettings(port=0, keep_alive_s=1), step_fixed_ms=20) as live:
        yield live


@pytest.fixture
def sock(hasty: LiveWorker) -> Iterator[socket.socket]:
    parts = urlsplit(hasty.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=WAIT_S) as connected:
        yield connected


def send_until_refused(sock: socket.socket, piece: bytes) -> bytes:
    """What came back; fails when the other end takes `TOO_MUCH`."""
    try:
        for _ in range(TOO_MUCH // len(piece)):
            sock.sendall(piece)
    except (BrokenPipeError, ConnectionResetError):
        return b""
    # Small enough for the buffers on the way; the answer tells whether it was taken.
    return read_to_end(sock)


def read_to_end(sock: socket.socket) -> bytes:
    received = b""
    try:
        while data := sock.recv(65_536):
            received += data
    except ConnectionResetError:
        pass
    return received


def num_whole_answers(worker: LiveWorker) -> float | None:
    labels = {"model_name": "modeled", "finished_reason": "length"}
    return worker.service.metrics.registry.get_sample_value("vllm:request_success_total", labels)


def wait_until_free(worker: LiveWorker) -> None:
    until = time.monotonic() + WAIT_S
    while worker.service.num_open or worker.engine.num_open:
        assert time.monotonic() < until, "a request stayed open"
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (HEAD + b"x-long: ", b"a" * 65_536),
        (HEAD, b"x-many: 1\r\n" * 4_096),
        (b"GET /", b"a" * 65_536),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"x-trailer: 1\r\n" * 4_096),
    ],
    ids=["header", "headers", "url", "trailers"],
)
def test_a_head_without_end_is_refused(sock: socket.socket, hasty: LiveWorker, start: bytes, piece: bytes) -> None:
    sock.sendall(start)
    answer = send_until_refused(sock, piece)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")
    wait_until_free(hasty)


@pytest.mark.parametrize("start", [b"GET /health HT", b"\r\n", HEAD + b"x-a: 1\r\n"])
def test_a_head_that_does_not_arrive_closes_its_connection(sock: socket.socket, start: bytes) -> None:
    sock.sendall(start)
    assert read_to_end(sock) == b""


def test_a_long_head_that_ends_is_served(sock: socket.socket) -> None:
    sock.sendall(b"GET /health HTTP/1.1\r\nconnection: close\r\nx-long: " + b"a" * (HEAD_BYTES_MAX // 2) + b"\r\n\r\n")
    assert read_to_end(sock).startswith(b"HTTP/1.1 200 ")


def test_a_body_of_many_small_chunks_is_served(sock: socket.socket) -> None:
    body = json.dumps({"prompt": "x" * (2 * HEAD_BYTES_MAX)}).encode()
    sock.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n")
    sock.sendall(b"".join(b"2\r\n%b\r\n" % body[i : i + 2].ljust(2) for i in range(0, len(body), 2)) + b"0\r\n\r\n")
    assert read_to_end(sock).startswith(b"HTTP/1.1 200 ")


def test_an_answer_that_takes_long_is_not_cut(sock: socket.socket) -> None:
    """Longer than the time that a head may take."""
    body = json.dumps({"model": "modeled", "prompt": "x", "max_tokens": 100, "ignore_eos": True}).encode()
    sock.sendall(HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    answer = read_to_end(sock)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b'"completion_tokens":100' in answer


def test_a_second_request_behind_a_running_one_ends_both(sock: socket.socket, hasty: LiveWorker) -> None:
    before = num_whole_answers(hasty)
    body = json.dumps({"model": "modeled", "prompt": "x", "max_tokens": 500, "ignore_eos": True}).encode()
    sock.sendall((HEAD + b"content-length: %d\r\n\r\n" % len(body) + body) * 2)
    assert read_to_end(sock) == b""
    wait_until_free(hasty)
    # The answer that nobody reads was not computed to its end.
    assert num_whole_answers(hasty) == before


def test_requests_after_each_other_share_a_connection(sock: socket.socket) -> None:
    for path in (b"/health", b"/version", b"/health"):
        sock.sendall(b"GET " + path + b" HTTP/1.1\r\nhost: x\r\n\r\n")
        assert sock.recv(65_536).startswith(b"HTTP/1.1 200 ")
