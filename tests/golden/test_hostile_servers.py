"""`tailrace bench` against servers that do everything wrong: each ends in a labelled record and a readable line.

The whole path runs: command line, probes, a sender process, rows, report. The servers are scripts on raw sockets; they
answer what comes before the run well unless a case is about that.
"""

import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tailrace.cli import main

NUM = 2
"""Requests a run."""
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
OPEN = HEAD + b"connection: close\r\n\r\n"
WORKLOAD = (
    'name = "small"\n[[cohorts]]\nprompt_tokens = {law = "constant", value = 8}\n'
    'output_tokens = {law = "constant", value = 3}\n'
)

Answer = Callable[[socket.socket], None]


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(content: str, **more: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": content}}], **more)


FINISH = event(choices=[{"index": 0, "delta": {}, "finish_reason": "length"}])
DONE = b"data: [DONE]\n\n"


def usage(**counts: Any) -> bytes:
    return event(choices=[], usage=counts)


GOOD = text("a") + text(" b") + text(" c") + FINISH + usage(prompt_tokens=8, completion_tokens=3) + DONE


def sends(*parts: bytes) -> Answer:
    def answer(to: socket.socket) -> None:
        for part in parts:
            to.sendall(part)

    return answer


def whole(status: str, body: bytes, kind: str = "application/json", extra: bytes = b"") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n".encode()
    return head + extra + b"\r\n" + body


def until_refused(part: bytes) -> Answer:
    """Goes on until the client has had enough; bounded."""

    def answer(to: socket.socket) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            to.sendall(part)

    return answer


def drip(data: bytes) -> Answer:
    def answer(to: socket.socket) -> None:
        for i in range(len(data)):
            to.sendall(data[i : i + 1])

    return answer


def silent(to: socket.socket) -> None:
    """Until the client leaves."""
    to.settimeout(60)
    to.recv(1)


class HostileServer:
    """One connection, one request; then it closes, unless the script kept it."""

    def __init__(self, answer: Answer, models: Answer | None, probe: Answer | None, num_good: int) -> None:
        self._answer = answer
        self._num_good = num_good
        self._models = models or sends(whole("200 OK", b'{"object":"list","data":[{"id":"m","object":"model"}]}'))
        counted = b'{"choices":[{"message":{"content":"x"}}],"usage":{"prompt_tokens":9,"completion_tokens":1}}'
        self._probe = probe or sends(whole("200 OK", counted))
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept)
        self._acceptor.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join(60)
        for thread in self._threads:
            thread.join(60)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(60)
        with connection:
            try:
                head, body = read_request(connection)
                if head.startswith(b"GET /v1/models"):
                    self._models(connection)
                elif head.startswith(b"GET"):
                    connection.sendall(whole("404 Not Found", b"{}"))
                elif not json.loads(body).get("stream"):
                    self._probe(connection)
                elif self._num_good > 0:
                    self._num_good -= 1
                    connection.sendall(OPEN + GOOD)
                else:
                    self._answer(connection)
                connection.shutdown(socket.SHUT_WR)
            except (OSError, ValueError):
                return


def read_request(connection: socket.socket) -> tuple[bytes, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65_536)
        if not more:
            raise ValueError("no request")
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    length = int(lengths[0].partition(b":")[2]) if lengths else 0
    while len(body) < length:
        more = connection.recv(65_536)
        if not more:
            raise ValueError("the request was cut")
        body += more
    return head, body


@contextmanager
def hostile(
    answer: Answer, models: Answer | None = None, probe: Answer | None = None, *, num_good: int = 0
) -> Iterator[str]:
    """`num_good`: streams that are answered well first, such as the command's own warm-up."""
    server = HostileServer(answer, models, probe, num_good)
    try:
        yield server.url
    finally:
        server.close()


