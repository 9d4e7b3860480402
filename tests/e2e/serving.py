"""A real `tailrace serve` for tests: the command line as a process, on a free loopback port, with the packaged model.

Every wait ends on an event or on a scrape and has a bound that only a hang reaches. Only processes started here are
signalled: the service and, found as its child, its engine.
"""

import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from tailrace.wire.sse import SseEvent, SseParser

TAILRACE = str(Path(sys.executable).parent / "tailrace")
WAIT_S = 120
"""Bound that only a hang reaches, on a machine with many neighbours."""
_POLL_S = 0.005
MODEL = "smollm2"
ANSWER: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Name a river."}], "temperature": 0}
ENDLESS = ANSWER | {"ignore_eos": True}
"""Answers until the context is full."""


class Answer:
    """What came back, read to its end."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.body = response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return str(self.json["error"]["code"])


class Served:
    """One running service."""

    def __init__(self, arguments: tuple[str, ...]) -> None:
        self.process = subprocess.Popen(
            [TAILRACE, "serve", MODEL, "--port", "0", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.url = ""
        self._said: list[str] = []
        self._news = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, name="served-stderr")
        self._reader.start()

    @property
    def said(self) -> str:
        with self._news:
            return "".join(self._said)

    def wait_said(self, pattern: str) -> re.Match[str]:
        """Waits until standard error has a match."""

        def found() -> re.Match[str] | None:
            return re.search(pattern, "".join(self._said))

        with self._news:
            self._news.wait_for(lambda: found() or self._ended, WAIT_S)
            match = found()
        assert match is not None, f"the service did not say {pattern!r}:\n{self.said}"
        return match

    def wait_exit(self) -> int:
        code = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        return code

    def stop(self) -> None:
        """The second signal ends it at once; its engine leaves with it."""
        for _ in range(2):
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                time.sleep(_POLL_S)  # two signals in one instant are one signal
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.wait_exit()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def engine_pid(self) -> int:
        """The only child of the service."""
        (pid,) = _children(self.process.pid)
        return pid

    # HTTP

    def connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        assert parts.hostname == "127.0.0.1"
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=WAIT_S)

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = self.connect()
        try:
            # A body that is refused before it is read breaks the pipe; the answer is there all the same.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, path, data, headers or {})
            return Answer(connection.getresponse())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.call("GET", path, None, headers)

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        return self.call("POST", path, body, headers)

    def metric(self, name: str, **labels: str) -> float:
        """A sample of `/metrics`, by its full name."""
        for family in text_string_to_metric_families(self.get("/metrics").body.decode()):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return float(sample.value)
        raise AssertionError(f"no metric {name} {labels}")

    def wait_for(self, holds: Callable[[], bool], what: str) -> None:
        """A scrape is the only way in from outside, so it is repeated."""
        until = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < until, f"waited in vain: {what}\n{self.said}"
            assert self.process.poll() is None, f"the service ended: {self.said}"
            time.sleep(_POLL_S)

    def wait_for_metric(self, wanted: float, name: str, **labels: str) -> None:
        self.wait_for(lambda: self.metric(name, **labels) == wanted, f"{name} becomes {wanted}")

    def wait_idle(self) -> None:
        """No request is open and the engine holds nothing."""
        self.wait_for_metric(0, "tailrace_requests_open")
        self.wait_for_metric(0, "vllm:num_requests_running")
        self.wait_for_metric(0, "vllm:num_requests_waiting")

    def num_steps(self) -> int:
        return round(self.metric("tailrace_step_seconds_count", phase="total"))

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self._said.append(line)
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()


@contextmanager
def served(*arguments: str) -> Iterator[Served]:
    """A service that is ready, with a small pool and context unless told otherwise (a later flag wins)."""
    service = Served(("--kv-memory", "200MB", "--context-tokens-max", "512", *arguments))
    try:
        service.url = service.wait_said(r"(?m)^ready +(http://\S+)/v1$")[1]
        yield service
    finally:
        service.stop()


class Stream:
    """A streamed request whose client reads when it wants to, and may leave at any moment."""

    def __init__(self, service: Served, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        self._connection = service.connect()
        self._connection.request("POST", path, json.dumps(body | {"stream": True}), headers or {})
        self._response: http.client.HTTPResponse | None = None
        self._parser = SseParser()
        self._events: list[SseEvent] = []
        self.raw = b""

    def first_text(self) -> None:
        """Returns when the first text has come."""
        response = self._open()
        while not any(_text_of(event) for event in self._events):
            data = response.read1(65_536)
            assert data, f"the stream ended without text: {self.raw!r}"
            self._take(data)

    def rest(self) -> list[SseEvent]:
        """All events, to the end."""
        self._take(self._open().read())
        self.leave()
        return self._events

    def text(self) -> str:
        """Of all events so far."""
        return "".join(map(_text_of, self._events))

    def leave(self) -> None:
        sock = self._connection.sock
        if sock is not None:
            sock.close()
        if self._response is not None:
            self._response.close()
        self._connection.close()

    def _open(self) -> http.client.HTTPResponse:
        if self._response is None:
            self._response = self._connection.getresponse()
            assert self._response.status == 200, self._response.read()
        return self._response

    def _take(self, data: bytes) -> None:
        self.raw += data
        self._events += self._parser.feed(data)


def finish_reason(events: list[SseEvent]) -> str:
    """Of a stream of one choice that ended well."""
    assert events[-1].is_done, events[-1]
    choices = [choice for event in events[:-1] for choice in json.loads(event.data)["choices"]]
    (reason,) = (choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None)
    return str(reason)


def _text_of(event: SseEvent) -> str:
    if event.is_done:
        return ""
    choices = json.loads(event.data).get("choices", [])
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def _children(parent: int) -> list[int]:
    """Ids of the processes whose parent is `parent` (the fourth field of `stat`, after the name in parentheses)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(entry.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(entry.parent.name))
    return found
