"""Hop 8-9: one choice of one request inside the engine. Tokens only; the scheduler alone changes it.

States, and the only transitions between them::

    waiting --> running --> finished | cancelled | failed
       ^___________|  preemption
    waiting --> finished (a stop string was found before the recomputation) | cancelled | failed
"""

import enum
from collections.abc import Sequence as Seq

from tailrace.request import FinishReason, RequestId, SamplingParams, SequenceId


class SequenceState(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    """By the caller, or by its deadline."""
    FAILED = "failed"


_ENDS = frozenset({SequenceState.FINISHED, SequenceState.CANCELLED, SequenceState.FAILED})
_TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: _ENDS | {SequenceState.RUNNING},
    SequenceState.RUNNING: _ENDS | {SequenceState.WAITING},
    SequenceState.FINISHED: frozenset(),
    SequenceState.CANCELLED: frozenset(),
    SequenceState.FAILED: frozenset(),
}

END_STATE: dict[FinishReason, SequenceState] = {
    FinishReason.STOP: SequenceState.FINISHED,
    FinishReason.LENGTH: SequenceState.FINISHED,
    FinishReason.CANCELLED: SequenceState.CANCELLED,
    FinishReason.DEADLINE: SequenceState.CANCELLED,
    FinishReason.ERROR: SequenceState.FAILED,
}

Rank = tuple[int, int, int]
"""(class, arrival_ns, sequence_id): less is served first and preempted last."""


class Sequence:
    """Mutable; only the scheduler writes it after construction.

    `token_ids` is the prompt, then the output. `num_computed` of them are in the KV blocks of `block_ids`::

        token_ids   |---- prompt ----|-- output --|x|   x: drawn, not yet computed (a decode row)
        KV          |------ num_computed ---------|
    """

    __slots__ = (
        "admitted_ns", "arrival_ns", "block_ids", "block_keys", "cache_salt", "choice", "deadline_ns", "ended_ns",
        "first_token_ns", "followers", "leader", "masked_ids", "masked_length", "needs_history", "num_blocks_published",
        "num_cached_tokens", "num_computed", "num_lost", "num_overtaken", "num_prompt_reported", "num_prompt_tokens",
        "params", "pending_copy", "priority", "prompt_group", "rank", "request_id", "sequence_id",
        "state", "stop_ids", "token_ids", "tokens_max", "wait_tokens",
    )  # fmt: skip

    def __init__(
        self,
        *,
        sequence_id: SequenceId,
        request_id: RequestId,
        choice: int,
        prompt_token_ids: Seq[int],
        params: SamplingParams,
        priority: int,
        arrival_ns: int,
        deadline_ns: int | None = None,
        cache_salt: str = "",
    ) -> None:
        self.sequence_id = sequence_id
        self.request_id = request_id
        self.choice = choice
        self.params = params
        self.priority = priority
        self.arrival_ns = arrival_ns
        self.deadline_ns = deadline_ns
        self.cache_salt = cache_salt

        self.token_ids: list[int] = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.tokens_max = self.num_prompt_tokens + params.max_tokens
        """Length at which it ends; `bind` cuts it to the context."""
        self.state = SequenceState.WAITING
        self.rank: Rank = (priority, arrival_ns, sequence_id)
        """With the class inherited from followers, if theirs is better."""

        self.num_computed = 0
        self.block_ids: list[int] = []
        self.block_keys: list[bytes] = []
        """Hash chain of the full blocks of `token_ids`, extended on demand (`prefix.extend_keys`)."""
        self.num_blocks_published = 0
        """Leading blocks that are findable in the pool."""
        self.pending_copy: tuple[int, int] | None = None
        """(source, destination) to be copied by the next step it is in; the source is held by reference until then."""

        self.prompt_group: list[Sequence] = [self]
        """Live choices of the same request with the same prompt: any of them can be forked from."""
        self.leader: Sequence | None = None
        """The running sequence it waits for, until that one has computed `wait_tokens` tokens."""
        self.wait_tokens = 0
        self.followers: list[Sequence] = []

        self.stop_ids: frozenset[int] = frozenset()
        self.masked_ids: tuple[int, ...] = ()
        self.masked_length = 0
        """`masked_ids` apply while it is shorter than this."""
        self.needs_history = params.needs_history
        self.num_overtaken = 0
        self.num_lost = 0
        """Tokens computed before the last preemption, to count what is computed again."""
        self.num_cached_tokens: int | None = None
        """Prompt tokens found in the KV cache at the first admission."""
        self.num_prompt_reported = 0
        """Prompt rows whose log-probabilities were reported."""

        self.admitted_ns: int | None = None
        """First time that it left the queue; in continuous batching also the first time that it was planned."""
        self.first_token_ns: int | None = None
        self.ended_ns: int | None = None

    def bind(self, end_token_ids: frozenset[int], context_tokens_max: int) -> None:
        """Fixes what depends on the model: where it ends, and what is masked until `min_tokens`."""
        self.tokens_max = min(self.tokens_max, context_tokens_max)
        ends = frozenset(self.params.stop_token_ids)
        self.stop_ids = ends if self.params.ignore_eos else ends | end_token_ids
        if self.params.min_tokens > 0:
            self.masked_ids = tuple(sorted(self.stop_ids))
            self.masked_length = self.num_prompt_tokens + self.params.min_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Rows of the prompt remain to be reported, so they must be computed here: no prefix hit, no fork."""
        return self.params.num_prompt_logprobs is not None and self.num_prompt_reported < self.num_prompt_tokens - 1

    @property
    def has_ended(self) -> bool:
        return self.state in _ENDS

    def move_to(self, state: SequenceState) -> None:
        assert state in _TRANSITIONS[self.state], f"I4: sequence {self.sequence_id} goes {self.state} -> {state}"
        self.state = state
