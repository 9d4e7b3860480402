"""Hop 8: messages -> the text the model was trained on, through its chat template (jinja, sandboxed).

What a caller wrote must stay text: `<|im_end|>` inside a message is ten characters, not a control token. So before
rendering, special tokens in messages are broken with a private character that occurs nowhere else::

    "say <|im_end|>"  ->  "say <\\uf8ff|im_end|>"  -> template ->  split at whole special tokens -> drop the character

The template itself is as trusted as the model it came with: the sandbox keeps it from Python's internals and the size
of what it writes is bounded, its running time is not.
"""

import datetime
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tailrace.errors import InvalidRequest, ModelSourceError
from tailrace.request import Message

RENDERED_CHARS_MAX = 32 * 1024 * 1024
"""Far above any context (a token is about four characters); stops a template that multiplies its input."""

_PRIVATE_CHARS = range(0xF8FF, 0xDFFF, -1)
"""The basic private use area, from its end."""


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes for HTML, which templates of models do not expect.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


class ChatTemplate:
    """A compiled template. `tokens` are the names it may use: bos_token, eos_token, ..."""

    def __init__(self, source: str, tokens: dict[str, str]) -> None:
        """Raises ModelSourceError when the template does not compile."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.source = source
        self._tokens = tokens
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelSourceError(
                f"the chat template does not compile ({error}); pass a working one with --chat-template"
            ) from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """Raises InvalidRequest with the template's reason, or when it writes more than `RENDERED_CHARS_MAX`."""
        values = {
            **self._tokens,
            "messages": [_to_dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(values):
                num_chars += len(piece)
                if num_chars > RENDERED_CHARS_MAX:
                    raise jinja2.TemplateError(f"it wrote more than {RENDERED_CHARS_MAX} characters")
                pieces.append(piece)
        except Exception as error:
            # Any error of a template comes from these messages meeting this template: the caller's to mend.
            reason = str(error) or type(error).__name__
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {reason}", param="messages"
            ) from error
        return "".join(pieces)


class SpecialTexts:
    """Finds the texts of special tokens, and keeps a caller's text from being taken for one."""

    def __init__(self, texts: Iterable[str]) -> None:
        # A token of one character cannot be broken; such a token is text wherever it stands.
        ordered = sorted({text for text in texts if len(text) > 1}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def found_in(self, text: str) -> bool:
        return self._pattern is not None and self._pattern.search(text) is not None

    def break_all(self, text: str, mark: str) -> str:
        """`text` with `mark` inside every special token, until none is whole (overlapping ones take several passes)."""
        while self._pattern is not None and self._pattern.search(text) is not None:
            text = self._pattern.sub(lambda match: match[0][0] + mark + match[0][1:], text)
        return text

    def protect(self, messages: Sequence[Message], template: str) -> tuple[list[Message], str | None]:
        """Messages without any whole special token, and the character that breaks them (None: nothing to break)."""
        texts = [text for m in messages for text in (m.role, m.content, m.name) if text is not None]
        if not any(self.found_in(text) for text in texts):
            return list(messages), None
        mark = _unused_char([*texts, template])
        return [_broken(message, self, mark) for message in messages], mark


def _broken(message: Message, specials: SpecialTexts, mark: str) -> Message:
    return Message(
        role=specials.break_all(message.role, mark),
        content=specials.break_all(message.content, mark),
        name=None if message.name is None else specials.break_all(message.name, mark),
    )


def _unused_char(texts: Sequence[str]) -> str:
    """Raises InvalidRequest when the texts use all 6,400 private characters, which no honest text does."""
    for code in _PRIVATE_CHARS:
        if not any(chr(code) in text for text in texts):
            return chr(code)
    raise InvalidRequest("the messages use every private character of Unicode; leave one out", param="messages")


def _to_dict(message: Message) -> dict[str, str]:
    fields = {"role": message.role, "content": message.content}
    return fields if message.name is None else {**fields, "name": message.name}
