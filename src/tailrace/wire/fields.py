"""Hop 2: strict decoding of a JSON body, with the name of the field at fault in every refusal.

Each top-level field is known (declared in `wire.bodies`), harmless (ignored by the printed list), refused, or unknown.
"""

import difflib
import re
from typing import Any, TypeVar

import msgspec

from tailrace.errors import InvalidRequest, Unsupported

Body = TypeVar("Body", bound=msgspec.Struct)

IGNORED_FIELDS: tuple[str, ...] = (
    "store",
    "metadata",
    "user",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
    "request_id",
)
"""Accepted and ignored whatever their value: they change no token of the answer."""

REFUSED_FIELDS: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"], []),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "logits_processors": ([],),
}
"""Fields of OpenAI and vLLM asking for what is not done here -> the values that ask for nothing (null always does)."""

_AT_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_FIELD = re.compile(r"(?:missing required|unknown) field `(?P<field>[^`]*)`")
_raw_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def decode_body(body: bytes, kind: type[Body]) -> Body:
    """The body as `kind`. Raises InvalidRequest (malformed, unknown, out of range) or Unsupported, with `param`."""
    try:
        fields = _raw_decoder.decode(body)
        _screen(fields, kind)
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not JSON in UTF-8: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


def _screen(fields: dict[str, msgspec.Raw], kind: type[Body]) -> None:
    """Lets known and harmless fields pass."""
    known = kind.__struct_fields__
    for name, raw in fields.items():
        if name in known or name in IGNORED_FIELDS:
            continue
        if name not in REFUSED_FIELDS:
            raise InvalidRequest(f"unknown field {_shown(name)}{_nearest(name, known)}", param=_shown(name))
        value = msgspec.json.decode(raw)
        if value is not None and value not in REFUSED_FIELDS[name]:
            raise Unsupported(f"{name} is not supported; leave the field out", param=name)


def _shown(name: str) -> str:
    """A caller's name, short enough for a message."""
    return name if len(name) <= 64 else name[:61] + "..."


def _nearest(name: str, known: tuple[str, ...]) -> str:
    matches = difflib.get_close_matches(name[:64], known, n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


def _invalid(text: str) -> InvalidRequest:
    """msgspec's sentence `Expected ... - at `$.a[0].b`` as a message and a `param`."""
    match = _AT_PATH.search(text)
    path = match["path"] if match else ""
    message = _AT_PATH.sub("", text)
    field = _FIELD.search(message)
    if field:
        path = f"{path}.{field['field']}" if path else field["field"]
    where = f"{_shown(path)}: " if path else ""
    return InvalidRequest(f"{where}{message[:300]}", param=_shown(path) or None)
