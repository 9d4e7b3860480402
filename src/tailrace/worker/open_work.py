"""What the app still expects of the engine: open sequences and step-log queries. Each is ended exactly once, here.

In: streams of accepted submits, events, answers. The supervisor calls `end_all` when the engine can no longer end them.
"""

import asyncio

from tailrace.clock import monotonic_ns
from tailrace.engine.step import SequenceEvent
from tailrace.errors import ERROR_TABLE, EngineDied
from tailrace.request import FinishReason, SequenceId
from tailrace.worker.channel import StepLog, StepRecord
from tailrace.worker.event_stream import EventStream


class OpenWork:
    def __init__(self) -> None:
        self._streams: dict[SequenceId, EventStream] = {}
        self._queries: dict[int, asyncio.Future[list[StepRecord]]] = {}
        self._num_queries = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.busy_since_ns = 0
        """When the engine last went from owing nothing to owing something."""

    def __bool__(self) -> bool:
        """Whether the engine owes a message."""
        return bool(self._streams or self._queries)

    def __contains__(self, sequence_id: SequenceId) -> bool:
        return sequence_id in self._streams

    @property
    def num_sequences(self) -> int:
        return len(self._streams)

    def add(self, stream: EventStream) -> None:
        assert not any(sequence_id in self._streams for sequence_id in stream.sequence_ids), (
            "sequence ids are used once"
        )
        self._mark_busy()
        self._streams.update(dict.fromkeys(stream.sequence_ids, stream))
        self._idle.clear()

    def deliver(self, event: SequenceEvent) -> None:
        """To its stream; an event of a sequence that has ended is dropped."""
        stream = self._streams.get(event.sequence_id)
        if stream is not None and stream.deliver(event):
            del self._streams[event.sequence_id]
            if not self._streams:
                self._idle.set()

    async def drained(self) -> None:
        """Returns when no sequence is open."""
        await self._idle.wait()

    def new_query(self) -> int:
        self._mark_busy()
        self._num_queries += 1
        self._queries[self._num_queries] = asyncio.get_running_loop().create_future()
        return self._num_queries

    async def answer_to(self, query_id: int) -> list[StepRecord]:
        """Raises EngineDied when the engine ends first."""
        try:
            return await self._queries[query_id]
        finally:
            del self._queries[query_id]

    def answer(self, message: StepLog) -> None:
        query = self._queries.get(message.query_id)
        if query is not None and not query.done():
            query.set_result(message.records)

    def end_all(self, cause: str) -> None:
        """Ends every open sequence with `engine_died`, and every query."""
        message = f"the engine process ended while this request ran ({cause}); send it again"
        for sequence_id in list(self._streams):
            self.deliver(
                SequenceEvent(
                    sequence_id=sequence_id,
                    finish_reason=FinishReason.ERROR,
                    error_label=ERROR_TABLE[EngineDied].label,
                    error_message=message,
                )
            )
        for query in self._queries.values():
            if not query.done():
                query.set_exception(EngineDied(message))

    def _mark_busy(self) -> None:
        if not self:
            self.busy_since_ns = monotonic_ns()
