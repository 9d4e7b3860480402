"""A stream server with known instants: what a load generator is held against. Shares no code with the package.

`python pacing_server.py --script FILE [--port 0]` prints `listening PORT` and serves OpenAI's routes on loopback with
plain blocking sockets, one thread a connection. A script says which chunks a stream has, when each is due (counted
from the instant the request was fully read) and what usage says; `Script` lists its fields. A chunk is sent at its
absolute instant: sleep until shortly before it, then spin.

The log holds for every request CLOCK_MONOTONIC instants (all processes of one host read the same clock): request
read, headers sent, and for each chunk the instants just before `send` was called and just after it returned, with its
tokens. A chunk became readable between the two.

`PUT /script` replaces the script and empties the log; `GET /log` returns it. A request may carry a script of its own
in the field `pacing`.
"""

import argparse
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import count
from typing import Any

SPIN_NS = 300_000
"""Sleep ends this much before the instant: more than the kernel's usual lateness."""
HEAD_BYTES_MAX = 64 * 1024
BODY_BYTES_MAX = 64 * 1024 * 1024
WORDS = (" the", " of", " and", " to", " in", " is", " that", " for", " it", " with", " as", " was", " on", " be")
"""Each is one token of most vocabularies, also inside a text."""
PROMPT_OVERHEAD = 5
"""Tokens that every prompt costs beside its words."""


@dataclass(frozen=True)
class Script:
    """One stream. Times are milliseconds; lists are repeated as often as needed."""

    first_ms: float = 20.0
    """Request read to the first chunk with tokens."""
    gaps_ms: list[float] = field(default_factory=lambda: [10.0])
    """Before each later chunk with tokens."""
    tokens: list[int] = field(default_factory=lambda: [1])
    """Of each chunk after the first."""
    first_tokens: int = 1
    num_tokens: int | None = None
    """Of the answer; None: what the request asks for."""
    headers_ms: float = 0.0
    """Request read to the response's headers."""
    role_ms: float | None = 0.0
    """When a chunk with the role alone is sent; None: none. Chat only."""
    num_reasoning: int = 0
    """So many chunks at the beginning are reasoning."""
    reasoning_field: str = "reasoning_content"
    empty_every: int = 0
    """After every so many chunks comes one without text, in the middle of the gap."""
    stall_after: int | None = None
    """Chunk (from 0) before which `stall_ms` is added."""
    stall_ms: float = 0.0
    burst_last: int = 0
    """So many chunks at the end have no gap before them."""
    finish_with_last: bool = False
    """The finish reason comes with the last token, not in a chunk of its own."""
    tail_ms: float = 0.0
    """Last token to finish chunk, usage and `[DONE]`."""
    usage: str = "asked"
    """`asked`: as `stream_options` says; `never`; `always`."""
    continuous: bool = True
    """Whether `continuous_usage_stats` is known here."""
    done: bool = True
    keep_alive: bool = True
    """False: the connection closes after the answer."""


@dataclass
class Due:
    """One chunk to send."""

    offset_ns: int
    kind: str
    """`role`, `content`, `reasoning`, `empty`, `finish`."""
    tokens: int = 0


@dataclass
class Served:
    """Log of one request; ns of CLOCK_MONOTONIC."""

    index: int
    path: str
    request_id: str
    num_asked: int | None
    num_prompt: int
    stream: bool
    read_ns: int
    headers_ns: int | None = None
    chunks: list[tuple[int, int, int, int, str]] = field(default_factory=list)
    """(due, before send, after send, tokens, kind), terminators left out."""
    done_ns: int | None = None
    """After the last byte."""


def schedule(script: Script, num_tokens: int, *, chat: bool) -> list[Due]:
    """The chunks with their instants from the request's; terminators are not here."""
    due: list[Due] = []
    if script.role_ms is not None and chat:
        due.append(Due(_ns(script.role_ms), "role"))
    sizes = list(_sizes(script, num_tokens))
    at_ms = script.first_ms
    for i, size in enumerate(sizes):
        gap_ms = script.gaps_ms[(i - 1) % len(script.gaps_ms)] if i else 0.0
        if i and i >= len(sizes) - script.burst_last:
            gap_ms = 0.0
        if script.stall_after == i:
            gap_ms += script.stall_ms
        if i and script.empty_every and i % script.empty_every == 0:
            due.append(Due(_ns(at_ms + gap_ms / 2), "empty"))
        at_ms += gap_ms
        due.append(Due(_ns(at_ms), "reasoning" if chat and i < script.num_reasoning else "content", size))
    if not script.finish_with_last:
        due.append(Due(_ns(at_ms + script.tail_ms), "finish"))
    return due


