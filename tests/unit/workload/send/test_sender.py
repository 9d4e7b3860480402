"""Every planned request that came due leaves exactly one record, with the label of what happened to it."""

import asyncio
import json
import time
from itertools import pairwise

import pytest
from scripted_server import (
    DONE,
    GOOD,
    NS_PER_S,
    PLAIN_HEAD,
    STREAM_HEAD,
    ListedPlan,
    Sent,
    always,
    arrivals,
    event,
    http_chunk,
    plain,
    scripted,
    send,
    session,
    turn,
    whole_stream,
    words,
)

from tailrace.measure.record import Outcome, RequestRecord, TokenCount
from tailrace.workload.send.connection import QUIET_BYTES_MAX
from tailrace.workload.send.sender import FAILED_PAUSE_NS, Sender


def one_answer(data: bytes, *, close: bool = False, **options: object) -> RequestRecord:
    async def run() -> Sent:
        async with scripted(always(data, close=close)) as server:
            return await send(ListedPlan([session("a")]), server.url, **options)  # type: ignore[arg-type]

    return asyncio.run(run()).only


def assert_times_in_order(record: RequestRecord) -> None:
    named = (record.scheduled_ns, record.issued_ns, record.connected_ns, record.sent_ns, record.headers_ns)
    times = [t for t in named if t is not None]
    times += [record.scheduled_ns + sum(record.chunk_gaps_ns), record.ended_ns] if record.chunk_gaps_ns else []
    assert all(before <= after for before, after in pairwise(times)), times


def test_a_whole_stream_is_one_ok_record_with_every_instant() -> None:
    record = one_answer(whole_stream(GOOD))
    assert record.outcome is Outcome.OK
    assert (len(record.chunk_gaps_ns), record.chunk_tokens, record.token_count) == (3, None, TokenCount.SERVER)
    assert (record.num_output_tokens, record.num_prompt_tokens, record.finish_reason) == (3, 7, "length")
    assert (record.http_status, record.message, record.num_prompt_tokens_asked) == (200, "", 5)
    assert None not in (record.issued_ns, record.connected_ns, record.sent_ns, record.headers_ns)
    assert_times_in_order(record)


