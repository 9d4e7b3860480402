"""The conversation at the terminal, with a backend that answers by rule."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from tailrace.cli.backend import AskOptions, Turn
from tailrace.cli.chat import Conversation, context_table
from tailrace.errors import ClientFailed, TailraceError
from tailrace.request import Message


class WordCounter:
    """Answers with the number of messages and counts words as tokens; `failure` is raised instead, once."""

    name = "counter"
    context_tokens_max: int | None = 20
    counts = True
    failure: BaseException | None = None

    async def ask(self, messages: Sequence[Message], options: AskOptions, on_text: Callable[[str], None]) -> Turn:
        del options
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        text = f"{len(messages)} messages"
        on_text(text)
        return Turn(text=text, finish_reason="stop", num_output_tokens=2)

    async def count(self, messages: Sequence[Message]) -> list[int] | None:
        return [len(m.content.split()) for m in messages] if self.counts else None

    async def close(self) -> None:
        return None


def talk(lines: list[str], backend: WordCounter | None = None, system: str | None = None) -> Conversation:
    with asyncio.Runner() as runner:
        conversation = Conversation(runner, backend or WordCounter(), AskOptions(), system)
        conversation.run(iter(lines))
        return conversation


def test_the_history_grows_by_question_and_answer(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = talk(["one", "", "two"], system="be brief")
    assert [m.role for m in conversation.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert capsys.readouterr().out == "2 messages\n4 messages\n"


def test_reset_keeps_the_system_message_only() -> None:
    assert [m.role for m in talk(["one", "/reset"], system="be brief").messages] == ["system"]


def test_nothing_is_read_after_exit() -> None:
    assert talk(["/exit", "one"]).messages == []


def test_stats_tell_tokens_and_what_is_left_by_message(capsys: pytest.CaptureFixture[str]) -> None:
    talk(["one two three", "/stats"])
    out = capsys.readouterr().out
    assert "last turn: 2 tokens, stop reason stop" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["user", "3", "17", "one", "two", "three"] in rows
    assert ["assistant", "2", "15", "1", "messages"] in rows


def test_stats_work_before_the_first_turn_and_without_counts(capsys: pytest.CaptureFixture[str]) -> None:
    backend = WordCounter()
    talk(["/stats"], backend)
    assert "no messages yet" in capsys.readouterr().out
    backend.counts = False
    talk(["one", "/stats"], backend)
    assert "does not count" in capsys.readouterr().out


def test_an_unknown_command_is_not_sent_and_shows_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert talk(["/stat"]).messages == []
    assert "/stats" in capsys.readouterr().out


def test_an_error_from_a_pipe_ends_the_conversation() -> None:
    backend = WordCounter()
    backend.failure = ClientFailed("gone")
    with pytest.raises(TailraceError, match="gone"):
        talk(["one"], backend)


def test_a_stopped_turn_is_forgotten_and_the_conversation_goes_on() -> None:
    backend = WordCounter()
    backend.failure = KeyboardInterrupt()
    conversation = talk(["one", "two"], backend)
    assert [m.content for m in conversation.messages] == ["two", "1 messages"]


def test_an_unknown_context_is_shown_as_such() -> None:
    text = context_table([Message(role="user", content="a")], [1], None)
    assert "context unknown" in text
    assert "?" in text
