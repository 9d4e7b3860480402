"""Counting tokens, with a small real tokenizer."""

import json
from pathlib import Path

import pytest
from live_worker import write_text_model

from tailrace.cli import tokenize
from tailrace.errors import ConfigError, TailraceError
from tailrace.model.text import TextModel
from tailrace.request import Message

MESSAGES = [Message(role="user", content="the queue grows"), Message(role="assistant", content="the stream")]


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(write_text_model(tmp_path_factory.mktemp("text")))


def test_pieces_of_a_text_join_to_the_text(text_model: TextModel) -> None:
    result = tokenize.count(text_model, "the queue grows", None)
    assert "".join(result["pieces"]) == "the queue grows"  # type: ignore[arg-type]
    assert result["num_tokens"] == len(result["token_ids"])  # type: ignore[arg-type]


def test_counts_by_message_add_up_to_all_tokens(text_model: TextModel) -> None:
    result = tokenize.count(text_model, "", MESSAGES)
    rows = result["messages"]
    assert isinstance(rows, list)
    assert [row["role"] for row in rows] == ["user", "assistant", "(asking for the answer)"]
    assert sum(row["num_tokens"] for row in rows) == result["num_tokens"]
    assert "message" in tokenize.as_text(result)


@pytest.mark.parametrize(("piece", "shown"), [(" a\n", r"' a\n'"), (r"bytes:\xf0\x9f", r"bytes:\xf0\x9f")])
def test_a_piece_is_escaped_once(piece: str, shown: str) -> None:
    assert tokenize.quoted(piece) == shown


def test_no_tokens_are_shown_as_none(text_model: TextModel) -> None:
    assert tokenize.as_text(tokenize.count(text_model, "", None)) == "0 tokens"


@pytest.mark.parametrize(
    "value",
    [
        [{"role": "user", "content": "hi"}],
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
    ],
)
def test_messages_are_read_as_in_a_request(tmp_path: Path, value: object) -> None:
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(value))
    assert tokenize._read_messages(path) == [Message(role="user", content="hi")]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b'"text"', b"5", b'[{"role": "robot", "content": "x"}]', b"\xff", b"[1]", b"[" * 100_000],
    ids=lambda content: repr(content[:20]),
)
def test_a_file_without_messages_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "chat.json"
    path.write_bytes(content)
    with pytest.raises(TailraceError):
        tokenize._read_messages(path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.txt"):
        tokenize._read(tmp_path / "none.txt")
