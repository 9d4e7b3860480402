"""Hop 2: the request bodies as they come over the wire, one Struct each, with types and ranges declared.

A field set to null counts as absent, as OpenAI's clients send it. What a Struct cannot say is checked in `wire.openai`.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

CHOICES_MAX = 128
"""Prompts x n of one request: each choice is a sequence of the engine. OpenAI's bound for n is 128."""
STOP_STRINGS_MAX = 16
"""OpenAI allows 4; 16 covers the few clients that send more."""
STOP_CHARS_MAX = 256
"""That much text may be held back from a stream."""
STOP_TOKEN_IDS_MAX = 64
LOGIT_BIAS_MAX = 1024
LOGPROBS_MAX = 20
"""OpenAI's bound for `top_logprobs`; for `logprobs` of completions it allows 5."""
MESSAGES_MAX = 4096
_INT32_MAX = 2**31 - 1

Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
TokenId = Annotated[int, Meta(ge=0, le=_INT32_MAX)]
NumTokens = Annotated[int, Meta(ge=0, le=_INT32_MAX)]
StopString = Annotated[str, Meta(min_length=1, max_length=STOP_CHARS_MAX)]


class ContentPart(msgspec.Struct, frozen=True):
    """Only `text` parts are served; the others are named in the refusal."""

    type: str
    text: str | None = None


class MessageBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None
    audio: Any = None
    # What servers put into an answer and clients send back with the history; it changes no text here.
    refusal: Any = None
    annotations: Any = None
    reasoning: Any = None
    reasoning_content: Any = None


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's: with `include_usage`, every chunk says what its choice has used so far."""
    include_obfuscation: bool | None = None
    """OpenAI pads chunks against traffic analysis; accepted, never done."""


class SamplingBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that both routes share."""

    model: str
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_INT32_MAX)] | None = None
    """-1 and 0 switch it off, as in vLLM."""
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10.0)] | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=LOGIT_BIAS_MAX)] | None = None
    max_tokens: NumTokens | None = None
    min_tokens: NumTokens | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=STOP_STRINGS_MAX)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=STOP_TOKEN_IDS_MAX)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Meta(ge=-_INT32_MAX, le=_INT32_MAX)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None


class ChatBody(SamplingBody, frozen=True, kw_only=True):
    messages: Annotated[list[MessageBody], Meta(min_length=1, max_length=MESSAGES_MAX)]
    max_completion_tokens: NumTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    add_generation_prompt: bool | None = None


class CompletionBody(SamplingBody, frozen=True, kw_only=True):
    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    echo: bool | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's: `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[MessageBody], Meta(min_length=1, max_length=MESSAGES_MAX)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]