def _sizes(script: Script, num_tokens: int) -> Iterator[int]:
    left = num_tokens
    for i in count():
        if left <= 0:
            return
        size = min(left, script.first_tokens if i == 0 else script.tokens[(i - 1) % len(script.tokens)])
        left -= size
        yield size


def _ns(ms: float) -> int:
    return round(ms * 1e6)


def wait_until(at_ns: int) -> None:
    while True:
        left_ns = at_ns - time.monotonic_ns()
        if left_ns <= 0:
            return
        if left_ns > SPIN_NS:
            time.sleep((left_ns - SPIN_NS) / 1e9)


class Server:
    def __init__(self, script: Script, port: int = 0) -> None:
        self.script = script
        self.log: list[Served] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", port), backlog=1024)
        self.port: int = self._listener.getsockname()[1]

    def serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._connection, args=(connection,), daemon=True).start()

    def _connection(self, connection: socket.socket) -> None:
        buffer = b""
        with connection:
            try:
                while True:
                    head, buffer = _read_head(connection, buffer)
                    if head is None:
                        return
                    method, path, headers = _parse_head(head)
                    body, buffer = _read_body(connection, buffer, int(headers.get("content-length", "0")))
                    if not self._answer(connection, method, path, headers, body, time.monotonic_ns()):
                        return
            except (OSError, ValueError):
                return

    def _answer(
        self, to: socket.socket, method: str, path: str, headers: dict[str, str], body: bytes, read_ns: int
    ) -> bool:
        """Whether the connection stays open."""
        match method, path.partition("?")[0]:
            case "GET", "/v1/models":
                card = {"id": "paced", "object": "model", "created": 0, "owned_by": "pacing", "max_model_len": 1 << 20}
                _send_json(to, {"object": "list", "data": [card]})
            case "GET", "/health" | "/ping":
                _send_json(to, {})
            case "GET", "/log":
                with self._lock:
                    _send_json(to, {"requests": [vars(each) for each in self.log]})
            case "PUT", "/script":
                with self._lock:
                    self.script, self.log = read_script(json.loads(body)), []
                _send_json(to, {})
            case "POST", "/v1/chat/completions" | "/v1/completions":
                return self._complete(to, path, headers, json.loads(body), read_ns)
            case _:
                _send_json(to, {"error": {"message": f"no route {method} {path}"}}, status="404 Not Found")
        return True

    def _complete(
        self, to: socket.socket, path: str, headers: dict[str, str], body: dict[str, Any], read_ns: int
    ) -> bool:
        script = read_script(body["pacing"]) if "pacing" in body else self.script
        chat = "messages" in body
        asked = body.get("max_completion_tokens") or body.get("max_tokens")
        with self._lock:
            served = Served(
                index=len(self.log),
                path=path,
                request_id=headers.get("x-request-id", ""),
                num_asked=asked,
                num_prompt=_count_prompt(body),
                stream=bool(body.get("stream")),
                read_ns=read_ns,
            )
            self.log.append(served)
        num_tokens = script.num_tokens if script.num_tokens is not None else asked or 16
        if not body.get("stream"):
            _send_whole(to, body, served, num_tokens, chat=chat)
            return True
        _Stream(to, script, served, body, num_tokens, chat=chat).run()
        return script.keep_alive


class _Stream:
    """One streamed answer."""

    def __init__(
        self, to: socket.socket, script: Script, served: Served, body: dict[str, Any], num_tokens: int, *, chat: bool
    ) -> None:
        options = body.get("stream_options") or {}
        asked = bool(options.get("include_usage"))
        self._to, self._script, self._served, self._chat = to, script, served, chat
        self._num_tokens = num_tokens
        self._final_usage = script.usage == "always" or (script.usage == "asked" and asked)
        self._continuous = (
            script.continuous and script.usage != "never" and asked and bool(options.get("continuous_usage_stats"))
        )
        self._head = {
            "id": f"paced-{served.index}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 1,  # 1970: no client may look at it
            "model": body.get("model", "paced"),
        }
        self._num_sent = 0

    def run(self) -> None:
        script, served = self._script, self._served
        due = schedule(script, self._num_tokens, chat=self._chat)
        # Made beforehand: between an instant and its send there is no work.
        payloads = [self._payload(each, last=each is due[-1]) for each in due]
        wait_until(served.read_ns + _ns(script.headers_ms))
        self._to.sendall(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"date: Thu, 01 Jan 1970 00:00:01 GMT\r\ntransfer-encoding: chunked\r\n"
            + (b"" if script.keep_alive else b"connection: close\r\n")
            + b"\r\n"
        )
        served.headers_ns = time.monotonic_ns()
        for each, payload in zip(due, payloads, strict=True):
            due_ns = served.read_ns + each.offset_ns
            wait_until(due_ns)
            before_ns = time.monotonic_ns()
            self._to.sendall(payload)
            served.chunks.append((due_ns, before_ns, time.monotonic_ns(), each.tokens, each.kind))
        self._to.sendall(self._end() + b"0\r\n\r\n")
        served.done_ns = time.monotonic_ns()

    def _payload(self, due: Due, *, last: bool) -> bytes:
        text = "".join(WORDS[(self._num_sent + i) % len(WORDS)] for i in range(due.tokens))
        self._num_sent += due.tokens
        is_end = due.kind == "finish" or (last and self._script.finish_with_last)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if is_end else None}
        if self._chat:
            choice["delta"] = self._delta(due.kind, text)
        else:
            choice["text"] = text
        chunk: dict[str, Any] = self._head | {"choices": [choice]}
        if self._continuous:
            chunk["usage"] = self._usage()
        return _event(json.dumps(chunk))

    def _delta(self, kind: str, text: str) -> dict[str, Any]:
        match kind:
            case "role":
                return {"role": "assistant", "content": ""}
            case "reasoning":
                return {self._script.reasoning_field: text}
            case "finish":
                return {}
            case _:
                return {"content": text}

    def _end(self) -> bytes:
        end = b""
        if self._final_usage:
            end = _event(json.dumps(self._head | {"choices": [], "usage": self._usage()}))
        return end + (_event("[DONE]") if self._script.done else b"")

    def _usage(self) -> dict[str, int]:
        prompt = self._served.num_prompt
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._num_sent,
            "total_tokens": prompt + self._num_sent,
        }


