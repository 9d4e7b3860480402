"""The reader thread over a real socket pair; its end of the process is tested in tests/e2e/test_engine_faults.py."""

import socket
import threading
from collections.abc import Iterator

import pytest

from tailrace.request import RequestId
from tailrace.worker import engine_inbox
from tailrace.worker.channel import Cancel, ReadSteps, Stop, ToEngine, encode_frame
from tailrace.worker.engine_inbox import Inbox, read_commands


class Reader:
    """A reader thread that leaves instead of ending this test's process."""

    def __init__(self) -> None:
        self.app, engine = socket.socketpair()
        self.inbox = Inbox()
        self.cancelled: list[RequestId] = []
        self.closed = threading.Event()
        self._engine = engine
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with pytest.raises(SystemExit):
            read_commands(self._engine, self.inbox, self.cancelled.append, self.closed.set)

    def end(self) -> None:
        self.app.close()
        self._thread.join()
        self._engine.close()


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(engine_inbox.os, "_exit", leave)
    monkeypatch.setattr(engine_inbox, "_LEAVE_S", 0.0)
    reader = Reader()
    yield reader
    reader.end()


def take_all(inbox: Inbox, num: int) -> list[ToEngine]:
    taken: list[ToEngine] = []
    while len(taken) < num:
        commands = inbox.take(60)
        assert commands, "nothing came within a minute"
        taken += commands
    return taken


def test_commands_arrive_in_order_and_a_cancel_is_told_at_once(reader: Reader) -> None:
    sent: list[ToEngine] = [ReadSteps(1), Cancel(RequestId("a")), ReadSteps(2)]
    for command in sent:
        reader.app.sendall(encode_frame(command))
    assert take_all(reader.inbox, 3) == sent
    assert reader.cancelled == ["a"]


def test_stop_closes_the_inbox_in_good_order(reader: Reader) -> None:
    reader.app.sendall(encode_frame(Stop()))
    assert reader.closed.wait(60)
    assert reader.inbox.closed
    assert reader.inbox.fault is None


def test_the_end_of_the_app_closes_the_inbox_in_good_order(reader: Reader) -> None:
    reader.app.close()
    assert reader.closed.wait(60)
    assert reader.inbox.closed
    assert reader.inbox.fault is None


@pytest.mark.parametrize("junk", [b"\x03\0\0\0abc", b"\xff\xff\xff\xff"])
def test_a_malformed_frame_closes_the_inbox_and_names_the_fault(reader: Reader, junk: bytes) -> None:
    reader.app.sendall(junk)
    assert reader.closed.wait(60)
    assert reader.inbox.fault is not None
    assert "malformed" in reader.inbox.fault


def test_what_came_before_the_close_is_still_taken(reader: Reader) -> None:
    reader.app.sendall(encode_frame(ReadSteps(7)) + encode_frame(Stop()))
    assert reader.closed.wait(60)
    assert reader.inbox.take(None) == [ReadSteps(7)]
    assert reader.inbox.take(None) == [], "a closed inbox never blocks"


def test_a_full_inbox_holds_the_reader_until_something_is_taken(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_inbox, "COMMANDS_MAX", 2)
    sent: list[ToEngine] = [ReadSteps(i) for i in range(20)]
    reader.app.sendall(b"".join(map(encode_frame, sent)))
    taken: list[ToEngine] = []
    while len(taken) < 20:
        commands = reader.inbox.take(60)
        assert 0 < len(commands) <= 2
        taken += commands
    assert taken == sent


def test_taking_from_an_empty_inbox_without_waiting_returns_at_once() -> None:
    assert Inbox().take(0) == []
