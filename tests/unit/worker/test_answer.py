"""Hop 12: tokens to text, piece by piece, with log-probabilities that stay with their text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tailrace.engine.step import SequenceEvent
from tailrace.model.text import TextModel
from tailrace.request import (
    FinishReason,
    PositionLogprobs,
    Request,
    RequestId,
    SamplingParams,
    SequenceId,
    TextPrompt,
    TokenLogprob,
)
from tailrace.wire.responses import Piece
from tailrace.worker.answer import ChoiceText, join_pieces, prompt_piece

WORDS = ["wave", " sto", "p!", "aa", "be"]
END = 256 + len(WORDS)


def byte_text_model() -> TextModel:
    """Token `i` is byte `i`, then a few words, then an end token."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    by_byte = dict(zip(_byte_order(), _byte_chars(), strict=True))
    vocab = {by_byte[byte]: byte for byte in range(256)}
    assert set(vocab) == set(alphabet)
    for i, word in enumerate(WORDS):
        vocab["".join(by_byte[byte] for byte in word.encode())] = 256 + i
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return TextModel(json.loads(tokenizer.to_str()), end_token_ids=(END,))


def _byte_order() -> list[int]:
    """GPT-2's order: printable bytes stand for themselves, the others follow."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return plain + [byte for byte in range(256) if byte not in plain]


def _byte_chars() -> list[str]:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(byte) for byte in plain] + [chr(256 + i) for i in range(256 - len(plain))]


@pytest.fixture(scope="module")
def text_model() -> TextModel:
    return byte_text_model()


def request(stop: tuple[str, ...] = (), *, echo: bool = False, **params: object) -> Request:
    return Request(
        request_id=RequestId("r"),
        model="m",
        arrival_ns=0,
        prompts=(TextPrompt("x"),),
        sampling=SamplingParams(max_tokens=1000, **params),  # type: ignore[arg-type]
        stop=stop,
        echo=echo,
    )


def event(ids: list[int], reason: FinishReason | None = None, *, logprobs: bool = False) -> SequenceEvent:
    reported = tuple(
        PositionLogprobs(TokenLogprob(token_id, -1.0), (TokenLogprob(token_id, float("-inf")),)) for token_id in ids
    )
    return SequenceEvent(
        sequence_id=SequenceId(0),
        token_ids=tuple(ids),
        logprobs=reported if logprobs else (),
        finish_reason=reason,
    )


def run(choice: ChoiceText, steps: list[list[int]], *, logprobs: bool = False) -> list[Piece]:
    """One event a step until the choice ends; the last step is cut by length."""
    pieces = []
    for i, ids in enumerate(steps):
        reason = FinishReason.LENGTH if i == len(steps) - 1 else None
        pieces.append(choice.push(event(ids, reason, logprobs=logprobs)))
        if choice.finish_reason is not None:
            break
    return pieces


@given(text=st.text(max_size=20), sizes=st.lists(st.integers(1, 5), min_size=1))
def test_no_piece_has_half_a_character(text_model: TextModel, text: str, sizes: list[int]) -> None:
    data = list(text.encode())
    steps, at = [], 0
    while at < len(data):
        size = sizes[len(steps) % len(sizes)]
        steps.append(data[at : at + size])
        at += size
    pieces = run(ChoiceText(text_model, request(), 0), [*steps, []])
    assert "".join(piece.text for piece in pieces) == text
    assert all("\ufffd" not in piece.text for piece in pieces) or "\ufffd" in text


def test_an_answer_cut_inside_a_character_ends_before_it(text_model: TextModel) -> None:
    choice = ChoiceText(text_model, request(), 0)
    pieces = run(choice, [[*b"ok"], [0xF0], [0x9F, 0x8C]])
    assert "".join(piece.text for piece in pieces) == "ok"
    assert choice.num_tokens == 5


def test_a_stop_string_across_tokens_ends_the_choice(text_model: TextModel) -> None:
    choice = ChoiceText(text_model, request(("stop!",)), 0)
    pieces = run(choice, [[256], [257], [258], [256]])
    assert [piece.text for piece in pieces] == ["wave", " ", ""]
    assert (choice.finish_reason, choice.stop_string, choice.num_tokens) == (FinishReason.STOP, "stop!", 3)


def test_tokens_after_a_stop_string_in_one_event_do_not_count(text_model: TextModel) -> None:
    choice = ChoiceText(text_model, request(("stop",)), 0)
    (piece,) = run(choice, [[256, 257, 258, 256, 256]])
    assert (piece.text, choice.num_tokens) == ("wave ", 3)


def test_an_emoji_may_be_a_stop_string(text_model: TextModel) -> None:
    choice = ChoiceText(text_model, request(("🌊",)), 0)
    pieces = run(choice, [[256], *[[byte] for byte in "🌊".encode()], [256]])
    assert "".join(piece.text for piece in pieces) == "wave"
    assert choice.num_tokens == 5


def test_held_text_comes_out_when_no_stop_string_comes(text_model: TextModel) -> None:
    pieces = run(ChoiceText(text_model, request(("stop!",)), 0), [[257], []])
    assert [piece.text for piece in pieces] == [" ", "sto"]


def test_stop_strings_wait_for_min_tokens(text_model: TextModel) -> None:
    choice = ChoiceText(text_model, request(("be",), min_tokens=2), 0)
    pieces = run(choice, [[260], [260], [256], [260], [256]])
    assert "".join(piece.text for piece in pieces) == "bebewave"
    assert (choice.finish_reason, choice.num_tokens) == (FinishReason.STOP, 4)


@pytest.mark.parametrize(("token", "params"), [(END, {}), (256, {"stop_token_ids": (256,)})])
def test_the_token_that_ends_is_counted_and_not_shown(
    text_model: TextModel, token: int, params: dict[str, object]
) -> None:
    choice = ChoiceText(text_model, request(**params), 0)
    first = choice.push(event([260]))
    last = choice.push(event([token], FinishReason.STOP))
    assert (first.text, last.text, choice.num_tokens) == ("be", "", 2)


def test_logprobs_leave_with_their_text(text_model: TextModel) -> None:
    choice = ChoiceText(text_model, request(("stop!",), num_logprobs=1), 0)
    pieces = run(choice, [[256], [257], [259], [0xF0], [0x9F, 0x8C, 0x8A], []], logprobs=True)
    shown = [(piece.text, [token.token for token in piece.tokens or []], piece.offsets) for piece in pieces]
    assert shown == [
        ("wave", ["wave"], [0]),
        (" ", [" sto"], [4]),
        ("stoaa", ["aa"], [8]),
        ("", [], []),
        ("🌊", ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x8c", "bytes:\\x8a"], [10, 10, 10, 10]),
        ("", [], []),
    ]
    assert pieces[0].tokens is not None
    assert pieces[0].tokens[0].top_logprobs[0].logprob == -9999.0


def test_logprobs_of_a_cut_stop_string_are_not_shown(text_model: TextModel) -> None:
    choice = ChoiceText(text_model, request(("stop!",), num_logprobs=0), 0)
    pieces = run(choice, [[256], [257], [258], []], logprobs=True)
    assert [token.token for piece in pieces for token in piece.tokens or []] == ["wave", " sto"]


def test_an_echoed_prompt_shifts_the_offsets(text_model: TextModel) -> None:
    choice = ChoiceText(text_model, request(num_logprobs=0, echo=True), 0)
    logprobs = [PositionLogprobs(TokenLogprob(260, -2.0))]
    echoed = prompt_piece(text_model, None, [256, 260], logprobs)
    choice.echo(echoed)
    (piece,) = run(choice, [[259]], logprobs=True)
    whole = join_pieces([echoed, piece])
    assert whole.text == "wavebeaa"
    assert whole.offsets == [0, 4, 6]
    assert [token.logprob for token in whole.tokens or []] == [None, -2.0, -1.0]


def test_the_callers_own_text_is_echoed(text_model: TextModel) -> None:
    assert prompt_piece(text_model, "text", [256], None) == Piece("text")
