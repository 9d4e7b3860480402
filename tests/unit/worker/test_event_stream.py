import asyncio

from tailrace.engine.step import SequenceEvent
from tailrace.request import FinishReason, RequestId, SequenceId
from tailrace.worker.event_stream import EventStream


def event(sequence_id: int, token: int | None = None, reason: FinishReason | None = None) -> SequenceEvent:
    tokens = () if token is None else (token,)
    return SequenceEvent(sequence_id=SequenceId(sequence_id), token_ids=tokens, finish_reason=reason)


def stream(*sequence_ids: int) -> EventStream:
    return EventStream(RequestId("r"), tuple(SequenceId(i) for i in sequence_ids))


def test_a_read_takes_all_that_has_arrived_in_order() -> None:
    async def run() -> None:
        events = stream(1, 2)
        for token in range(3):
            events.deliver(event(1, token))
            events.deliver(event(2, token))
        batch = await anext(events)
        assert [(e.sequence_id, e.token_ids) for e in batch] == [(i, (t,)) for t in range(3) for i in (1, 2)]

    asyncio.run(run())


def test_a_stream_stops_after_the_final_event_of_each_sequence_was_read() -> None:
    async def run() -> None:
        events = stream(1, 2)
        assert events.deliver(event(1, 7, FinishReason.STOP))
        assert not events.deliver(event(2, 8))
        assert events.open_ids == {2}
        assert events.deliver(event(2, None, FinishReason.LENGTH))
        batches = [batch async for batch in events]
        assert [len(batch) for batch in batches] == [3]

    asyncio.run(run())


def test_nothing_follows_a_final_event() -> None:
    async def run() -> None:
        events = stream(1)
        assert events.deliver(event(1, None, FinishReason.STOP))
        assert not events.deliver(event(1, None, FinishReason.ERROR))
        assert not events.deliver(event(1, 5))
        assert [e.finish_reason for batch in [b async for b in events] for e in batch] == [FinishReason.STOP]

    asyncio.run(run())


def test_events_of_foreign_sequences_are_dropped() -> None:
    async def run() -> None:
        events = stream(1)
        assert not events.deliver(event(9, 5, FinishReason.STOP))
        events.deliver(event(1, 3, FinishReason.STOP))
        assert [e.sequence_id for batch in [b async for b in events] for e in batch] == [1]

    asyncio.run(run())


def test_a_waiting_reader_wakes_on_an_event_and_on_close() -> None:
    async def run() -> None:
        events = stream(1)
        reader = asyncio.create_task(anext(events))
        await asyncio.sleep(0)
        events.deliver(event(1, 4))
        assert [e.token_ids for e in await reader] == [(4,)]
        rest = asyncio.create_task(anext(events, None))
        await asyncio.sleep(0)
        events.close()
        assert await rest is None

    asyncio.run(run())


def test_a_cancelled_read_loses_no_event() -> None:
    async def run() -> None:
        events = stream(1)
        reader = asyncio.create_task(anext(events))
        await asyncio.sleep(0)
        events.deliver(event(1, 4))
        reader.cancel()
        await asyncio.wait([reader])
        assert reader.cancelled()
        assert [e.token_ids for e in await anext(events)] == [(4,)]

    asyncio.run(run())


def test_close_tells_the_owner_once_and_only_while_something_runs() -> None:
    async def run() -> None:
        closed: list[EventStream] = []
        running = EventStream(RequestId("a"), (SequenceId(1),), closed.append)
        ended = EventStream(RequestId("b"), (SequenceId(2),), closed.append)
        ended.deliver(event(2, None, FinishReason.STOP))
        for events in (running, ended, running):
            events.close()
        assert closed == [running]
        assert running.deliver(event(1, None, FinishReason.CANCELLED)), "a closed stream still counts its end"

    asyncio.run(run())