def read_script(value: dict[str, Any]) -> Script:
    """Raises ValueError for a field that no script has."""
    unknown = value.keys() - {each.name for each in fields(Script)}
    if unknown:
        raise ValueError(f"a script has no {', '.join(sorted(unknown))}")
    return Script(**value)


def _event(data: str) -> bytes:
    payload = f"data: {data}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def _send_json(to: socket.socket, value: object, status: str = "200 OK") -> None:
    body = json.dumps(value).encode()
    to.sendall(
        f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    )


def _send_whole(to: socket.socket, body: dict[str, Any], served: Served, num_tokens: int, *, chat: bool) -> None:
    text = "".join(WORDS[i % len(WORDS)] for i in range(num_tokens))
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
    choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    total = served.num_prompt + num_tokens
    usage = {"prompt_tokens": served.num_prompt, "completion_tokens": num_tokens, "total_tokens": total}
    kind = "chat.completion" if chat else "text_completion"
    head = {"id": f"paced-{served.index}", "object": kind, "created": 1, "model": body.get("model", "paced")}
    _send_json(to, head | {"choices": [choice], "usage": usage})
    served.done_ns = time.monotonic_ns()


def _count_prompt(body: dict[str, Any]) -> int:
    """Words, or the ids given: this server's idea of a token."""
    if "messages" in body:
        texts = [message.get("content") or "" for message in body["messages"]]
        flat = " ".join(t if isinstance(t, str) else " ".join(part.get("text", "") for part in t) for t in texts)
        return PROMPT_OVERHEAD + len(flat.split())
    prompt = body.get("prompt", "")
    return PROMPT_OVERHEAD + (len(prompt.split()) if isinstance(prompt, str) else len(prompt))


def _read_head(connection: socket.socket, buffer: bytes) -> tuple[bytes | None, bytes]:
    while b"\r\n\r\n" not in buffer:
        data = connection.recv(65_536)
        if not data or len(buffer) > HEAD_BYTES_MAX:
            return None, b""
        buffer += data
    head, _, rest = buffer.partition(b"\r\n\r\n")
    return head, rest


def _parse_head(head: bytes) -> tuple[str, str, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ", 2)
    pairs = (line.partition(":") for line in lines)
    return method, path, {name.strip().lower(): value.strip() for name, _, value in pairs}


def _read_body(connection: socket.socket, buffer: bytes, length: int) -> tuple[bytes, bytes]:
    if not 0 <= length <= BODY_BYTES_MAX:
        raise ValueError("a body that large is not read")
    parts, have = [buffer], len(buffer)
    while have < length:
        data = connection.recv(min(1 << 20, length - have))
        if not data:
            raise ValueError("the request was cut")
        parts.append(data)
        have += len(data)
    whole = b"".join(parts)
    return whole[:length], whole[length:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--script", help="JSON file with a script's fields")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    script = Script()
    if options.script:
        with open(options.script, encoding="utf-8") as file:
            script = read_script(json.load(file))
    # The default, 5 ms, is how long a thread that is due may wait for one that computes.
    sys.setswitchinterval(1e-4)
    server = Server(script, options.port)
    print(f"listening {server.port}", flush=True)
    server.serve()


if __name__ == "__main__":
    main()
