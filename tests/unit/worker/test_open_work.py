import asyncio

import pytest

from tailrace.engine.step import SequenceEvent
from tailrace.errors import EngineDied
from tailrace.request import FinishReason, RequestId, SequenceId
from tailrace.worker.channel import StepLog
from tailrace.worker.event_stream import EventStream
from tailrace.worker.open_work import OpenWork


def stream(*ids: int) -> EventStream:
    return EventStream(RequestId("r"), tuple(map(SequenceId, ids)))


def final(sequence_id: int) -> SequenceEvent:
    return SequenceEvent(sequence_id=SequenceId(sequence_id), finish_reason=FinishReason.STOP)


def test_the_end_of_the_engine_ends_what_is_open_and_nothing_that_ended_before() -> None:
    async def run() -> None:
        work, events = OpenWork(), stream(1, 2, 3)
        work.add(events)
        work.deliver(final(2))
        work.end_all("signal 9")
        work.end_all("again")
        work.deliver(final(1))
        ends = {e.sequence_id: e.error_label for batch in [b async for b in events] for e in batch}
        assert ends == {1: "engine_died", 2: None, 3: "engine_died"}
        assert not work
        await work.drained()

    asyncio.run(run())


def test_a_query_is_answered_by_its_own_number_or_dies_with_the_engine() -> None:
    async def run() -> None:
        work = OpenWork()
        first, second = work.new_query(), work.new_query()
        work.answer(StepLog(999, []))
        work.answer(StepLog(second, []))
        assert await work.answer_to(second) == []
        work.end_all("signal 9")
        with pytest.raises(EngineDied, match="signal 9"):
            await work.answer_to(first)
        assert not work

    asyncio.run(run())


def test_a_sequence_id_is_used_once() -> None:
    work = OpenWork()
    work.add(stream(1))
    with pytest.raises(AssertionError, match="used once"):
        work.add(stream(1))


def test_busy_counts_from_the_first_thing_owed() -> None:
    work = OpenWork()
    work.add(stream(1))
    since_ns = work.busy_since_ns
    assert since_ns > 0
    work.add(stream(2))
    assert work.busy_since_ns == since_ns
