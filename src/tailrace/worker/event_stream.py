"""Hop 11, app side: the events of one accepted `Submit`, read by one task.

In: `SequenceEvent`s from the engine client, in the order the engine sent them. Out: lists of them, each list all that
arrived since the last read, so a slow reader costs one wake-up, not one a token. Every sequence ends here exactly once:
a second final event, or a token after the final one, is dropped. Never blocks the one who delivers.
"""

import asyncio
from collections.abc import Callable

from tailrace.engine.step import SequenceEvent
from tailrace.request import RequestId, SequenceId


class EventStream:
    """Async iterator of `list[SequenceEvent]`; stops after the final event of each sequence was read.

    Memory is bounded by the answer: at most one event a token and sequence waits here.
    """

    def __init__(
        self,
        request_id: RequestId,
        sequence_ids: tuple[SequenceId, ...],
        on_close: Callable[["EventStream"], None] | None = None,
    ) -> None:
        self.request_id = request_id
        self.sequence_ids = sequence_ids
        self._open_ids = set(sequence_ids)
        self._events: list[SequenceEvent] = []
        self._waiter: asyncio.Future[None] | None = None
        self._on_close = on_close
        self._closed = False

    @property
    def open_ids(self) -> frozenset[SequenceId]:
        """Sequences whose final event has not arrived."""
        return frozenset(self._open_ids)

    def deliver(self, event: SequenceEvent) -> bool:
        """Takes one event; True when it was the final one of its sequence. Called by the engine client only."""
        if event.sequence_id not in self._open_ids:
            return False
        final = event.finish_reason is not None
        if final:
            self._open_ids.discard(event.sequence_id)
        if not self._closed:
            self._events.append(event)
            self._wake()
        return final

    def close(self) -> None:
        """Stop reading. What still runs of the *request* is cancelled (all its choices and prompts). Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._events.clear()
        self._wake()
        if self._open_ids and self._on_close is not None:
            self._on_close(self)

    def __aiter__(self) -> "EventStream":
        return self

    async def __anext__(self) -> list[SequenceEvent]:
        while not self._events:
            if self._closed or not self._open_ids:
                raise StopAsyncIteration
            await self._arrival()
        events, self._events = self._events, []
        return events

    async def _arrival(self) -> None:
        assert self._waiter is None, "an event stream has one reader"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
