"""One request of a load generator, from its scheduled instant to its record."""

from collections.abc import Callable
from itertools import accumulate, pairwise

from tailrace.clock import NS_PER_S, monotonic_ns
from tailrace.measure.record import Outcome, RequestRecord
from tailrace.wire.chunks import printable
from tailrace.workload.job import AnswerText
from tailrace.workload.plan import PlannedSession, PlannedTurn
from tailrace.workload.send.connection import Connection
from tailrace.workload.send.pool import Pool
from tailrace.workload.send.stream import Answer
from tailrace.workload.send.token_counts import ChunkCounts, count_chunks, merge_empty

STALE_NS = NS_PER_S
"""A kept connection that closes later than this after a request was sent on it was not stale: the service had the
request and dropped it, which is its failure. Longer than a way round the world and back."""


class Caller:
    """One session under way: what its next turn builds on."""

    __slots__ = ("answers", "client", "num_answer_tokens", "num_prompt_tokens", "session", "turn_index")

    def __init__(self, session: PlannedSession, client: int | None = None) -> None:
        self.session = session
        self.client = client
        """Number of the closed loop's slot."""
        self.turn_index = 0
        self.answers: list[str] = []
        self.num_prompt_tokens = 0
        """New tokens of the turns so far, as planned."""
        self.num_answer_tokens = 0

    @property
    def turn(self) -> PlannedTurn:
        return self.session.turns[self.turn_index]

    @property
    def has_next(self) -> bool:
        return self.turn_index + 1 < len(self.session.turns)

    def go_on(self, answer: str, num_tokens: int) -> None:
        """The turn ended well: to the next one."""
        self.num_prompt_tokens += self.turn.num_prompt_tokens
        self.num_answer_tokens += num_tokens
        self.answers.append(answer)
        self.turn_index += 1


