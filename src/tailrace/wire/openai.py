"""Hop 2: an OpenAI request body -> `Request`. Pure: no clock, no model, no I/O.

In: the bytes of `POST /v1/chat/completions` or `/v1/completions` and what the service knows (`RequestContext`).
Out: a checked `Request`, or InvalidRequest, Unsupported or ModelNotFound with the field at fault.
Never: tokenises, or cuts `max_tokens` to the context; the worker does that when it knows the prompt's length.
"""

import msgspec

from tailrace.errors import InvalidRequest, ModelNotFound, Unsupported
from tailrace.request import (
    ChatPrompt,
    Message,
    Prompt,
    Request,
    RequestId,
    SamplingDefaults,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)
from tailrace.wire.bodies import CHOICES_MAX, ChatBody, CompletionBody, MessageBody, SamplingBody, StreamOptions
from tailrace.wire.fields import decode_body

MAX_TOKENS_OPEN = 2**31 - 1
"""`SamplingParams.max_tokens` of a request that asked for what is left of the context; the worker cuts it."""
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for `/v1/completions`; chat defaults to what is left of the context."""
TIMEOUT_MS_MAX = 24 * 3600 * 1000
_TOP_P_MIN = 1e-6
"""Zero means "the most probable token alone" to OpenAI's clients; the sampler wants a positive mass."""
_SEED_MASK = 0xFFFFFFFFFFFFFFFF
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Templates of open models know no `developer`; OpenAI defines it as the newer name of `system`."""
_TOOL_ROLES = ("tool", "function")


class RequestContext(msgspec.Struct, frozen=True, kw_only=True):
    """What the service knows when a body arrives."""

    request_id: RequestId
    arrival_ns: int
    served_models: tuple[str, ...]
    vocab_size: int
    seed: int
    """Used when the caller names none."""
    defaults: SamplingDefaults = SamplingDefaults()
    deadline_ns: int | None = None


def to_chat_request(body: bytes, context: RequestContext) -> Request:
    """`POST /v1/chat/completions`."""
    chat = decode_body(body, ChatBody)
    if chat.max_completion_tokens == 0 or (chat.max_tokens == 0 and chat.max_completion_tokens is None):
        param = "max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens"
        raise InvalidRequest("at least one token must be asked for", param=param)
    if chat.top_logprobs is not None and not chat.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    num_logprobs = (chat.top_logprobs or 0) if chat.logprobs else None
    asked = chat.max_completion_tokens if chat.max_completion_tokens is not None else chat.max_tokens
    prompt = ChatPrompt(to_messages(chat.messages), chat.add_generation_prompt is not False)
    return _request(chat, context, (prompt,), asked=asked, num_logprobs=num_logprobs)


def to_completion_request(body: bytes, context: RequestContext) -> Request:
    """`POST /v1/completions`. `max_tokens: 0` is allowed with `echo`: it scores the prompt."""
    completion = decode_body(body, CompletionBody)
    echo = completion.echo is True
    if completion.max_tokens == 0 and not echo:
        raise InvalidRequest("max_tokens: 0 needs echo: true", param="max_tokens")
    asked = completion.max_tokens
    if asked is None and context.defaults.max_tokens is None:
        asked = COMPLETION_MAX_TOKENS
    prompts = _prompts(completion.prompt, context.vocab_size)
    return _request(completion, context, prompts, asked=asked, num_logprobs=completion.logprobs, echo=echo)


def check_model(model: str, served_models: tuple[str, ...]) -> None:
    """Raises ModelNotFound."""
    if model not in served_models:
        names = ", ".join(served_models)
        raise ModelNotFound(f"the model {model[:100]!r} is not served here; served: {names}", param="model")


def parse_timeout_ms(value: str) -> int:
    """The `x-request-timeout-ms` header. Raises InvalidRequest."""
    if value.isascii() and value.isdecimal() and len(value) <= 9 and 1 <= int(value) <= TIMEOUT_MS_MAX:
        return int(value)
    raise InvalidRequest(f"a whole number from 1 to {TIMEOUT_MS_MAX} is wanted", param="x-request-timeout-ms")


def to_messages(bodies: list[MessageBody]) -> tuple[Message, ...]:
    return tuple(_message(body, f"messages[{index}]") for index, body in enumerate(bodies))


def _message(body: MessageBody, at: str) -> Message:
    if body.role in _TOOL_ROLES:
        raise Unsupported(f"messages of role {body.role} are not supported", param=f"{at}.role")
    if body.role not in _ROLES:
        raise InvalidRequest("the role is one of system, developer, user, assistant", param=f"{at}.role")
    for name in ("tool_calls", "tool_call_id", "function_call", "audio"):
        if getattr(body, name) not in (None, []):
            raise Unsupported(f"{name} is not supported", param=f"{at}.{name}")
    return Message(role=_ROLES[body.role], content=_content(body, f"{at}.content"), name=body.name)


def _content(body: MessageBody, at: str) -> str:
    if body.content is None:
        raise InvalidRequest("a message needs content", param=at)
    if isinstance(body.content, str):
        return body.content
    texts = []
    for index, part in enumerate(body.content):
        if part.type != "text":
            raise Unsupported("only text parts are supported", param=f"{at}[{index}].type")
        if part.text is None:
            raise InvalidRequest("a text part needs text", param=f"{at}[{index}].text")
        texts.append(part.text)
    return "".join(texts)


def _prompts(value: str | list[str | int | list[int]], vocab_size: int) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (TextPrompt(value),)
    if all(isinstance(item, int) for item in value):
        return (_token_prompt(value, vocab_size, "prompt"),)
    if all(isinstance(item, str) for item in value):
        return tuple(TextPrompt(str(item)) for item in value)
    if all(isinstance(item, list) for item in value):
        return tuple(_token_prompt(item, vocab_size, f"prompt[{index}]") for index, item in enumerate(value))
    raise InvalidRequest("texts, token ids and lists of token ids cannot be mixed", param="prompt")


def _token_prompt(ids: object, vocab_size: int, at: str) -> TokenPrompt:
    assert isinstance(ids, list)
    if not ids:
        raise InvalidRequest("a prompt needs at least one token", param=at)
    if max(ids) >= vocab_size:
        raise InvalidRequest(f"token ids are below {vocab_size}", param=at)
    return TokenPrompt(tuple(ids))


def _request(
    body: SamplingBody,
    context: RequestContext,
    prompts: tuple[Prompt, ...],
    *,
    asked: int | None,
    num_logprobs: int | None,
    echo: bool = False,
) -> Request:
    check_model(body.model, context.served_models)
    num_choices = body.n or 1
    if num_choices * len(prompts) > CHOICES_MAX:
        raise InvalidRequest(f"prompts x n is at most {CHOICES_MAX}", param="n" if num_choices > 1 else "prompt")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    asked = context.defaults.max_tokens if asked is None else asked
    stream_options = body.stream_options or StreamOptions()
    return Request(
        request_id=context.request_id,
        model=body.model,
        arrival_ns=context.arrival_ns,
        prompts=prompts,
        num_choices=num_choices,
        sampling=_sampling(body, context, asked, num_logprobs, num_logprobs if echo else None),
        max_tokens_asked=asked,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stream=body.stream is True,
        include_usage=stream_options.include_usage is True,
        # As in vLLM: it refines `include_usage` and means nothing alone.
        chunk_usage=stream_options.include_usage is True and stream_options.continuous_usage_stats is True,
        echo=echo,
        priority=body.priority or 0,
        deadline_ns=context.deadline_ns,
        cache_salt=body.cache_salt or "",
    )


def _sampling(
    body: SamplingBody,
    context: RequestContext,
    asked: int | None,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
) -> SamplingParams:
    """The caller's field, else the model's generation config, else OpenAI's default."""
    defaults = context.defaults
    min_tokens = body.min_tokens or 0
    if asked is not None and min_tokens > asked:
        raise InvalidRequest(f"min_tokens is above max_tokens ({asked})", param="min_tokens")
    top_k = defaults.top_k if body.top_k is None else body.top_k
    return SamplingParams(
        max_tokens=MAX_TOKENS_OPEN if asked is None else max(1, asked),
        min_tokens=min_tokens,
        temperature=_first(body.temperature, defaults.temperature, 1.0),
        top_p=max(_TOP_P_MIN, _first(body.top_p, defaults.top_p, 1.0)),
        top_k=min(top_k, context.vocab_size) if top_k is not None and top_k > 0 else None,
        min_p=_first(body.min_p, defaults.min_p, 0.0),
        seed=(context.seed if body.seed is None else body.seed) & _SEED_MASK,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_first(body.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=_logit_bias(body.logit_bias, context.vocab_size),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        stop_token_ids=_stop_token_ids(body.stop_token_ids, context.vocab_size),
        ignore_eos=body.ignore_eos is True,
    )


def _first(asked: float | None, by_model: float | None, otherwise: float) -> float:
    value = by_model if asked is None else asked
    return otherwise if value is None else value


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    """Keys are token ids written as text, as JSON wants it."""
    checked = {}
    for key, value in (bias or {}).items():
        is_number = key.isascii() and key.isdecimal() and len(key) <= 10
        if not is_number or int(key) >= vocab_size:
            raise InvalidRequest(f"the keys are token ids below {vocab_size}", param=f"logit_bias.{key[:20]}")
        checked[int(key)] = value
    return checked


def _stop_token_ids(ids: list[int] | None, vocab_size: int) -> tuple[int, ...]:
    if ids and max(ids) >= vocab_size:
        raise InvalidRequest(f"token ids are below {vocab_size}", param="stop_token_ids")
    return tuple(ids or ())
