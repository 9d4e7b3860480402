"""Hops 8 and 12: text and messages -> token ids, token ids -> text. No kernels are needed for it.

Reads the tokenizer of a prepared model's directory: `tokenizer.json`, and where they exist `chat_template.jinja`,
`tokenizer_config.json` (names of special tokens), `generation_config.json` (end tokens).
"""

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tailrace.errors import InvalidRequest, ModelSourceError
from tailrace.model.chat import ChatTemplate, SpecialTexts
from tailrace.model.pieces import PieceTable
from tailrace.request import Message

TOKENIZER_NAME = "tokenizer.json"
TEMPLATE_NAME = "chat_template.jinja"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class TextModel:
    """The tokenizer and the chat template of one model. Immutable once loaded; may be used from several threads."""

    end_token_ids: frozenset[int]
    """Drawing one of these ends a sequence."""
    vocab_size: int
    """Largest token id of the tokenizer, plus one; the model's logits may be padded beyond it."""
    chat_template: str | None

    def __init__(
        self,
        tokenizer_json: dict[str, Any],
        *,
        end_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
        token_names: dict[str, str] | None = None,
    ) -> None:
        """Raises ModelRefused for a tokenizer that cannot be decoded token by token, ModelSourceError when it or the
        template is broken. `token_names` are what a template may use (bos_token, ...)."""
        self.end_token_ids = frozenset(end_token_ids)
        tokenizer_json = _with_control_marked(tokenizer_json, self.end_token_ids, set((token_names or {}).values()))
        self._plain = _open_tokenizer(tokenizer_json)
        later_step = _never_first(tokenizer_json.get("pre_tokenizer"))
        changed = later_step != tokenizer_json.get("pre_tokenizer")
        self._plain_later = _open_tokenizer({**tokenizer_json, "pre_tokenizer": later_step}) if changed else self._plain
        self._pieces = PieceTable(self._plain, tokenizer_json.get("decoder"))
        self._splitter = _SpecialSplitter(self._plain)
        self._specials = SpecialTexts(self._pieces.special_texts.values())
        self._prefix_ids = _prefix_ids(self._plain)
        self.vocab_size = max(self._plain.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.chat_template = chat_template
        self._template = None if chat_template is None else ChatTemplate(chat_template, token_names or {})

    @classmethod
    def load(cls, directory: Path, *, chat_template: str | None = None) -> "TextModel":
        """From a prepared model's directory. `chat_template`: template text, or the path of a file with it, to use
        instead of the model's. Raises ModelSourceError for missing or broken files, ModelRefused as the constructor."""
        config = read_json(directory / TOKENIZER_CONFIG_NAME)
        tokenizer_json = read_json(directory / TOKENIZER_NAME)
        if not tokenizer_json:
            raise ModelSourceError(
                f"{directory} has no {TOKENIZER_NAME}; export the model again with optimum-cli, which writes it"
            )
        template = _own_template(directory, config) if chat_template is None else _given_template(chat_template)
        return cls(
            tokenizer_json,
            end_token_ids=end_tokens(read_json(directory / GENERATION_CONFIG_NAME), tokenizer_json, config),
            chat_template=template,
            token_names={name: text for name in _TOKEN_NAMES if (text := _content(config.get(name))) is not None},
        )

    # --- text -> tokens ---

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of `text`.

        special: the text of special tokens becomes those tokens, and the model's own beginning (BOS) is added unless
        the text has it already. Otherwise text is only text. Raises InvalidRequest for text that is not Unicode.
        """
        if not special:
            return self._encode_text(text, first=True)
        ids = self._encode_rendered(text, None)
        prefix = self._prefix_ids
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The prompt as text, for people to read. Raises InvalidRequest when the template refuses the messages."""
        return self._chat_template().render(messages, add_generation_prompt=add_generation_prompt)

    def encode_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of the prompt; only the template writes control tokens (a BOS too, if the model wants one).

        Raises InvalidRequest when the template refuses the messages or the model has none.
        """
        template = self._chat_template()
        protected, mark = self._specials.protect(messages, template.source)
        return self._encode_rendered(template.render(protected, add_generation_prompt=add_generation_prompt), mark)

    def count_chat(self, messages: Sequence[Message]) -> list[int]:
        """Tokens that each message adds to the prompt; the first one's include what the template puts before it."""
        counts: list[int] = []
        total = 0
        for i, message in enumerate(messages):
            try:
                upto = len(self.encode_chat(messages[: i + 1], add_generation_prompt=False))
            except InvalidRequest:
                # Some templates refuse a conversation that stops here; the whole one may be legal.
                upto = total + len(self.encode(message.content, special=False))
            counts.append(upto - total)
            total = upto
        return counts

    # --- tokens -> text ---

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text: b"" for special tokens and unknown ids."""
        return self._pieces.bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        """A printable piece, as in OpenAI's log-probabilities: a part of a character reads `bytes:\\xf0\\x9f`."""
        special = self._pieces.special_texts.get(token_id)
        if special is not None:
            return special
        value = self._pieces.bytes_of(token_id)
        try:
            return value.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in value)

    def decode(self, token_ids: Iterable[int], *, at_start: bool = True) -> str:
        """The text of `token_ids` without special tokens; U+FFFD for what is not UTF-8.

        at_start: the tokens begin a text, so the space that encoding puts in front (SentencePiece) is dropped.
        """
        decoder = TextDecoder(self, at_start=at_start)
        return decoder.push(token_ids) + decoder.flush()

    @property
    def strips_leading_space(self) -> bool:
        return self._pieces.strips_leading_space

    # --- inside ---

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template: use /v1/completions, or start the service with --chat-template",
                param="messages",
            )
        return self._template

    def _encode_rendered(self, text: str, mark: str | None) -> list[int]:
        """Tokens of `text` whose whole special tokens are meant; `mark` is dropped from the text between them."""
        ids: list[int] = []
        for piece in self._splitter.split(text):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                plain = piece if mark is None else piece.replace(mark, "")
                ids.extend(self._encode_text(plain, first=not ids))
        return ids

    def _encode_text(self, text: str, *, first: bool) -> list[int]:
        tokenizer = self._plain if first else self._plain_later
        try:
            # Only the batch calls let other threads run: `encode` holds the interpreter, a second for each megabyte.
            # "fast" leaves out offsets: half the time, less memory.
            (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        except (UnicodeEncodeError, TypeError) as error:  # the library reports it as a TypeError
            raise InvalidRequest("the text has half of a surrogate pair, which is not Unicode; send UTF-8") from error
        return list(encoding.ids)


class TextDecoder:
    """The text of one growing sequence. Every piece it gives out is whole characters."""

    def __init__(self, text_model: TextModel, *, at_start: bool = False) -> None:
        """at_start: as for `TextModel.decode`; an answer to a prompt does not start a text."""
        self._text_model = text_model
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = at_start and text_model.strips_leading_space

    def push(self, token_ids: Iterable[int]) -> str:
        """The characters that these tokens complete; U+FFFD as soon as bytes cannot become a character any more."""
        value = b"".join(map(self._text_model.token_bytes, token_ids))
        if self._drop_space and value:
            self._drop_space = False
            value = value.removeprefix(b" ")
        return self._utf8.decode(value)

    def flush(self) -> str:
        """What is left of an unfinished character (U+FFFD), or "". The decoder may be used anew afterwards."""
        return self._utf8.decode(b"", final=True)


class _SpecialSplitter:
    """Cuts text at special tokens as the `tokenizers` library does, with their `lstrip` and `rstrip` flags."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        specials = {t.content: (i, t) for i, t in added.items() if t.special and len(t.content) > 1}
        ordered = sorted(specials, key=len, reverse=True)
        self._ids = {content: specials[content][0] for content in ordered}
        parts = []
        for content in ordered:
            token = specials[content][1]
            parts.append((r"\s*" if token.lstrip else "") + re.escape(content) + (r"\s*" if token.rstrip else ""))
        self._pattern = re.compile("|".join(parts)) if parts else None

    def split(self, text: str) -> Iterable[str | int]:
        """Texts (never empty) and special token ids, in order."""
        start = 0
        for match in self._pattern.finditer(text) if self._pattern is not None else ():
            if match.start() > start:
                yield text[start : match.start()]
            matched = match[0] if match[0] in self._ids else match[0].strip()
            yield self._ids[matched]
            start = match.end()
        if start < len(text):
            yield text[start:]


def read_json(path: Path) -> dict[str, Any]:
    """An optional JSON object: {} when there is no such file. Raises ModelSourceError when it is broken."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelSourceError(f"cannot read {path}: {error}; get the model again") from error
    if not isinstance(value, dict):
        raise ModelSourceError(f"cannot read {path}: it is not a JSON object; get the model again")
    return value


def end_tokens(
    generation_config: dict[str, Any], tokenizer_json: dict[str, Any], tokenizer_config: dict[str, Any]
) -> frozenset[int]:
    """The ids that end a sequence: the generation config's, and the tokenizer's own end token."""
    declared = generation_config.get("eos_token_id")
    ids = {i for i in (declared if isinstance(declared, list) else [declared]) if isinstance(i, int)}
    eos = _content(tokenizer_config.get("eos_token"))
    for token in _added_tokens(tokenizer_json):
        if eos is not None and token.get("content") == eos and isinstance(token.get("id"), int):
            ids.add(token["id"])
    return frozenset(ids)


def _content(value: Any) -> str | None:
    """A token of tokenizer_config.json: its text, or an object with it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _open_tokenizer(tokenizer_json: dict[str, Any]) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json, ensure_ascii=False))
    except Exception as error:  # the library raises a bare Exception
        raise ModelSourceError(f"the tokenizer cannot be read ({error}); get the model again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _added_tokens(tokenizer_json: dict[str, Any]) -> list[dict[str, Any]]:
    added = tokenizer_json.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise ModelSourceError(
            f"{TOKENIZER_NAME} is broken: its added_tokens are no list of tokens; get the model again"
        )
    return added


_TURN_MARK = re.compile(r"<\|[^|\s]+\|>|<(start|end)_of_turn>")


def _with_control_marked(tokenizer_json: dict[str, Any], end_ids: frozenset[int], named: set[str]) -> dict[str, Any]:
    """Some models do not mark all their control tokens as special; what ends or divides turns is made so here."""
    added = [
        {**token, "special": True}
        if token.get("id") in end_ids
        or token.get("content") in named
        or _TURN_MARK.fullmatch(str(token.get("content")))
        else token
        for token in _added_tokens(tokenizer_json)
    ]
    return {**tokenizer_json, "added_tokens": added}


def _never_first(step: Any) -> Any:
    """The pre-tokenizer for text behind a special token, where a `first` space prefix is not due."""
    if not isinstance(step, dict):
        return step
    if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first":
        return {**step, "prepend_scheme": "never"}
    if "pretokenizers" in step:
        return {**step, "pretokenizers": [_never_first(inner) for inner in step["pretokenizers"]]}
    return step


def _prefix_ids(tokenizer: Tokenizer) -> list[int]:
    """What the model wants before every text (BOS), from the tokenizer's own template; what it adds behind is left."""
    marked = tokenizer.encode("a", add_special_tokens=True)
    num_front = next((i for i, special in enumerate(marked.special_tokens_mask) if not special), 0)
    return list(marked.ids[:num_front])


def _own_template(directory: Path, config: dict[str, Any]) -> str | None:
    path = directory / TEMPLATE_NAME
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise ModelSourceError(f"cannot read {path}: {error}; get the model again") from error
    declared = config.get("chat_template")
    if isinstance(declared, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in declared if isinstance(t, dict)}
        declared = named.get("default")
    return declared if isinstance(declared, str) else None


def _given_template(value: str) -> str:
    """Template text as it is; anything without jinja's braces is a path."""
    if "{{" in value or "{%" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelSourceError(
            f"cannot read the chat template {value}: {error}; name a file or pass its text"
        ) from error
