"""What happened to one request, as its caller saw it. Load generator, gateway and simulator emit the same value.

All times are integer nanoseconds of one monotonic clock; what did not happen is None. Everything that a report says is
computed from these rows (`measure.metrics`), so a report can be made again, and differently, from kept rows.
"""

import enum

import msgspec

DEFINITIONS = "tailrace-measure/1"
"""Version of what the metrics mean. Reports of different versions are not compared."""


class Outcome(enum.StrEnum):
    """How a request ended for its caller. All but OK enter percentiles as +inf and goodput as not met."""

    OK = "ok"
    REFUSED = "refused"
    """429 or 503: the service said that it has no room."""
    REJECTED = "rejected"
    """Another 4xx: the request was at fault, or the caller has no right to ask."""
    FAILED = "failed"
    """Another status, or an error frame in a stream."""
    UNREACHABLE = "unreachable"
    """No connection, or one that closed before any byte of an answer."""
    CUT = "cut"
    """The stream ended before its end."""
    MALFORMED = "malformed"
    """Not a stream of completions: another content type, broken JSON, an event without bound."""
    EMPTY = "empty"
    """The stream ended well and carried no token."""
    TIMEOUT = "timeout"
    """The caller's own limit passed."""
    CANCELLED = "cancelled"
    """The caller left: as the workload planned (`will_cancel`), or because the run was stopped."""


class TokenCount(enum.StrEnum):
    """How the tokens of a chunk (`chunk_tokens`) are known, best first."""

    SERVER = "server"
    """The server said so chunk by chunk, or its total equals the number of chunks."""
    TOKENIZER = "tokenizer"
    """The joined text was tokenised after the run; a token belongs to the chunk that completes it."""
    LENGTH = "length"
    """The server's total, shared out by length of text: an estimate, flagged wherever it is used."""
    UNKNOWN = "unknown"
    """Neither a total nor a tokenizer. Token rates are undefined."""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request. Order in time: scheduled <= issued <= connected <= sent <= headers <= chunks <= ended."""

    request_id: str
    outcome: Outcome
    scheduled_ns: int
    """When it was meant to arrive: the schedule's instant; in a closed loop the moment its slot became free; in a
    conversation the end of the turn before plus the time to think."""
    issued_ns: int | None = None
    """Its task ran, before a connection was asked for."""
    connected_ns: int | None = None
    """A usable connection was held."""
    sent_ns: int | None = None
    """The last byte of the request was handed to the kernel."""
    headers_ns: int | None = None
    ended_ns: int
    """The last byte of the answer, or the moment it failed."""
    first_answer_ns: int | None = None
    """First token that is not reasoning (TTFO)."""

    chunk_gaps_ns: list[int] = []
    """One entry a chunk with at least one token: the first counts from `scheduled_ns`, each other from the chunk
    before. Role-only and empty chunks are not here."""
    chunk_tokens: list[int] | None = None
    """Tokens of each of these chunks; None: one each."""
    token_count: TokenCount = TokenCount.SERVER

    num_prompt_tokens: int | None = None
    """As the server counts (usage)."""
    num_prompt_tokens_asked: int | None = None
    """As the workload wanted."""
    num_cached_tokens: int | None = None
    """Prompt tokens that the server says it found in its prefix cache; None: it does not say."""
    num_shared_tokens: int = 0
    """Prompt tokens that the workload declares shared with requests sent before this one."""
    num_output_tokens: int | None = None
    """As the server counts (usage)."""
    num_output_tokens_client: int | None = None
    """As the pinned tokenizer counts the joined text, after the run."""
    num_output_tokens_asked: int | None = None

    finish_reason: str | None = None
    http_status: int | None = None
    message: str = ""
    """What went wrong, in the words of the server or the socket; bounded."""
    will_cancel: bool = False
    """Drawn before the run: this caller was to leave early. Such requests are load; percentiles leave them out."""
    cohort: str = ""
    """Part of a mixed workload."""
    group: str = ""
    """Requests of one group share a prefix."""
    session: str = ""
    turn: int = 0
    tenant: str = ""
    replica: str = ""
    sender: int = 0
    """Number of the client process."""
