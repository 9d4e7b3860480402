"""Hops 8 and 12: one request between its acceptance and its end.

A `Call` owns the event streams of its prompts and the growing text of its choices. It ends exactly once, with a label:
`Service.call` sees to that. Never touches HTTP.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import msgspec

from tailrace.engine.step import SequenceEvent
from tailrace.errors import LABEL_TO_ERROR, Cancelled, DeadlineExceeded, EngineFailed, TailraceError
from tailrace.model.text import TextModel
from tailrace.request import FinishReason, PositionLogprobs, Request, RequestId, SequenceId, TextPrompt
from tailrace.wire.responses import ChoiceAnswer, Piece, Usage
from tailrace.worker.answer import ChoiceText, join_pieces, prompt_piece
from tailrace.worker.channel import Submit
from tailrace.worker.engine_client import EngineClient
from tailrace.worker.event_stream import EventStream


class Delta(msgspec.Struct, frozen=True):
    """What is new in one choice."""

    index: int
    starts: bool
    piece: Piece
    finish_reason: FinishReason | None
    used: Usage | None = None
    """Of this choice so far; only for a caller who wants it in every chunk."""


class _Prompt:
    """One prompt of a request and what the engine said about it."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.num_cached_tokens = 0
        self.logprobs: list[PositionLogprobs] = []


