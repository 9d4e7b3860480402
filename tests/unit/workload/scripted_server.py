"""A server of scripted bytes on a raw socket, and a client run against it. What it sends is written in the test."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from tailrace.measure.record import RequestRecord
from tailrace.workload.job import AnswerText, BodyOptions, Endpoint, Finished, PlanSource, Realisation, SendJob
from tailrace.workload.plan import PlannedSession, PlannedTurn, Segment
from tailrace.workload.send.sender import Sender

NS_PER_S = 1_000_000_000
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PLAIN_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"

Answer = Callable[[int, bytes, asyncio.StreamWriter], Awaitable[None]]
"""(number of the request, from 0; its body; where to write)."""


def event(**chunk: object) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def words(*texts: str, finish: str | None = None, usage: int | None = None) -> bytes:
    """One event a text, then the finish and the usage where given."""
    events = [event(choices=[{"index": 0, "delta": {"content": text}}]) for text in texts]
    if finish is not None:
        events.append(event(choices=[{"index": 0, "delta": {}, "finish_reason": finish}]))
    if usage is not None:
        events.append(event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": usage}))
    return b"".join(events)


def http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def whole_stream(data: bytes) -> bytes:
    """An answer in one write, ended as HTTP says."""
    return STREAM_HEAD + http_chunk(data) + b"0\r\n\r\n"


def plain(status: int, content: bytes, kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


DONE = b"data: [DONE]\n\n"
GOOD = words("one", " two", " three", finish="length", usage=3) + DONE


def always(data: bytes, *, close: bool = False) -> Answer:
    async def answer(_: int, __: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        if close:
            writer.close()

    return answer


class ScriptedServer:
    def __init__(self) -> None:
        self.url = ""
        self.num_connections = 0
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.writers: list[asyncio.StreamWriter] = []


@asynccontextmanager
async def scripted(answer: Answer) -> AsyncIterator[ScriptedServer]:
    served = ScriptedServer()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.num_connections += 1
        served.writers.append(writer)
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(lengths[0].split(b":")[1])) if lengths else b""
                number = len(served.bodies)
                served.heads.append(head)
                served.bodies.append(body)
                await answer(number, body, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 24)
    served.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield served
    finally:
        server.close()
        for writer in served.writers:
            writer.close()


class ListedPlan:
    """Sessions as listed; open at the instants given, or closed with so many clients."""

    offered_per_s: float | None = None
    schedule_sha256 = ""

    def __init__(
        self,
        sessions: Sequence[PlannedSession],
        *,
        num_clients: int | None = None,
        window_start_ns: int = 0,
        window_end_ns: int | None = 60 * NS_PER_S,
        num_window_requests: int | None = None,
        endless: bool = False,
    ) -> None:
        self._sessions = sessions
        self.num_sessions = None if endless else len(sessions)
        self.num_clients = num_clients
        self.window_start_ns = window_start_ns
        self.window_end_ns = window_end_ns
        self.num_window_requests = num_window_requests

    def scheduled_ns(self, index: int) -> int | None:
        return None if self.num_clients else self.session(index).scheduled_ns

    def session(self, index: int) -> PlannedSession:
        return self._sessions[index % len(self._sessions)]


def turn(name: str, *, tokens: int = 3, think_ns: int = 0, cancel: int | None = None) -> PlannedTurn:
    return PlannedTurn(
        request_id=name,
        user=(Segment(name, 5),),
        num_output_tokens=tokens,
        think_ns=think_ns,
        cancel_after_tokens=cancel,
    )


def session(name: str, *turns: PlannedTurn, at_ns: int | None = 0) -> PlannedSession:
    return PlannedSession(session_id=name, scheduled_ns=at_ns, turns=turns or (turn(f"{name}-0"),))


def arrivals(count: int, gap_ns: int = 1_000_000) -> list[PlannedSession]:
    return [session(f"s{i}", at_ns=i * gap_ns) for i in range(count)]


class PlainBodies:
    """The turn's name and the answers so far, as JSON."""

    def body(self, planned: PlannedSession, turn_index: int, answers: Sequence[str]) -> bytes:
        return json.dumps({"turn": planned.turns[turn_index].request_id, "answers": list(answers)}).encode()


class Sent(msgspec.Struct):
    finished: Finished
    records: list[RequestRecord]
    texts: list[AnswerText]

    @property
    def only(self) -> RequestRecord:
        (record,) = self.records
        return record


async def send(
    plan: ListedPlan,
    url: str,
    *,
    timeout_ns: int = 60 * NS_PER_S,
    num_in_flight_max: int = 1_000,
    keep_text: bool = False,
    shard: int = 0,
    num_shards: int = 1,
    during: Callable[[Sender], Awaitable[None]] | None = None,
    stops_when_done: bool = True,
) -> Sent:
    """A run to its window's end, in this loop; `during` runs beside it and may stop it (must, without
    `stops_when_done`)."""
    with tempfile.TemporaryDirectory() as folder:
        rows_path = str(Path(folder) / "rows.jsonl")
        job = SendJob(
            source=PlanSource(
                workload_toml="",
                arrivals="constant:1",
                seed=0,
                run_id="r",
                duration_s=1.0,
                num_requests=None,
                warmup_s=0.0,
            ),
            endpoint=Endpoint(base_url=url, model="m"),
            realisation=Realisation(words=("word",)),
            options=BodyOptions(),
            shard=shard,
            num_shards=num_shards,
            timeout_ns=timeout_ns,
            num_in_flight_max=num_in_flight_max,
            rows_path=rows_path,
            keep_text=keep_text,
        )
        loop = asyncio.get_running_loop()
        senders: list[Sender] = []
        sender = Sender(job, plan, PlainBodies(), lambda _: stops_when_done and loop.call_soon(senders[0].stop))
        senders.append(sender)
        loop.set_exception_handler(lambda _, context: sender.fail(context.get("exception") or RuntimeError(context)))
        await sender.prepare()
        beside = asyncio.create_task(during(sender)) if during is not None else None
        finished = await sender.run(_now_ns() + 1_000_000)
        if beside is not None:
            await beside
        rows = msgspec.json.Decoder(RequestRecord).decode_lines(Path(rows_path).read_bytes())
        texts = Path(rows_path + ".texts")
        kept = msgspec.json.Decoder(AnswerText).decode_lines(texts.read_bytes()) if texts.exists() else []
        return Sent(finished, rows, kept)


def _now_ns() -> int:
    import time

    return time.monotonic_ns()
