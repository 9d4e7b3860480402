"""`tailrace tokenize`: what a text or a conversation costs in tokens."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tailrace.cli import options

if TYPE_CHECKING:
    from tailrace.model.text import TextModel
    from tailrace.request import Message

EPILOG = """\b
Examples:
  tailrace tokenize smollm2 -p 'How many tokens?'
  tailrace tokenize smollm2 --file prompt.txt --json
  tailrace tokenize smollm2 --chat messages.json
\b
FILE of --chat is what a request's `messages` holds: [{"role": "user", "content": "..."}]"""

FILE_BYTES_MAX = 64 * 1024 * 1024


def tokenize(
    model: str = options.MODEL,
    prompt: str | None = typer.Option(None, "-p", "--prompt", metavar="TEXT", help="A text."),
    file: str | None = typer.Option(None, "--file", "-f", metavar="FILE", help="A text in a file (UTF-8)."),
    chat: str | None = typer.Option(None, "--chat", metavar="FILE", help="Messages in a JSON file."),
    as_json: bool = options.JSON,
    chat_template: str | None = options.CHAT_TEMPLATE,
    config: str | None = options.CONFIG,
    assignments: list[str] | None = options.SET,
) -> None:
    """Count the tokens of a text or a conversation.

    Shows ids and pieces, and for a conversation the tokens that each message adds.
    """
    from tailrace.cli import compose
    from tailrace.cli.output import print_json
    from tailrace.errors import ConfigError

    if sum(source is not None for source in (prompt, file, chat)) != 1:
        raise ConfigError("name one of -p TEXT, --file FILE and --chat FILE")
    settings = compose.load_settings(config, assignments, {"--chat-template": ("model.chat_template", chat_template)})
    messages = _read_messages(Path(chat)) if chat is not None else None
    text = prompt if prompt is not None else _read(Path(file)) if file is not None else ""
    prepared = compose.prepare(model, settings)
    result = count(compose.load_text(prepared, settings), text, messages)
    if as_json:
        print_json({"model": prepared.manifest.name, **result})
    else:
        print(as_text(result))


def count(text_model: "TextModel", text: str, messages: "list[Message] | None") -> dict[str, object]:
    """Ids, pieces and counts of the messages (through the chat template), or of the text."""
    if messages is None:
        token_ids = text_model.encode(text, special=True)
        by_message: list[dict[str, object]] = []
    else:
        token_ids = text_model.encode_chat(messages)
        counts = text_model.count_chat(messages)
        by_message = [{"role": m.role, "num_tokens": n} for m, n in zip(messages, counts, strict=True)]
        by_message.append({"role": "(asking for the answer)", "num_tokens": len(token_ids) - sum(counts)})
    pieces = [text_model.token_text(token_id) for token_id in token_ids]
    return {"num_tokens": len(token_ids), "messages": by_message, "token_ids": token_ids, "pieces": pieces}


def as_text(result: "dict[str, object]") -> str:
    from tailrace.cli.output import table

    token_ids, pieces, messages = result["token_ids"], result["pieces"], result["messages"]
    assert isinstance(token_ids, list)
    assert isinstance(pieces, list)
    assert isinstance(messages, list)
    parts = [f"{result['num_tokens']} tokens"]
    if messages:
        rows = [[str(m["role"]), str(m["num_tokens"])] for m in messages]
        parts.append(table(["message", "tokens"], rows, right=frozenset({1})))
    if token_ids:
        rows = [
            [str(i), str(token_id), quoted(piece)]
            for i, (token_id, piece) in enumerate(zip(token_ids, pieces, strict=True))
        ]
        parts.append(table(["position", "id", "piece"], rows, right=frozenset({0, 1})))
    return "\n\n".join(parts)


def quoted(piece: str) -> str:
    """A piece with its spaces and line ends visible; a part of a character stays as it is: its bytes are escaped."""
    return piece if piece.startswith("bytes:\\x") else repr(piece)


def _read(path: Path) -> str:
    """Raises ConfigError for a file that is missing, too large or not UTF-8."""
    from tailrace.errors import ConfigError

    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise ConfigError(f"{path} is larger than {FILE_BYTES_MAX} bytes")
        return content.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})") from error


def _read_messages(path: Path) -> "list[Message]":
    """A JSON list of messages, or an object with `messages`. Raises ConfigError or InvalidRequest."""
    import msgspec

    from tailrace.errors import ConfigError
    from tailrace.wire.bodies import MessageBody
    from tailrace.wire.openai import to_messages

    try:
        value = msgspec.json.decode(_read(path))
        bodies = msgspec.convert(value["messages"] if isinstance(value, dict) else value, list[MessageBody])
    except (msgspec.MsgspecError, KeyError) as error:
        raise ConfigError(f"{path} does not hold messages: {error}") from error
    except RecursionError:
        raise ConfigError(f"{path} does not hold messages: it is nested too deeply") from None
    if not bodies:
        raise ConfigError(f"{path} holds no message")
    return list(to_messages(bodies))
