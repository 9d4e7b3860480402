"""Who answers a conversation: a model of ours in this process tree, or an OpenAI-compatible address.

In: messages. Out: text as it comes, then a `Turn` that says what it cost. The chat verb knows only this seam.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from tailrace.clock import monotonic_ns
from tailrace.request import Message


class AskOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to draw; None leaves it to the model's defaults."""

    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One answer and what it cost. Counts are None where the other side does not tell."""

    text: str
    finish_reason: str | None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None
    ttft_ns: int | None = None
    """From sending the request to its first text."""
    duration_ns: int = 0

    @property
    def tokens_per_s(self) -> float | None:
        """Of the tokens after the first, by the time they took."""
        if self.ttft_ns is None or self.num_output_tokens is None or self.num_output_tokens < 2:
            return None
        decoding_ns = self.duration_ns - self.ttft_ns
        return (self.num_output_tokens - 1) * 1e9 / decoding_ns if decoding_ns > 0 else None


class Backend(Protocol):
    """One model to talk to."""

    name: str
    context_tokens_max: int | None
    """None: the other side does not tell."""

    async def ask(self, messages: Sequence[Message], options: AskOptions, on_text: Callable[[str], None]) -> Turn:
        """Streams one answer. Raises an error of the tree when it cannot be had; text given out before stays."""
        ...

    async def count(self, messages: Sequence[Message]) -> list[int] | None:
        """Tokens that each message adds to the prompt; None where the other side cannot tell."""
        ...

    async def close(self) -> None: ...


class TurnTimer:
    """Collects the text of one turn and the times that its `Turn` reports."""

    def __init__(self, on_text: Callable[[str], None]) -> None:
        self._on_text = on_text
        self._start_ns = monotonic_ns()
        self._first_ns: int | None = None
        self._parts: list[str] = []

    def token(self) -> None:
        """Something arrived, with or without text."""
        if self._first_ns is None:
            self._first_ns = monotonic_ns()

    def text(self, text: str) -> None:
        if not text:
            return
        self.token()
        self._parts.append(text)
        self._on_text(text)

    def turn(self, finish_reason: str | None, **counts: Any) -> Turn:
        return Turn(
            text="".join(self._parts),
            finish_reason=finish_reason,
            ttft_ns=None if self._first_ns is None else self._first_ns - self._start_ns,
            duration_ns=monotonic_ns() - self._start_ns,
            **counts,
        )


def statistics_line(turn: Turn) -> str:
    """`41 tokens, stop reason stop, TTFT 123 ms, 45.6 tokens/s, ...`; what is not known is left out."""
    parts = []
    if turn.num_output_tokens is not None:
        parts.append(f"{turn.num_output_tokens} tokens")
    parts.append(f"stop reason {turn.finish_reason or 'unknown'}")
    if turn.ttft_ns is not None:
        parts.append(f"TTFT {turn.ttft_ns / 1e6:,.0f} ms")
    if turn.tokens_per_s is not None:
        parts.append(f"{turn.tokens_per_s:,.1f} tokens/s")
    if turn.num_prompt_tokens is not None:
        cached = f" ({turn.num_cached_tokens} cached)" if turn.num_cached_tokens is not None else ""
        parts.append(f"prompt {turn.num_prompt_tokens} tokens{cached}")
    return ", ".join(parts)