FAULTS = {
    "too many requests": (plain(429, b'{"error":{"message":"slow down"}}'), False, Outcome.REFUSED, "slow down"),
    "no room": (plain(503, b"busy", "text/plain"), False, Outcome.REFUSED, "busy"),
    "no right": (plain(401, b'{"error":{"message":"who are you"}}'), False, Outcome.REJECTED, "who are you"),
    "no model": (plain(404, b'{"detail":"no model m"}'), False, Outcome.REJECTED, "no model m"),
    "broken service": (plain(500, b"\x00\xff oops \x1b[31m"), False, Outcome.FAILED, "oops"),
    "a status cut in its body": (b"HTTP/1.1 500 X\r\nContent-Length: 99\r\n\r\nhalf", True, Outcome.FAILED, "half"),
    "elsewhere": (plain(302, b""), False, Outcome.FAILED, "no message"),
    "an error frame": (whole_stream(words("a") + event(error={"message": "died"})), False, Outcome.FAILED, "died"),
    "an error as JSON": (plain(200, b'{"error":"no"}'), False, Outcome.FAILED, "no"),
    "a whole answer as JSON": (plain(200, b'{"choices":[]}'), False, Outcome.MALFORMED, "application/json"),
    "a web page": (plain(200, b"<html>", "text/html; charset=utf-8"), False, Outcome.MALFORMED, "text/html"),
    "broken JSON": (whole_stream(b"data: {broken\n\n"), False, Outcome.MALFORMED, "broken"),
    "a field of another type": (whole_stream(event(choices=3)), False, Outcome.MALFORMED, "choices"),
    "not UTF-8": (whole_stream(b'data: {"choices":[{"text":"\xff\xfe"}]}\n\n'), False, Outcome.MALFORMED, ""),
    "not HTTP": (b"SSH-2.0-OpenSSH_9.6\r\n", True, Outcome.MALFORMED, "not an HTTP answer"),
    "a wrong chunk size": (STREAM_HEAD + b"zz\r\n", True, Outcome.MALFORMED, "not an HTTP answer"),
    "headers without end": (b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * (QUIET_BYTES_MAX // 8), False,
                            Outcome.MALFORMED, "headers"),
    "closed in the headers": (b"HTTP/1.1 200 OK\r\nX-", True, Outcome.CUT, "closed"),
    "cut in the stream": (STREAM_HEAD + http_chunk(words("a", "b")), True, Outcome.CUT, "closed"),
    "cut after its finish, within HTTP": (STREAM_HEAD + http_chunk(words("a", finish="stop")), True, Outcome.CUT, ""),
    "ended without finish": (whole_stream(words("a", "b")), False, Outcome.CUT, "[DONE]"),
    "closed before a byte": (b"", True, Outcome.UNREACHABLE, "closed"),
    "no token": (whole_stream(words(finish="stop", usage=0) + DONE), False, Outcome.EMPTY, "no text"),
    "only a role": (whole_stream(event(choices=[{"delta": {"role": "assistant", "content": ""}}]) + DONE), False,
                    Outcome.EMPTY, "no text"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_of_a_server_ends_in_its_label_and_a_printable_line(name: str) -> None:
    data, close, outcome, message = FAULTS[name]
    record = one_answer(data, close=close)
    assert record.outcome is outcome, record
    assert message in record.message
    assert record.message.isprintable()
    assert 0 < len(record.message) <= 300
    assert_times_in_order(record)


WELL = {
    "no [DONE] after a finish reason": (whole_stream(words("a", finish="stop")), False),
    "an end by closing": (PLAIN_HEAD + words("a", finish="stop") + DONE, True),
    "an end by closing without [DONE]": (PLAIN_HEAD + words("a", finish="stop"), True),
    "[DONE], and the last HTTP chunk never comes": (STREAM_HEAD + http_chunk(words("a") + DONE), True),
    "an interim answer first": (b"HTTP/1.1 100 Continue\r\n\r\n" + whole_stream(words("a") + DONE), False),
    "a length": (plain(200, words("a") + DONE, "text/event-stream"), False),
    "no content type": (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + words("a") + DONE, True),
    "carriage returns": (whole_stream((words("a") + DONE).replace(b"\n", b"\r\n")), False),
    "comments and a BOM": (whole_stream(b"\xef\xbb\xbf: hi\n\n" + words("a") + DONE), False),
}


@pytest.mark.parametrize("name", WELL)
def test_what_public_servers_do_to_a_good_stream_stays_ok(name: str) -> None:
    data, close = WELL[name]
    record = one_answer(data, close=close)
    assert record.outcome is Outcome.OK, record
    assert len(record.chunk_gaps_ns) == 1


def test_no_listener_is_unreachable() -> None:
    async def run() -> Sent:
        async with scripted(always(b"")) as server:
            url = server.url
        return await send(ListedPlan([session("a")]), url)

    record = asyncio.run(run()).only
    assert (record.outcome, record.connected_ns, record.http_status) == (Outcome.UNREACHABLE, None, None)
    assert record.issued_ns is not None


def test_a_client_that_is_turned_away_pauses_before_its_next_session() -> None:
    async def run() -> Sent:
        async with scripted(always(plain(429, b"later"))) as server:
            return await send(ListedPlan([session(f"s{i}", at_ns=None) for i in range(3)], num_clients=1), server.url)

    records = asyncio.run(run()).records
    assert [record.outcome for record in records] == [Outcome.REFUSED] * 3
    for before, after in pairwise(records):
        assert after.scheduled_ns == before.ended_ns + FAILED_PAUSE_NS


def test_a_service_that_does_not_speak_tls_is_unreachable_by_https() -> None:
    async def run() -> Sent:
        async with scripted(always(plain(200, b""))) as server:
            return await send(ListedPlan([session("a")]), server.url.replace("http:", "https:"))

    record = asyncio.run(run()).only
    assert (record.outcome, record.connected_ns) == (Outcome.UNREACHABLE, None)
    assert record.message


def test_a_silent_server_ends_in_a_timeout_that_counts_from_the_schedule() -> None:
    record = one_answer(b"", timeout_ns=50_000_000)
    assert record.outcome is Outcome.TIMEOUT
    assert record.ended_ns - record.scheduled_ns >= 50_000_000


def test_a_finished_stream_on_an_open_body_is_no_timeout() -> None:
    record = one_answer(STREAM_HEAD + http_chunk(GOOD), timeout_ns=3 * NS_PER_S)
    assert (record.outcome, record.message) == (Outcome.OK, "")
    assert record.ended_ns - record.scheduled_ns >= 3 * NS_PER_S


def test_a_kept_connection_serves_the_next_request() -> None:
    async def run() -> tuple[Sent, int]:
        async with scripted(always(whole_stream(GOOD))) as server:
            plan = ListedPlan([session(f"s{i}", at_ns=None) for i in range(5)], num_clients=1)
            return await send(plan, server.url), server.num_connections

    sent, num_connections = asyncio.run(run())
    assert [record.outcome for record in sent.records] == [Outcome.OK] * 5
    assert num_connections == sent.finished.num_connections_opened == 1
    assert sent.finished.num_connections_reused == 4


def test_a_connection_closed_between_requests_costs_no_request() -> None:
    """As llama-server does: the answer promises to keep the connection, then it is closed."""

    async def run() -> Sent:
        async with scripted(always(whole_stream(GOOD), close=True)) as server:
            plan = ListedPlan([session(f"s{i}", at_ns=None) for i in range(4)], num_clients=1)
            return await send(plan, server.url)

    assert [record.outcome for record in asyncio.run(run()).records] == [Outcome.OK] * 4


def test_a_kept_connection_that_dies_unanswered_is_replaced_once_and_its_time_counts_on() -> None:
    async def answer(number: int, _: bytes, writer: asyncio.StreamWriter) -> None:
        if number == 1:
            writer.close()
        else:
            writer.write(whole_stream(GOOD))

    async def run() -> tuple[Sent, list[bytes]]:
        async with scripted(answer) as server:
            plan = ListedPlan([session(f"s{i}", at_ns=None) for i in range(2)], num_clients=1)
            return await send(plan, server.url), server.bodies

    sent, bodies = asyncio.run(run())
    assert [record.outcome for record in sent.records] == [Outcome.OK] * 2
    assert sent.finished.num_connections_stale == 1
    assert bodies[1] == bodies[2]
    assert_times_in_order(sent.records[1])


def test_a_request_that_the_service_held_and_dropped_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection was kept, but not stale: a second try would hide a failure."""
    monkeypatch.setattr("tailrace.workload.send.calls.STALE_NS", 0)

    async def answer(number: int, _: bytes, writer: asyncio.StreamWriter) -> None:
        if number == 1:
            writer.close()
        else:
            writer.write(whole_stream(GOOD))

    async def run() -> tuple[Sent, int]:
        async with scripted(answer) as server:
            plan = ListedPlan([session(f"s{i}", at_ns=None) for i in range(2)], num_clients=1)
            return await send(plan, server.url), len(server.bodies)

    sent, num_requests = asyncio.run(run())
    assert [record.outcome for record in sent.records] == [Outcome.OK, Outcome.UNREACHABLE]
    assert (num_requests, sent.finished.num_connections_stale) == (2, 0)


def test_a_new_connection_that_dies_unanswered_is_not_replaced() -> None:
    async def run() -> tuple[Sent, int]:
        async with scripted(always(b"", close=True)) as server:
            return await send(ListedPlan([session("a")]), server.url), len(server.bodies)

    sent, num_requests = asyncio.run(run())
    assert (sent.only.outcome, num_requests) == (Outcome.UNREACHABLE, 1)


def test_bytes_behind_an_answer_do_not_become_the_next_one() -> None:
    async def run() -> Sent:
        async with scripted(always(whole_stream(GOOD) + plain(500, b"surprise"))) as server:
            plan = ListedPlan([session(f"s{i}", at_ns=None) for i in range(3)], num_clients=1)
            return await send(plan, server.url)

    sent = asyncio.run(run())
    assert [record.outcome for record in sent.records] == [Outcome.OK] * 3
    assert sent.finished.num_connections_opened == 3


def test_open_arrivals_go_out_whatever_the_service_does_and_never_early() -> None:
    async def answer(number: int, _: bytes, writer: asyncio.StreamWriter) -> None:
        if number == 19:
            for each in writers:
                each.write(whole_stream(GOOD))
            writer.write(whole_stream(GOOD))
        else:
            writers.append(writer)

    writers: list[asyncio.StreamWriter] = []

    async def run() -> Sent:
        async with scripted(answer) as server:
            return await send(ListedPlan(arrivals(20)), server.url)

    sent = asyncio.run(run())
    assert [record.outcome for record in sent.records] == [Outcome.OK] * 20
    assert sent.finished.num_in_flight_max == 20
    scheduled = sorted(record.scheduled_ns for record in sent.records)
    assert [after - before for before, after in pairwise(scheduled)] == [1_000_000] * 19
    for record in sent.records:
        assert_times_in_order(record)


def test_a_request_above_the_limit_of_requests_in_flight_waits_and_counts_from_its_schedule() -> None:
    async def run() -> Sent:
        async with scripted(always(whole_stream(GOOD))) as server:
            return await send(ListedPlan(arrivals(10, gap_ns=0)), server.url, num_in_flight_max=2)

    sent = asyncio.run(run())
    assert [record.outcome for record in sent.records] == [Outcome.OK] * 10
    assert sent.finished.num_in_flight_max == 2
    assert len({record.scheduled_ns for record in sent.records}) == 1
    first_ends = sorted(record.ended_ns for record in sent.records)[0]
    assert sum(record.issued_ns >= first_ends for record in sent.records if record.issued_ns) == 8


def test_a_request_that_times_out_before_it_is_sent_has_its_record() -> None:
    async def run() -> Sent:
        async with scripted(always(b"")) as server:
            return await send(ListedPlan(arrivals(3, gap_ns=0)), server.url, num_in_flight_max=1, timeout_ns=30_000_000)

    records = asyncio.run(run()).records
    assert [record.outcome for record in records] == [Outcome.TIMEOUT] * 3
    assert sorted(record.issued_ns is None for record in records) == [False, True, True]


def test_a_conversation_goes_on_with_the_answer_after_the_time_to_think() -> None:
    think_ns = 20_000_000
    plan = ListedPlan([session("c", turn("c-0"), turn("c-1", think_ns=think_ns))])

    async def run() -> tuple[Sent, list[bytes]]:
        async with scripted(always(whole_stream(GOOD))) as server:
            return await send(plan, server.url), server.bodies

    sent, bodies = asyncio.run(run())
    first, second = sent.records
    assert second.scheduled_ns == first.ended_ns + think_ns
    assert (first.turn, second.turn, second.session) == (0, 1, "c")
    assert json.loads(bodies[1]) == {"turn": "c-1", "answers": ["one two three"]}
    assert second.num_prompt_tokens_asked == 5 + 3 + 5
    assert second.num_shared_tokens == 3


def test_a_conversation_ends_with_a_turn_that_failed() -> None:
    plan = ListedPlan([session("c", turn("c-0"), turn("c-1"))])

    async def run() -> Sent:
        async with scripted(always(plain(500, b"no"))) as server:
            return await send(plan, server.url)

    assert [record.outcome for record in asyncio.run(run()).records] == [Outcome.FAILED]


def test_a_planned_leave_after_some_tokens_closes_the_connection() -> None:
    async def run() -> Sent:
        async with scripted(always(STREAM_HEAD + http_chunk(words("a", "b", "c", "d")))) as server:
            return await send(ListedPlan([session("a", turn("a-0", cancel=2))]), server.url)

    record = asyncio.run(run()).only
    assert (record.outcome, record.will_cancel) == (Outcome.CANCELLED, True)
    assert len(record.chunk_gaps_ns) >= 2


def test_a_planned_leave_at_once_still_sends_the_request() -> None:
    async def run() -> Sent:
        async with scripted(always(b"")) as server:
            return await send(ListedPlan([session("a", turn("a-0", cancel=0))]), server.url)

    record = asyncio.run(run()).only
    assert (record.outcome, record.will_cancel, record.headers_ns) == (Outcome.CANCELLED, True, None)
    assert record.ended_ns == record.sent_ns


def test_an_answer_that_ends_before_the_planned_leave_is_ok() -> None:
    async def run() -> Sent:
        async with scripted(always(whole_stream(GOOD))) as server:
            return await send(ListedPlan([session("a", turn("a-0", cancel=9))]), server.url)

    record = asyncio.run(run()).only
    assert (record.outcome, record.will_cancel) == (Outcome.OK, True)


def test_a_stopped_run_keeps_what_was_in_flight_as_cancelled() -> None:
    async def run() -> Sent:
        reached = asyncio.Event()

        async def answer(number: int, _: bytes, __: asyncio.StreamWriter) -> None:
            if number == 2:
                reached.set()

        async def stop(sender: Sender) -> None:
            await reached.wait()
            sender.stop()

        async with scripted(answer) as server:
            plan = ListedPlan([*arrivals(3, gap_ns=0), session("later", at_ns=50 * NS_PER_S)])
            return await send(plan, server.url, during=stop)

    sent = asyncio.run(run())
    assert [record.outcome for record in sent.records] == [Outcome.CANCELLED] * 3
    assert not any(record.will_cancel for record in sent.records)
    assert sent.finished.was_stopped
    assert sent.finished.num_records == 3


def test_closed_clients_share_the_sessions_and_each_has_one_request_at_a_time() -> None:
    async def run() -> Sent:
        async with scripted(always(whole_stream(GOOD))) as server:
            plan = ListedPlan(
                [session("a", at_ns=None)], num_clients=4, window_end_ns=None, num_window_requests=40, endless=True
            )
            return await send(plan, server.url)

    sent = asyncio.run(run())
    window = [r for r in sent.records if r.scheduled_ns < min(x.scheduled_ns for x in sent.records) + NS_PER_S * 60]
    assert sum(record.outcome is Outcome.OK for record in window) >= 40
    assert sent.finished.num_in_flight_max == 4
    assert not sent.finished.was_stopped


def test_closed_clients_begin_spread_over_the_warm_up() -> None:
    warm_up_ns = 40_000_000

    async def run() -> Sent:
        async with scripted(always(b"")) as server:
            plan = ListedPlan([session(f"s{i}", at_ns=None) for i in range(4)], num_clients=4,
                              window_start_ns=warm_up_ns)  # fmt: skip
            return await send(plan, server.url, timeout_ns=100_000_000)

    scheduled = sorted(record.scheduled_ns for record in asyncio.run(run()).records)
    assert [after - before for before, after in pairwise(scheduled)] == [warm_up_ns // 4] * 3


def test_load_goes_on_after_the_window_until_its_requests_have_ended() -> None:
    """The first request is answered when one from beyond the window has come in."""
    window_end_ns = 10_000_000

    async def answer(number: int, _: bytes, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        if number == 15:
            for each in writers:
                each.write(whole_stream(GOOD))

    writers: list[asyncio.StreamWriter] = []

    async def run() -> Sent:
        async with scripted(answer) as server:
            plan = ListedPlan(arrivals(5_000), window_end_ns=window_end_ns)
            return await send(plan, server.url)

    sent = asyncio.run(run())
    start_ns = min(record.scheduled_ns for record in sent.records)
    inside = [record for record in sent.records if record.scheduled_ns < start_ns + window_end_ns]
    assert [record.outcome for record in inside] == [Outcome.OK] * 10
    assert 16 <= len(sent.records) < 5_000
    assert not sent.finished.was_stopped


def test_shards_send_each_session_once_between_them() -> None:
    async def run() -> list[str]:
        async with scripted(always(whole_stream(GOOD))) as server:
            parts = [await send(ListedPlan(arrivals(7)), server.url, shard=shard, num_shards=3) for shard in range(3)]
            return [record.request_id for part in parts for record in part.records]

    assert sorted(asyncio.run(run())) == [f"s{i}-0" for i in range(7)]


def test_kept_text_ends_chunks_where_the_record_does() -> None:
    async def run() -> Sent:
        async with scripted(always(whole_stream(GOOD))) as server:
            return await send(ListedPlan([session("a")]), server.url, keep_text=True)

    sent = asyncio.run(run())
    (text,) = sent.texts
    assert (text.request_id, text.text, text.chunk_ends) == (sent.only.request_id, "one two three", [3, 7, 13])


def test_every_request_carries_its_name_and_its_length() -> None:
    async def run() -> tuple[bytes, bytes]:
        async with scripted(always(whole_stream(GOOD))) as server:
            await send(ListedPlan([session("a")]), server.url)
            return server.heads[0], server.bodies[0]

    head, body = asyncio.run(run())
    assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert b"X-Request-Id: a-0\r\n" in head
    assert json.loads(body)["turn"] == "a-0"


def test_no_request_of_the_window_is_cancelled_by_its_end() -> None:
    """A closed loop hands its slot over at the very end of the window, many times."""

    async def run() -> list[Sent]:
        async with scripted(always(whole_stream(GOOD))) as server:
            plan = ListedPlan([session("a", turn("a-0"), turn("a-1"), at_ns=None)], num_clients=3,
                              window_end_ns=20_000_000, endless=True)  # fmt: skip
            return [await send(plan, server.url) for _ in range(10)]

    for sent in asyncio.run(run()):
        start_ns = min(record.scheduled_ns for record in sent.records)
        window = [record for record in sent.records if record.scheduled_ns < start_ns + 20_000_000]
        assert {record.outcome for record in window} == {Outcome.OK}


def test_a_window_that_another_shard_saw_end_later_waits_for_what_was_sent_in_it() -> None:
    """One request makes this shard's share; the second comes due before the run's window ends, and is answered late."""
    come, answer_now = asyncio.Event(), asyncio.Event()
    ends_ns: list[int] = []

    async def answer(number: int, _: bytes, writer: asyncio.StreamWriter) -> None:
        if number == 1:
            come.set()
            await answer_now.wait()
        writer.write(whole_stream(GOOD))

    async def extend(sender: Sender) -> None:
        await come.wait()
        ends_ns.append(time.monotonic_ns() - sender._origin_ns)
        sender.extend_window(ends_ns[0])
        answer_now.set()
        while sender.progress().outcomes.get("ok", 0) < 2:
            await asyncio.sleep(0)
        sender.stop()

    async def run() -> Sent:
        async with scripted(answer) as server:
            plan = ListedPlan([session("a", at_ns=None)], num_clients=1, window_end_ns=None, num_window_requests=1,
                              endless=True)  # fmt: skip
            return await send(plan, server.url, during=extend, stops_when_done=False)

    sent = asyncio.run(run())
    assert [record.outcome for record in sent.records[:2]] == [Outcome.OK] * 2
    assert sent.finished.window_end_ns == ends_ns[0]
    assert not sent.finished.was_stopped