class Call:
    """`begin` once, `submit` once a prompt, then read `deltas` to the end."""

    def __init__(
        self,
        request_id: RequestId,
        arrival_ns: int,
        engine: EngineClient,
        text_model: TextModel,
        on_choice_end: Callable[[FinishReason], None],
    ) -> None:
        self.request_id = request_id
        self.arrival_ns = arrival_ns
        self.sending_since_ns: int | None = None
        """Set while bytes wait for the client to take them."""
        self.disconnect: Callable[[], None] | None = None
        """Cuts the client's connection, where the server offers that."""
        self.sequence_ids: list[SequenceId] = []
        self._engine = engine
        self._text_model = text_model
        self._on_choice_end = on_choice_end
        self._request: Request | None = None
        self._prompts: list[_Prompt] = []
        self._choices: dict[SequenceId, tuple[ChoiceText, _Prompt]] = {}
        self._streams: list[EventStream] = []
        self._num_unfinished = 0
        self._error: TailraceError | None = None

    @property
    def request(self) -> Request:
        assert self._request is not None, "a call is begun before it is read"
        return self._request

    def begin(self, request: Request) -> None:
        self._request = request

    def submit(self, message: Submit) -> None:
        """Raises what `EngineClient.submit` raises, and whatever the call was abandoned with."""
        self.check_alive()
        stream = self._engine.submit(message)
        self._streams.append(stream)
        prompt = _Prompt(message.prompt_token_ids)
        self._prompts.append(prompt)
        for i, sequence_id in enumerate(message.sequence_ids):
            choice = ChoiceText(self._text_model, self.request, message.first_choice + i)
            self._choices[sequence_id] = (choice, prompt)
        self.sequence_ids += message.sequence_ids
        self._num_unfinished += len(message.sequence_ids)

    def abandon(self, error: TailraceError) -> None:
        """From now on nobody wants the answer: the engine is told, and the reader of `deltas` gets `error`."""
        if self._error is None:
            self._error = error
            self.close()

    def close(self) -> None:
        """Cancels in the engine whatever still runs. Idempotent."""
        for stream in self._streams:
            stream.close()

    def check_alive(self) -> None:
        if self._error is not None:
            raise self._error

    def check_taken(self) -> None:
        """After the last bytes. Raises Cancelled when the client is gone, so that they reached nobody."""
        if isinstance(self._error, Cancelled):
            raise self._error

    async def deltas(self) -> AsyncGenerator[list[Delta], None]:
        """All that is new since the last read, at most one `Delta` a choice; ends when every choice has.

        Raises the error of the first choice that failed: one request has one end.
        """
        async with aclosing(_merged(self._streams)) as arrivals:
            async for events in arrivals:
                deltas = self._take(events)
                if deltas:
                    yield deltas
                if self._num_unfinished == 0 or self._error is not None:
                    break
        self.check_alive()
        assert self._num_unfinished == 0, "I4: every choice has an end"

    async def answer(self) -> list[ChoiceAnswer]:
        """The whole answer, unstreamed. Raises as `deltas`."""
        pieces: dict[int, list[Piece]] = {}
        reasons: dict[int, FinishReason] = {}
        async for deltas in self.deltas():
            for delta in deltas:
                pieces.setdefault(delta.index, []).append(delta.piece)
                if delta.finish_reason is not None:
                    reasons[delta.index] = delta.finish_reason
        return [
            ChoiceAnswer(index=index, piece=join_pieces(pieces[index]), finish_reason=reasons[index])
            for index in sorted(pieces)
        ]

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in self._prompts),
            completion_tokens=sum(choice.num_tokens for choice, _ in self._choices.values()),
            cached_tokens=sum(prompt.num_cached_tokens for prompt in self._prompts),
        )

    # Inside

    def _take(self, events: list[SequenceEvent]) -> list[Delta]:
        """Several events of one choice become one delta."""
        if len(events) == 1:
            delta = self._take_one(events[0])
            return [] if delta is None else [delta]
        by_index: dict[int, list[Delta]] = {}
        for event in events:
            delta = self._take_one(event)
            if delta is not None:
                by_index.setdefault(delta.index, []).append(delta)
            if self._error is not None:
                break
        return [_join(parts) for parts in by_index.values()]

    def _take_one(self, event: SequenceEvent) -> Delta | None:
        choice, prompt = self._choices[event.sequence_id]
        if choice.finish_reason is not None:
            return None  # a stop string ended it; the engine did not know yet
        if event.finish_reason in (FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.ERROR):
            self._error = _error_of(event)
            return None
        if choice.index % self.request.num_choices == 0:
            prompt.logprobs += event.prompt_logprobs
            prompt.num_cached_tokens = event.num_cached_tokens or prompt.num_cached_tokens
        if not event.token_ids and event.finish_reason is None:
            return None
        return self._advance(choice, prompt, event)

    def _advance(self, choice: ChoiceText, prompt: _Prompt, event: SequenceEvent) -> Delta:
        pieces = []
        starts = not choice.has_started
        if starts:
            choice.has_started = True
            if self.request.echo:
                pieces.append(self._echo(choice, prompt))
        if self.request.max_tokens_asked == 0:
            choice.skip(event)
        else:
            pieces.append(choice.push(event))
        if choice.finish_reason is not None:
            self._num_unfinished -= 1
            self._on_choice_end(choice.finish_reason)
            if choice.stop_string is not None:
                self._engine.finish(event.sequence_id, FinishReason.STOP, choice.num_tokens)
        used = _used(choice, prompt) if self.request.chunk_usage else None
        return Delta(choice.index, starts, join_pieces(pieces), choice.finish_reason, used)

    def _echo(self, choice: ChoiceText, prompt: _Prompt) -> Piece:
        source = self.request.prompts[choice.index // self.request.num_choices]
        text = source.text if isinstance(source, TextPrompt) else None
        wants_logprobs = self.request.sampling.num_prompt_logprobs is not None
        piece = prompt_piece(self._text_model, text, prompt.token_ids, prompt.logprobs if wants_logprobs else None)
        choice.echo(piece)
        return piece


def _join(deltas: list[Delta]) -> Delta:
    if len(deltas) == 1:
        return deltas[0]
    piece = join_pieces([delta.piece for delta in deltas])
    last = deltas[-1]
    return Delta(last.index, deltas[0].starts, piece, last.finish_reason, last.used)


def _used(choice: ChoiceText, prompt: _Prompt) -> Usage:
    return Usage(
        prompt_tokens=len(prompt.token_ids),
        completion_tokens=choice.num_tokens,
        cached_tokens=prompt.num_cached_tokens,
    )


def _error_of(event: SequenceEvent) -> TailraceError:
    """The engine's label as an error of the tree."""
    defaults: dict[FinishReason | None, type[TailraceError]] = {
        FinishReason.CANCELLED: Cancelled,
        FinishReason.DEADLINE: DeadlineExceeded,
    }
    kind = LABEL_TO_ERROR.get(event.error_label or "", defaults.get(event.finish_reason, EngineFailed))
    return kind(event.error_message or (kind.__doc__ or kind.__name__))


async def _merged(streams: Sequence[EventStream]) -> AsyncGenerator[list[SequenceEvent], None]:
    """The events of several prompts as they come; one prompt, the usual case, costs nothing extra."""
    if len(streams) == 1:
        async for events in streams[0]:
            yield events
        return
    queue: asyncio.Queue[list[SequenceEvent] | None] = asyncio.Queue(maxsize=1)
    pumps = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    num_open = len(pumps)
    try:
        while num_open:
            item = await queue.get()
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()


async def _pump(stream: EventStream, queue: asyncio.Queue[list[SequenceEvent] | None]) -> None:
    async for events in stream:
        await queue.put(events)
    await queue.put(None)
