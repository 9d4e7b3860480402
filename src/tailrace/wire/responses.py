"""Hop 12: text and logprobs -> the JSON objects of OpenAI's API. Pure.

Chunks are written by hand around what never changes within a stream: with 64 streams open, every chunk is paid for in
the time between two steps.
"""

from typing import Protocol

import msgspec

from tailrace.errors import TailraceError
from tailrace.request import FinishReason
from tailrace.wire.sse import encode_event

LOGPROB_FLOOR = -9999.0
"""What OpenAI reports for a token of no probability: JSON has no infinity."""
_encode = msgspec.json.encode


class TopText(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenText(msgspec.Struct, frozen=True):
    """One token of the answer, or of an echoed prompt, as text. Field names and order are OpenAI's."""

    token: str
    logprob: float | None
    """None for the first token of a prompt: nothing precedes it."""
    bytes: list[int]
    top_logprobs: list[TopText]


class Piece(msgspec.Struct, frozen=True):
    """Text of one choice that became final, with the tokens it is made of."""

    text: str
    tokens: list[TokenText] | None = None
    """None unless logprobs were asked for."""
    offsets: list[int] = []
    """Of each token: characters of the choice's text before it."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    """Of every prompt once, however many choices were drawn from it."""
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens found in the KV cache."""


class ChoiceAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One whole choice of an unstreamed answer."""

    index: int
    piece: Piece
    finish_reason: FinishReason


class AnswerHead(msgspec.Struct, frozen=True, kw_only=True):
    """What all objects of one answer share."""

    id: str
    created: int
    """Unix time in seconds."""
    model: str
    system_fingerprint: str


class ChunkEncoder(Protocol):
    """Writes the events of one stream. An empty result means: nothing to send.

    `used` is what the choice has used so far, where the caller wants it in every chunk.
    """

    def start(self, index: int, used: Usage | None) -> bytes: ...

    def piece(self, index: int, piece: Piece, used: Usage | None) -> bytes: ...

    def finish(self, index: int, reason: FinishReason, used: Usage | None) -> bytes: ...

    def usage(self, usage: Usage) -> bytes: ...


class ChatChunks:
    """`chat.completion.chunk` events: role, content..., finish, usage."""

    def __init__(self, head: AnswerHead, *, include_usage: bool) -> None:
        self._prefix = b"data: " + _open_object(head, "chat.completion.chunk")
        self._suffix = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"

    def start(self, index: int, used: Usage | None) -> bytes:
        return self._choice(index, b'{"role":"assistant","content":""}', b"null", b"null", used)

    def piece(self, index: int, piece: Piece, used: Usage | None) -> bytes:
        logprobs = b"null" if piece.tokens is None else _encode(_chat_logprobs(piece))
        return self._choice(index, b'{"content":' + _encode(piece.text) + b"}", logprobs, b"null", used)

    def finish(self, index: int, reason: FinishReason, used: Usage | None) -> bytes:
        return self._choice(index, b"{}", b"null", _encode(reason.value), used)

    def usage(self, usage: Usage) -> bytes:
        return self._prefix + b'],"usage":' + _encode(_usage(usage)) + b"}\n\n"

    def _choice(self, index: int, delta: bytes, logprobs: bytes, reason: bytes, used: Usage | None) -> bytes:
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._prefix,
            index,
            delta,
            logprobs,
            reason,
            self._suffix if used is None else _usage_suffix(used),
        )


class CompletionChunks:
    """`text_completion` events: text..., finish, usage. There is no role to announce."""

    def __init__(self, head: AnswerHead, *, include_usage: bool) -> None:
        self._prefix = b"data: " + _open_object(head, "text_completion")
        self._suffix = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"

    def start(self, index: int, used: Usage | None) -> bytes:  # noqa: ARG002
        return b""

    def piece(self, index: int, piece: Piece, used: Usage | None) -> bytes:
        logprobs = b"null" if piece.tokens is None else _encode(_completion_logprobs(piece))
        return self._choice(index, _encode(piece.text), logprobs, b"null", used)

    def finish(self, index: int, reason: FinishReason, used: Usage | None) -> bytes:
        return self._choice(index, b'""', b"null", _encode(reason.value), used)

    def usage(self, usage: Usage) -> bytes:
        return self._prefix + b'],"usage":' + _encode(_usage(usage)) + b"}\n\n"

    def _choice(self, index: int, text: bytes, logprobs: bytes, reason: bytes, used: Usage | None) -> bytes:
        return b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._prefix,
            index,
            text,
            logprobs,
            reason,
            self._suffix if used is None else _usage_suffix(used),
        )


def chat_answer(head: AnswerHead, choices: list[ChoiceAnswer], usage: Usage) -> bytes:
    """A `chat.completion` object."""
    rows: list[dict[str, object]] = [
        {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.piece.text, "refusal": None},
            "logprobs": _chat_logprobs(choice.piece),
            "finish_reason": choice.finish_reason.value,
        }
        for choice in choices
    ]
    return _answer(head, "chat.completion", rows, usage)


def completion_answer(head: AnswerHead, choices: list[ChoiceAnswer], usage: Usage) -> bytes:
    """A `text_completion` object."""
    rows: list[dict[str, object]] = [
        {
            "index": choice.index,
            "text": choice.piece.text,
            "logprobs": _completion_logprobs(choice.piece),
            "finish_reason": choice.finish_reason.value,
        }
        for choice in choices
    ]
    return _answer(head, "text_completion", rows, usage)


def error_object(message: str, *, kind: str, param: str | None, code: str) -> bytes:
    """OpenAI's shape of an error; `code` is the label of `errors.ERROR_TABLE`."""
    return _encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_body(error: TailraceError) -> bytes:
    row = error.row
    return error_object(error.message, kind=row.openai_type, param=error.param, code=row.label)


def error_event(error: TailraceError) -> bytes:
    """The last event of a stream that failed; no `[DONE]` follows it."""
    return encode_event(error_body(error))


def model_object(
    name: str, *, created: int, max_model_len: int | None, content_hash: str, root: str
) -> dict[str, object]:
    """One row of `/v1/models`. `max_model_len` as in vLLM; None until the engine is ready."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "tailrace",
        "root": root,
        "max_model_len": max_model_len,
        "content_hash": content_hash,
    }


def _open_object(head: AnswerHead, kind: str) -> bytes:
    """The object up to its list of choices, which stays open."""
    fields = _encode(
        {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.system_fingerprint,
        }
    )
    return fields[:-1] + b',"choices":['


def _answer(head: AnswerHead, kind: str, choices: list[dict[str, object]], usage: Usage) -> bytes:
    return _open_object(head, kind) + _encode(choices)[1:] + b',"usage":' + _encode(_usage(usage)) + b"}"


def _usage_suffix(used: Usage) -> bytes:
    return b'}],"usage":' + _encode(_usage(used)) + b"}\n\n"


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _chat_logprobs(piece: Piece) -> dict[str, object] | None:
    return None if piece.tokens is None else {"content": piece.tokens, "refusal": None}


def _completion_logprobs(piece: Piece) -> dict[str, object] | None:
    """The older shape: four parallel lists."""
    if piece.tokens is None:
        return None
    return {
        "tokens": [token.token for token in piece.tokens],
        "token_logprobs": [token.logprob for token in piece.tokens],
        "top_logprobs": [_top_by_text(token) for token in piece.tokens],
        "text_offset": piece.offsets,
    }


def _top_by_text(token: TokenText) -> dict[str, float] | None:
    """None for the first token of a prompt. Where two tokens have one text, the likelier one is kept."""
    if token.logprob is None:
        return None
    return {top.token: top.logprob for top in reversed(token.top_logprobs)}