@pytest.fixture
def workload(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(WORKLOAD)
    return str(path)


def bench(url: str, workload: str, *more: str) -> int:
    return main.run([
        "bench", url, "--workload", workload, "--arrivals", "constant:50", "--requests", str(NUM), "--warmup", "0",
        "--no-calibrate", "--senders", "1", "--json", *more,
    ])  # fmt: skip


def report_of(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.out, captured.err
    return json.loads(captured.out)["reports"][0], captured.err


FAULTS: dict[str, tuple[Answer, str, str]] = {
    "wrong key": (sends(whole("401 Unauthorized", b'{"error":{"message":"bad key"}}')), "rejected", "bad key"),
    "wrong model": (sends(whole("404 Not Found", b'{"error":{"message":"no model m"}}')), "rejected", "no model m"),
    "429": (sends(whole("429 Too Many Requests", b'{"error":{"message":"slow down"}}')), "refused", "slow down"),
    "503": (sends(whole("503 Service Unavailable", b"<h1>full</h1>", "text/html")), "refused", "full"),
    "500": (sends(whole("500 Oops", b"\x00\x1b[31m broken \xff")), "failed", "broken"),
    "a redirect": (sends(whole("307 Elsewhere", b"", extra=b"location: http://127.0.0.1:1/\r\n")), "failed", ""),
    "a web page": (sends(whole("200 OK", b"<html>hi</html>", "text/html")), "malformed", "text/html"),
    "JSON, not a stream": (sends(whole("200 OK", b'{"choices":[]}')), "malformed", "application/json"),
    "half a stream": (sends(HEAD + b"content-length: 9999\r\n\r\n" + text("a")), "cut", ""),
    "a stream without end mark": (sends(OPEN + text("a") + text("b")), "cut", "without [DONE]"),
    "closed before any byte": (sends(), "unreachable", "closed"),
    "closed in the headers": (sends(b"HTTP/1.1 200 OK\r\ncont"), "cut", ""),
    "garbage": (sends(bytes(range(256)) * 16), "malformed", "not an HTTP answer"),
    "garbage in the stream": (sends(OPEN + text("a") + b"data: \xff\xfe{{{\n\n"), "malformed", ""),
    "endless headers": (until_refused(b"x: " + b"y" * 4_000 + b"\r\n"), "malformed", ""),
    "endless headers of a good start": (
        lambda to: (to.sendall(HEAD), until_refused(b"x: " + b"y" * 4_000 + b"\r\n")(to))[0], "malformed", "",
    ),
    "an error frame": (sends(OPEN + text("a") + event(error={"message": "no memory"})), "failed", "no memory"),
    "an error frame with a number": (sends(OPEN + text("a") + event(error=7)), "failed", "7"),
    "no token": (sends(OPEN + FINISH + DONE), "empty", "no text"),
    "a role and nothing else": (
        sends(OPEN + event(choices=[{"delta": {"role": "assistant", "content": ""}}]) + FINISH + DONE),
        "empty", "no text",
    ),
    "choices of another type": (sends(OPEN + event(choices="none") + DONE), "malformed", "choices"),
    "usage as text": (sends(OPEN + text("a") + event(choices=[], usage="lots") + DONE), "malformed", "usage"),
    "usage beyond all integers": (
        sends(OPEN + text("a") + b'data: {"choices":[],"usage":{"completion_tokens":1e400}}\n\n' + DONE),
        "malformed", "",
    ),
    "packed bytes": (
        sends(HEAD + b"content-encoding: gzip\r\nconnection: close\r\n\r\n" + gzip.compress(GOOD)), "cut", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_a_label_and_a_line(name: str, workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer, outcome, words = FAULTS[name]
    with hostile(answer) as url:
        assert bench(url, workload) == 0
    report, _ = report_of(capsys)
    assert report["outcomes"] == {outcome: NUM}
    assert report["num_requests"] == NUM
    if words:
        assert any(words in message for message in report["messages"]), report["messages"]
    assert all(message.isprintable() for message in report["messages"])
    for metric in ("ttft_ms", "e2e_ms", "tpot_ms"):
        assert report["metrics"][metric]["percentiles"]["p99"] == "inf", "what fails is no fast answer"
    assert report["rates"]["completed_per_s"] == 0


ENDLESS: dict[str, Answer] = {
    "silence": silent,
    "silence in the stream": lambda to: (to.sendall(OPEN + text("a")), silent(to))[0],
    "tokens for ever": lambda to: (to.sendall(OPEN), until_refused(text("a") + b": still here\n\n")(to))[0],
    "comments for ever": lambda to: (to.sendall(OPEN), until_refused(b": ping\n\n")(to))[0],
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_never_ends_is_a_timeout(name: str, workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    with hostile(ENDLESS[name], num_good=2) as url:
        assert bench(url, workload, "--timeout", "0.5") == 0
    report, _ = report_of(capsys)
    assert report["outcomes"] == {"timeout": NUM}
    assert any("0.5 s" in message for message in report["messages"])


def test_an_event_without_end_is_malformed_or_a_timeout_and_bounded(
    workload: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(to: socket.socket) -> None:
        to.sendall(OPEN + b"data: ")
        until_refused(b"x" * 262_144)(to)

    with hostile(answer, num_good=2) as url:
        assert bench(url, workload, "--timeout", "20", "--arrivals", "closed:1") == 0
    report, _ = report_of(capsys)
    assert set(report["outcomes"]) <= {"malformed", "timeout"}
    assert sum(report["outcomes"].values()) == NUM


ODD_BUT_GOOD: dict[str, tuple[Answer, int | None]] = {
    "a drip of bytes": (drip(OPEN + GOOD), 3),
    "several tokens a chunk": (
        sends(OPEN + text("a b c") + FINISH + usage(prompt_tokens=8, completion_tokens=3) + DONE), 3,
    ),
    "a role first": (sends(OPEN + event(choices=[{"delta": {"role": "assistant"}}]) + GOOD), 3),
    "usage missing": (sends(OPEN + text("a") + text(" b") + FINISH + DONE), None),
    "usage below zero": (sends(OPEN + text("a") + FINISH + usage(prompt_tokens=-5, completion_tokens=-1) + DONE), None),
    "usage absurdly large": (
        sends(OPEN + text("a") + FINISH + usage(prompt_tokens=8, completion_tokens=2**60) + DONE), None,
    ),
    "a huge chunk": (sends(OPEN + text("x" * 4_000_000) + FINISH + usage(completion_tokens=3) + DONE), 3),
    "a clock of another age": (
        sends(HEAD + b"date: Mon, 01 Jan 1900 00:00:00 GMT\r\nage: 99999999\r\nconnection: close\r\n\r\n"
              + text("a", created=-(2**62)) + text(" b", created=2**62) + text(" c", created=0) + FINISH
              + usage(prompt_tokens=8, completion_tokens=3) + DONE), 3,
    ),
    "no [DONE]": (sends(OPEN + text("a") + text(" b") + text(" c") + FINISH
                        + usage(prompt_tokens=8, completion_tokens=3)), 3),
    "no content type": (sends(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + GOOD), 3),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD_BUT_GOOD)
def test_an_odd_answer_that_ends_well_is_measured(name: str, workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer, num_tokens = ODD_BUT_GOOD[name]
    with hostile(answer) as url:
        assert bench(url, workload) == 0
    report, _ = report_of(capsys)
    assert report["outcomes"] == {"ok": NUM}
    output = report["lengths"]["output"]
    assert (output["num"], output["max"]) == ((0, None) if num_tokens is None else (NUM, num_tokens))
    for metric in ("ttft_ms", "e2e_ms"):
        value = report["metrics"][metric]["percentiles"]["p50"]
        assert 0 < value < 60_000, "of this host's monotonic clock, whatever the server says"
    tpot = report["metrics"]["tpot_ms"]
    assert tpot["percentiles"]["p50"] is None or tpot["percentiles"]["p50"] >= 0
    if name in ("several tokens a chunk", "a huge chunk", "usage missing", "usage below zero"):
        assert tpot["num_undefined"] == NUM
    assert report["verdicts"]["output"]["state"] == ("ok" if num_tokens == 3 else report["verdicts"]["output"]["state"])


BEFORE_THE_RUN: dict[str, tuple[Answer, str]] = {
    "a web page": (sends(whole("200 OK", b"<html>", "text/html")), "web page"),
    "not JSON": (sends(whole("200 OK", b"{broken")), "OpenAI-compatible"),
    "another shape": (sends(whole("200 OK", b'{"data": 3}')), "OpenAI-compatible"),
    "no model": (sends(whole("200 OK", b'{"data": []}')), "serves"),
    "wants a key": (sends(whole("401 Unauthorized", b'{"error":{"message":"who are you"}}')), "who are you"),
    "garbage": (sends(b"SSH-2.0-x\r\n"), "127.0.0.1"),
    "closed": (sends(), "127.0.0.1"),
    "a redirect": (sends(whole("301 Moved", b"", extra=b"location: http://127.0.0.1:1/\r\n")), "301"),
    "a huge list": (until_refused(b"x" * 1_000_000), "127.0.0.1"),
}


@pytest.mark.parametrize("name", BEFORE_THE_RUN)
def test_an_address_that_is_no_service_is_one_line(
    name: str, workload: str, capsys: pytest.CaptureFixture[str]
) -> None:
    models, words = BEFORE_THE_RUN[name]
    with hostile(sends(), models) as url:
        assert bench(url, workload) == 5
    assert_one_line(capsys, words)


def test_nobody_there_is_one_line(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert bench(f"http://127.0.0.1:{port}", workload) == 5
    assert_one_line(capsys, f"127.0.0.1:{port}")


def test_a_model_that_is_not_served_is_one_line_with_those_that_are(
    workload: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with hostile(sends()) as url:
        assert bench(url, workload, "--model", "other") == 5
    assert_one_line(capsys, "it serves: m")


@pytest.mark.parametrize("status", ["401 Unauthorized", "500 Oops", "429 Busy"])
def test_a_service_that_refuses_the_first_probe_is_one_line(
    status: str, workload: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with hostile(sends(), probe=sends(whole(status, b'{"error":{"message":"not you"}}'))) as url:
        assert bench(url, workload) == 5
    assert_one_line(capsys, "not you")


def assert_one_line(capsys: pytest.CaptureFixture[str], words: str) -> None:
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.strip().splitlines()[-1]
    assert last.startswith("tailrace: ")
    assert words in last
    assert "Traceback" not in captured.err
