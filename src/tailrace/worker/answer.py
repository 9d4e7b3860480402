"""Hop 12: the tokens of one choice -> its text, piece by piece. Pure.

In: the `SequenceEvent`s of one sequence, in order. Out: `Piece`s of final text with their log-probabilities. No piece
carries a broken character or a part of a stop string; their concatenation is the answer.
"""

from collections.abc import Sequence

from tailrace.engine.step import SequenceEvent
from tailrace.model.text import TextDecoder, TextModel
from tailrace.request import FinishReason, PositionLogprobs, Request
from tailrace.wire.responses import LOGPROB_FLOOR, Piece, TokenText, TopText
from tailrace.worker.stop_strings import StopStrings

_NO_TEXT = Piece("")


class ChoiceText:
    """The growing answer of one choice."""

    finish_reason: FinishReason | None
    """Set by the engine's final event or by a stop string."""
    num_tokens: int
    """Drawn so far, an end token included; what usage counts."""

    def __init__(self, text_model: TextModel, request: Request, index: int) -> None:
        self.index = index
        self.finish_reason = None
        self.num_tokens = 0
        self.has_started = False
        params = request.sampling
        self._text_model = text_model
        self._decoder = TextDecoder(text_model)
        self._stops = StopStrings(request.stop)
        self._min_tokens = params.min_tokens if request.stop else 0
        self._end_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else text_model.end_token_ids
        )
        self._wants_logprobs = params.num_logprobs is not None
        self._by_token = self._wants_logprobs or bool(request.stop)
        self._num_chars = 0
        """Decoded, held back text included."""
        self._num_chars_released = 0
        self._waiting: list[tuple[int, TokenText]] = []
        """Logprobs of tokens whose text is not released yet, with the offset of that text."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended this choice: the engine is to be told."""
        return self._stops.hit

    def push(self, event: SequenceEvent) -> Piece:
        """The text that this event makes final; perhaps none yet."""
        assert self.finish_reason is None, "I4: a choice ends once"
        token_ids = event.token_ids
        self.num_tokens += len(token_ids)
        if event.finish_reason is FinishReason.STOP and token_ids and token_ids[-1] in self._end_ids:
            token_ids = token_ids[:-1]
        text = self._push_one_by_one(token_ids, event) if self._by_token else self._decoder.push(token_ids)
        if self.finish_reason is None and event.finish_reason is not None:
            # Bytes of an unfinished character are dropped: an answer never ends with a broken one.
            self.finish_reason = event.finish_reason
            text += self._stops.flush()
        return self._release(text)

    def skip(self, event: SequenceEvent) -> None:
        """For a caller who asked for no tokens (`max_tokens: 0`): what was drawn is not part of the answer."""
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason

    def echo(self, piece: Piece) -> None:
        """The prompt's text precedes the answer's: its characters count in the offsets."""
        self._num_chars += len(piece.text)
        self._num_chars_released += len(piece.text)

    def _push_one_by_one(self, token_ids: tuple[int, ...], event: SequenceEvent) -> str:
        """Stop strings and offsets need to know where each token ends."""
        released = []
        num_before = self.num_tokens - len(event.token_ids)
        for i, token_id in enumerate(token_ids):
            if self._wants_logprobs and i < len(event.logprobs):
                self._waiting.append((self._num_chars, token_text(self._text_model, event.logprobs[i])))
            text = self._decoder.push((token_id,))
            self._num_chars += len(text)
            if num_before + i + 1 <= self._min_tokens:
                released.append(text)
                continue
            released.append(self._stops.push(text))
            if self._stops.hit is not None:
                self.num_tokens = num_before + i + 1
                self.finish_reason = FinishReason.STOP
                break
        return "".join(released)

    def _release(self, text: str) -> Piece:
        self._num_chars_released += len(text)
        if not self._wants_logprobs:
            return Piece(text) if text else _NO_TEXT
        ended_whole = self.finish_reason is not None and self._stops.hit is None
        num_out = len(self._waiting)
        if not ended_whole:
            num_out = sum(1 for offset, _ in self._waiting if offset < self._num_chars_released)
        out, self._waiting = self._waiting[:num_out], self._waiting[num_out:]
        return Piece(text, [token for _, token in out], [offset for offset, _ in out])


def token_text(text_model: TextModel, position: PositionLogprobs) -> TokenText:
    """The log-probabilities of one position as OpenAI shows them."""
    chosen = position.chosen
    return TokenText(
        token=text_model.token_text(chosen.token_id),
        logprob=max(LOGPROB_FLOOR, chosen.logprob),
        bytes=list(text_model.token_bytes(chosen.token_id)),
        top_logprobs=[
            TopText(
                text_model.token_text(top.token_id),
                max(LOGPROB_FLOOR, top.logprob),
                list(text_model.token_bytes(top.token_id)),
            )
            for top in position.top
        ],
    )


def prompt_piece(
    text_model: TextModel, text: str | None, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs] | None
) -> Piece:
    """What `echo` puts before each choice. `text`: the caller's own; None when the caller sent token ids.

    `logprobs[i]` is of token `i + 1`; the first token has none. None: the caller wants none.
    """
    text = text_model.decode(token_ids) if text is None else text
    if logprobs is None:
        return Piece(text)
    first = TokenText(text_model.token_text(token_ids[0]), None, list(text_model.token_bytes(token_ids[0])), [])
    tokens = [first, *(token_text(text_model, position) for position in logprobs)]
    decoder = TextDecoder(text_model, at_start=True)
    offsets, num_chars = [], 0
    for token_id in token_ids:
        offsets.append(num_chars)
        num_chars += len(decoder.push((token_id,)))
    return Piece(text, tokens, offsets[: len(tokens)])


def join_pieces(pieces: Sequence[Piece]) -> Piece:
    """One piece for several: a slow reader gets what piled up in one chunk."""
    if len(pieces) == 1:
        return pieces[0]
    text = "".join(piece.text for piece in pieces)
    if not any(piece.tokens is not None for piece in pieces):
        return Piece(text)
    tokens = [token for piece in pieces for token in piece.tokens or ()]
    return Piece(text, tokens, [offset for piece in pieces for offset in piece.offsets])
