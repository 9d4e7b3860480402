"""From a planned turn to the bytes of its request's body. Called when the turn is due: history holds real answers."""

from collections.abc import Sequence
from typing import Any

import msgspec

from tailrace.errors import InvalidRequest
from tailrace.workload.job import BodyOptions, Endpoint, Realisation
from tailrace.workload.plan import PlannedSession, PlannedTurn
from tailrace.workload.prompts import prompt_text, without_overhead

APIS = ("chat", "completions")


class BodyWriter:
    """Bodies for one endpoint."""

    def __init__(self, endpoint: Endpoint, realisation: Realisation, options: BodyOptions) -> None:
        if endpoint.api not in APIS:
            raise InvalidRequest(f"api {endpoint.api!r} must be one of {', '.join(APIS)}", param="api")
        self._is_chat = endpoint.api == "chat"
        self._realisation = realisation
        self._fields = _fields(endpoint.model, options)
        self._encoder = msgspec.json.Encoder()

    def body(self, session: PlannedSession, turn_index: int, answers: Sequence[str]) -> bytes:
        """JSON of the turn's request. `answers`: texts of the endpoint's answers to the turns before, in order."""
        assert len(answers) >= turn_index, "every earlier turn has been answered"
        messages = self._messages(session, turn_index, answers)
        if self._is_chat:
            asked: dict[str, Any] = {"messages": messages}
        else:
            asked = {"prompt": " ".join(message["content"] for message in messages)}
        return self._encoder.encode(
            {**self._fields, **asked, "max_tokens": session.turns[turn_index].num_output_tokens}
        )

    def _messages(self, session: PlannedSession, turn_index: int, answers: Sequence[str]) -> list[dict[str, str]]:
        messages: list[dict[str, str]] = []
        for number, turn in enumerate(session.turns[: turn_index + 1]):
            system, user = self._texts(turn, first=number == 0)
            if system:
                messages.append({"role": "system", "content": system})
            messages.append({"role": "user", "content": user})
            if number < turn_index:
                messages.append({"role": "assistant", "content": answers[number]})
        return messages

    def _texts(self, turn: PlannedTurn, *, first: bool) -> tuple[str, str]:
        """System and user text. The template's tokens are taken off the first turn; what it adds between later turns
        was not measured and comes on top."""
        segments = turn.system + turn.user
        if first:
            segments = without_overhead(segments, self._realisation.overhead_tokens)
        split = len(turn.system)
        return prompt_text(segments[:split], self._realisation), prompt_text(segments[split:], self._realisation)


def num_prompt_tokens_asked(session: PlannedSession, turn_index: int, answer_token_counts: Sequence[int]) -> int:
    """Prompt tokens that the workload wants in that turn: its own, those of the turns before, and their answers'."""
    asked = sum(turn.num_prompt_tokens for turn in session.turns[: turn_index + 1])
    return asked + sum(answer_token_counts[:turn_index])


def _fields(model: str, options: BodyOptions) -> dict[str, Any]:
    """What is alike in every body. The user's own fields win over the workload's sampling."""
    stream_options: dict[str, bool] = {"include_usage": True}
    if options.chunk_usage:
        stream_options["continuous_usage_stats"] = True
    fields: dict[str, Any] = {"model": model, "stream": True, "stream_options": stream_options}
    if options.ignore_eos:
        fields["ignore_eos"] = True
    return {**fields, **options.sampling, **options.extra}
