"""Hop 2 and 12 of `/tokenize` and `/detokenize`, in vLLM's shape. Pure."""

import msgspec

from tailrace.errors import InvalidRequest
from tailrace.request import ChatPrompt, TextPrompt
from tailrace.wire.bodies import DetokenizeBody, TokenizeBody
from tailrace.wire.fields import decode_body
from tailrace.wire.openai import check_model, to_messages


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    prompt: ChatPrompt | TextPrompt
    add_special_tokens: bool
    return_token_strs: bool


def to_tokenize_request(body: bytes, served_models: tuple[str, ...]) -> TokenizeRequest:
    """Raises InvalidRequest, Unsupported, ModelNotFound."""
    fields = decode_body(body, TokenizeBody)
    if fields.model is not None:
        check_model(fields.model, served_models)
    if (fields.prompt is None) == (fields.messages is None):
        raise InvalidRequest("one of prompt and messages is wanted", param="prompt")
    prompt: ChatPrompt | TextPrompt
    if fields.messages is not None:
        prompt = ChatPrompt(to_messages(fields.messages), fields.add_generation_prompt is not False)
    else:
        prompt = TextPrompt(fields.prompt or "")
    return TokenizeRequest(
        prompt=prompt,
        add_special_tokens=fields.add_special_tokens is not False,
        return_token_strs=fields.return_token_strs is True,
    )


def to_detokenize_request(body: bytes, served_models: tuple[str, ...], vocab_size: int) -> list[int]:
    """Token ids. Raises InvalidRequest, ModelNotFound."""
    fields = decode_body(body, DetokenizeBody)
    if fields.model is not None:
        check_model(fields.model, served_models)
    if fields.tokens and max(fields.tokens) >= vocab_size:
        raise InvalidRequest(f"token ids are below {vocab_size}", param="tokens")
    return fields.tokens


def tokenize_answer(tokens: list[int], *, max_model_len: int | None, token_strs: list[str] | None) -> bytes:
    return msgspec.json.encode(
        {"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens, "token_strs": token_strs}
    )


def detokenize_answer(text: str) -> bytes:
    return msgspec.json.encode({"prompt": text})
