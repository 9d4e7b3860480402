"""Hop 12, the reader's side: what OpenAI-compatible servers stream, as types. Pure: bytes in, values out.

Only what a reader needs is named; everything else in a chunk is skipped without being made. Decoding raises
`msgspec.DecodeError` (of which ValidationError is one) or UnicodeDecodeError: the caller says what that means.
"""

from typing import Any

import msgspec

MESSAGE_CHARS_MAX = 300


class FunctionPart(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class ToolCallPart(msgspec.Struct, gc=False):
    function: FunctionPart | None = None


class Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Newer vLLM and several gateways name it so; some send both names with the same text."""
    tool_calls: list[ToolCallPart] | None = None


class Choice(msgspec.Struct, gc=False):
    delta: Delta | None = None
    """Of a chat."""
    text: str | None = None
    """Of a completion."""
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class Timings(msgspec.Struct, gc=False):
    """What llama-server says beside or instead of usage."""

    cache_n: int | None = None
    """Prompt tokens found in its cache."""
    prompt_n: int | None = None
    """Prompt tokens computed, so without the cached ones."""
    predicted_n: int | None = None


class Chunk(msgspec.Struct, gc=False):
    choices: list[Choice] | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    written_ns: int | None = None
    """Our null server only: its monotonic clock as it wrote this chunk."""
    error: Any = None


class Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class Models(msgspec.Struct):
    data: list[Model]


decode_chunk = msgspec.json.Decoder(Chunk).decode


def tool_text(parts: list[ToolCallPart]) -> str:
    """What the model wrote of tool calls: names and pieces of arguments."""
    functions = [part.function for part in parts if part.function is not None]
    return "".join((function.name or "") + (function.arguments or "") for function in functions)


def error_text(content: bytes | str) -> str:
    """The message of an error answer, JSON or not; printable and bounded."""
    try:
        value = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = content.decode("utf-8", "replace") if isinstance(content, bytes) else content
        return printable(text) or "no message"
    return error_message(value.get("error", value) if isinstance(value, dict) else value)


def error_message(value: Any) -> str:
    """Of the value of an `error` field: an object with a message, or whatever the server put there."""
    if isinstance(value, dict) and isinstance(value.get("message"), str):
        value = value["message"]
    return printable(str(value))


def printable(text: str, chars_max: int = MESSAGE_CHARS_MAX) -> str:
    """One line, no control characters, bounded: text from outside that goes into rows and onto terminals."""
    kept = "".join(c if c.isprintable() else " " for c in text[: 2 * chars_max])
    return " ".join(kept.split())[:chars_max]
