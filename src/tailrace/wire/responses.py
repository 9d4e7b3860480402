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


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    """Of every prompt once, however many choices were drawn from it."""
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens found in the KV cache."""


class ChoiceAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One whole choice of an unstreamed answer."""

    index: int
    text: str
    finish_reason: FinishReason
    tokens: list[TokenText] | None = None
    """None unless logprobs were asked for."""


class AnswerHead(msgspec.Struct, frozen=True, kw_only=True):
    """What all objects of one answer share."""

    id: str
    created: int
    """Unix time in seconds."""
    model: str
    system_fingerprint: str


class ChunkEncoder(Protocol):
    """Writes the events of one stream. An empty result means: nothing to send."""

    def start(self, index: int) -> bytes: ...

    def text(self, index: int, text: str, tokens: list[TokenText] | None, text_offset: int) -> bytes: ...

    def finish(self, index: int, reason: FinishReason) -> bytes: ...

    def usage(self, usage: Usage) -> bytes: ...


class ChatChunks:
    """`chat.completion.chunk` events: role, content..., finish, usage."""

    def __init__(self, head: AnswerHead, *, include_usage: bool) -> None:
        self._prefix = b"data: " + _open_object(head, "chat.completion.chunk")
        self._suffix = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"

    def start(self, index: int) -> bytes:
        return self._choice(index, b'{"role":"assistant","content":""}', b"null", b"null")

    def text(self, index: int, text: str, tokens: list[TokenText] | None, text_offset: int) -> bytes:  # noqa: ARG002
        logprobs = b"null" if tokens is None else _encode(_chat_logprobs(tokens))
        return self._choice(index, b'{"content":' + _encode(text) + b"}", logprobs, b"null")

    def finish(self, index: int, reason: FinishReason) -> bytes:
        return self._choice(index, b"{}", b"null", _encode(reason.value))

    def usage(self, usage: Usage) -> bytes:
        return self._prefix + b'],"usage":' + _encode(_usage(usage)) + b"}\n\n"

    def _choice(self, index: int, delta: bytes, logprobs: bytes, reason: bytes) -> bytes:
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._prefix,
            index,
            delta,
            logprobs,
            reason,
            self._suffix,
        )


class CompletionChunks:
    """`text_completion` events: text..., finish, usage. There is no role to announce."""

    def __init__(self, head: AnswerHead, *, include_usage: bool) -> None:
        self._prefix = b"data: " + _open_object(head, "text_completion")
        self._suffix = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"

    def start(self, index: int) -> bytes:  # noqa: ARG002
        return b""

    def text(self, index: int, text: str, tokens: list[TokenText] | None, text_offset: int) -> bytes:
        logprobs = b"null" if tokens is None else _encode(_completion_logprobs(tokens, text_offset))
        return self._choice(index, _encode(text), logprobs, b"null")

    def finish(self, index: int, reason: FinishReason) -> bytes:
        return self._choice(index, b'""', b"null", _encode(reason.value))

    def usage(self, usage: Usage) -> bytes:
        return self._prefix + b'],"usage":' + _encode(_usage(usage)) + b"}\n\n"

    def _choice(self, index: int, text: bytes, logprobs: bytes, reason: bytes) -> bytes:
        return b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._prefix,
            index,
            text,
            logprobs,
            reason,
            self._suffix,
        )


def chat_answer(head: AnswerHead, choices: list[ChoiceAnswer], usage: Usage) -> bytes:
    """A `chat.completion` object."""
    rows: list[dict[str, object]] = [
        {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": None if choice.tokens is None else _chat_logprobs(choice.tokens),
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
            "text": choice.text,
            "logprobs": None if choice.tokens is None else _completion_logprobs(choice.tokens, 0),
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


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _chat_logprobs(tokens: list[TokenText]) -> dict[str, object]:
    return {"content": tokens, "refusal": None}


def _completion_logprobs(tokens: list[TokenText], text_offset: int) -> dict[str, object]:
    """The older shape: four parallel lists. Offsets count characters from the start of the choice's text."""
    offsets = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token.token)
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [
            None if token.logprob is None else {top.token: top.logprob for top in token.top_logprobs}
            for token in tokens
        ],
        "text_offset": offsets,
    }