class Call:
    """One request: the `PooledExchange` of its connection. `on_over` is called once, when it has ended for its caller.

    `request` holds all its bytes until an answer begins, as a kept connection may turn out to be closed.
    """

    __slots__ = (
        "_cancel_after", "_is_fresh", "_is_reused", "_on_over", "_pool", "_request", "_text_kept", "answer", "caller",
        "connected_ns", "connection", "ended_ns", "headers_ns", "http_status", "is_in_window", "is_over",
        "issued_ns", "message", "outcome", "scheduled_ns", "sent_ns",
    )  # fmt: skip

    def __init__(
        self, caller: Caller, request: bytes, scheduled_ns: int, on_over: Callable[["Call"], None], *, keep_text: bool
    ) -> None:
        self.caller = caller
        self.scheduled_ns = scheduled_ns
        self.answer = Answer(keep_text=keep_text or caller.has_next)
        self.connection: Connection | None = None
        self.is_in_window = False
        self.is_over = False
        self.outcome: Outcome | None = None
        self.message = ""
        self.http_status: int | None = None
        self.issued_ns: int | None = None
        self.connected_ns: int | None = None
        self.sent_ns: int | None = None
        self.headers_ns: int | None = None
        self.ended_ns = scheduled_ns
        self._text_kept = keep_text
        self._request = request
        self._on_over = on_over
        self._cancel_after = caller.turn.cancel_after_tokens
        self._is_reused = False
        self._is_fresh = False
        self._pool: Pool | None = None

    def issue(self, pool: Pool) -> None:
        self.issued_ns = monotonic_ns()
        self._pool = pool
        pool.send(self._request, self)

    def leave(self, outcome: Outcome, message: str) -> None:
        """Ends it from this side: its caller's limit passed, or the run ends. A finished stream stays what it is."""
        if self.is_over:
            return
        if self.answer.is_done:
            self.answer.finish()
            self._end(monotonic_ns())
        else:
            self._end(monotonic_ns(), outcome, message)

    # PooledExchange

    def connected(self, t_ns: int, connection: Connection, is_reused: bool) -> None:
        self.connected_ns = t_ns
        self.connection = connection
        self._is_reused = is_reused

    def sent(self, t_ns: int) -> None:
        if self.sent_ns is None or self.headers_ns is None:
            self.sent_ns = t_ns
        if self._cancel_after == 0:
            self._end(t_ns, Outcome.CANCELLED, "left when sent, as planned")

    def headers(self, t_ns: int, status: int, content_type: str) -> None:
        self.headers_ns = t_ns
        self.http_status = status
        self._request = b""
        self.answer.begin(status, content_type)

    def body(self, t_ns: int, data: bytes) -> None:
        answer = self.answer
        answer.feed(t_ns, data)
        if answer.outcome is not None:
            self._end(t_ns)
        elif self._cancel_after is not None and answer.num_tokens_seen >= self._cancel_after:
            self._end(t_ns, Outcome.CANCELLED, f"left after {answer.num_tokens_seen} tokens, as planned")

    def ended(self, t_ns: int) -> None:
        self.connection = None
        self.answer.finish()
        self._end(t_ns)

    def lost(self, t_ns: int, message: str, had_answer: bool) -> None:
        connection, self.connection = self.connection, None
        if connection is not None and connection.is_broken:
            self._end(t_ns, Outcome.MALFORMED, message)
        elif had_answer or self.headers_ns is not None:
            self.answer.cut(message)
            self._end(t_ns)
        elif self._is_reused and not self._is_fresh and self._was_stale(t_ns) and self._pool is not None:
            # RFC 9112 9.3.1: a kept connection may close just as it is used again. The service did not see the
            # request, so that sending it on a new one is no retry; the clock of the request goes on.
            self._is_fresh = True
            self._pool.num_stale += 1
            self._pool.send(self._request, self, fresh=True)
        else:
            self._end(t_ns, Outcome.UNREACHABLE, message)

    def _was_stale(self, t_ns: int) -> bool:
        return not self.is_over and self.connected_ns is not None and t_ns - self.connected_ns < STALE_NS

    def _end(self, t_ns: int, outcome: Outcome | None = None, message: str = "") -> None:
        if self.is_over:
            return
        self.is_over = True
        self.ended_ns = t_ns
        self.outcome = outcome or self.answer.outcome
        self.message = message or ("" if self.outcome is Outcome.OK else self.answer.message)
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()
        self._request = b""
        on_over, self._pool = self._on_over, None
        on_over(self)

    # After the end

    def record(self, sender: int) -> RequestRecord:
        assert self.outcome is not None, "a record is made of a call that is over"
        answer, caller, turn = self.answer, self.caller, self.caller.turn
        counts = self._counts()
        gaps = [after - before for before, after in pairwise((self.scheduled_ns, *answer.times_ns))]
        tokens = counts.tokens
        if tokens is not None and 0 in tokens:
            gaps, tokens = merge_empty(gaps, tokens)
        earlier = caller.num_prompt_tokens + caller.num_answer_tokens
        return RequestRecord(
            request_id=turn.request_id,
            outcome=self.outcome,
            scheduled_ns=self.scheduled_ns,
            issued_ns=self.issued_ns,
            connected_ns=self.connected_ns,
            sent_ns=self.sent_ns,
            headers_ns=self.headers_ns,
            ended_ns=self.ended_ns,
            first_answer_ns=answer.first_answer_ns,
            chunk_gaps_ns=gaps,
            chunk_tokens=tokens,
            token_count=counts.source,
            num_prompt_tokens=answer.num_prompt_tokens,
            num_prompt_tokens_asked=earlier + turn.num_prompt_tokens,
            num_cached_tokens=answer.num_cached_tokens,
            num_shared_tokens=turn.num_shared_tokens + caller.num_answer_tokens,
            num_output_tokens=answer.num_output_tokens,
            num_output_tokens_asked=turn.num_output_tokens,
            finish_reason=answer.finish_reason,
            http_status=self.http_status,
            message=printable(self.message),
            will_cancel=turn.cancel_after_tokens is not None,
            cohort=caller.session.cohort,
            group=caller.session.group,
            session=caller.session.session_id,
            turn=caller.turn_index,
            tenant=caller.session.tenant,
            sender=sender,
        )

    def text(self) -> AnswerText | None:
        """For a tokenizer after the run; None where no text is to be kept."""
        if not self._text_kept:
            return None
        tokens = self._counts().tokens
        ends = list(accumulate(self.answer.lengths))
        if tokens is not None:
            ends = [end for end, count in zip(ends, tokens, strict=True) if count > 0]
        return AnswerText(request_id=self.caller.turn.request_id, text="".join(self.answer.texts), chunk_ends=ends)

    def _counts(self) -> ChunkCounts:
        answer = self.answer
        return count_chunks(answer.lengths, answer.running_totals, answer.num_output_tokens, answer.finish_reason)


def timeout_message(timeout_ns: int) -> str:
    return f"no end within {timeout_ns / NS_PER_S:g} s"
