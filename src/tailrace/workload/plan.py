"""What will be sent: sessions of turns, each a pure function of (seed, index), so that several senders can share a run.

Text is not here yet. A prompt is a list of segments; `workload.prompts` makes words of them when the turn comes.
"""

from typing import Protocol

import msgspec


class Segment(msgspec.Struct, frozen=True):
    """Part of a prompt. Equal keys give equal text; of two lengths of one key the shorter begins the longer."""

    key: str
    num_tokens: int


class PlannedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    request_id: str
    system: tuple[Segment, ...] = ()
    """Of a first turn only."""
    user: tuple[Segment, ...]
    num_output_tokens: int
    think_ns: int = 0
    """Between the end of the turn before and this one's scheduled arrival."""
    cancel_after_tokens: int | None = None
    """The caller leaves when it has that many tokens; 0: when the request has been sent."""
    num_shared_tokens: int = 0
    """Of the prompt, declared shared with other requests or earlier turns; answers of earlier turns are not in it."""

    @property
    def num_prompt_tokens(self) -> int:
        """New tokens of this turn; earlier turns and their answers come before it."""
        return sum(segment.num_tokens for segment in self.system + self.user)


class PlannedSession(msgspec.Struct, frozen=True, kw_only=True):
    """One caller: one turn, or a conversation."""

    session_id: str
    scheduled_ns: int | None
    """From the schedule's zero; None in a closed loop, where it begins when a client is free."""
    cohort: str = ""
    group: str = ""
    tenant: str = ""
    turns: tuple[PlannedTurn, ...]


class Plan(Protocol):
    """A drawn run. `workload.draw.draw_plan` makes one."""

    num_sessions: int | None
    """None: as many as are asked for, in a closed loop and under an open law, whose load goes on until the window's
    requests have ended. A trace has an end."""
    num_clients: int | None
    """Of a closed loop; None: open."""
    window_start_ns: int
    window_end_ns: int | None
    """None: the closed loop's window ends when `num_window_requests` are scheduled in it."""
    num_window_requests: int | None
    """Asked for by number; None: by time."""
    offered_per_s: float | None

    @property
    def schedule_sha256(self) -> str:
        """Drawn when asked for: senders need it not."""
        ...

    @property
    def declares_sharing(self) -> bool:
        """Whether prefix caches may find anything: shared prefixes, or turns that repeat their history."""
        ...

    @property
    def notes(self) -> list[str]:
        """What a reader of the report should know: clipped laws, rows of a trace left out."""
        ...

    def scheduled_ns(self, index: int) -> int | None:
        """Arrival of a session; None in a closed loop. Never falls with the index."""
        ...

    def session(self, index: int) -> PlannedSession: ...
