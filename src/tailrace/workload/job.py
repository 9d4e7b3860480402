"""Messages between `workload.run.senders` and `workload.send.sender_process`: what a sender is told, and tells."""

from typing import Any

import msgspec


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """An OpenAI-compatible service."""

    base_url: str
    """Without `/v1` and without a slash at its end."""
    model: str
    api: str = "chat"
    """`chat` or `completions`."""
    api_key: str | None = None
    headers: dict[str, str] = {}


class Realisation(msgspec.Struct, frozen=True, kw_only=True):
    """How many words make a token at this endpoint (`workload.realise`)."""

    words: tuple[str, ...]
    tokens_per_word: float = 1.0
    overhead_tokens: int = 0
    """Of an empty prompt: template and start tokens."""
    verified: bool = False
    """The endpoint counted probes, and they agreed."""
    note: str = ""
    """What the reader of the report should know: why it is not verified, which words were left out."""


class BodyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What goes into each request besides its prompt."""

    ignore_eos: bool = True
    chunk_usage: bool = False
    """Ask for usage in every chunk (vLLM's `continuous_usage_stats`): exact tokens per chunk."""
    sampling: dict[str, Any] = {}
    extra: dict[str, Any] = {}


class PlanSource(msgspec.Struct, frozen=True, kw_only=True):
    """Enough to draw the plan again in another process, equal to the last bit."""

    workload_toml: str
    """Text of the workload's file (named ones: of the packaged file)."""
    arrivals: str
    """`poisson:4`, `constant:2.5`, `closed:16`, `trace:FILE`."""
    seed: int
    run_id: str
    """Part of every segment's key: two runs share no text unless the workload says so."""
    duration_s: float | None
    num_requests: int | None
    """One of the two: length of the window."""
    warmup_s: float


class SendJob(msgspec.Struct, frozen=True, kw_only=True):
    source: PlanSource
    endpoint: Endpoint
    realisation: Realisation
    options: BodyOptions
    shard: int
    num_shards: int
    """This process sends the sessions whose index is `shard` modulo `num_shards` (closed: so many of the clients)."""
    timeout_ns: int
    num_in_flight_max: int
    rows_path: str
    """Where this process writes its records, one JSON object a line."""
    keep_text: bool = False
    """Write the joined text of each answer too, for a tokenizer after the run."""


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Parent to child, when every child is ready."""

    origin_ns: int
    """Monotonic clock of this host, shared by its processes."""


class WindowEnds(msgspec.Struct, frozen=True, kw_only=True, tag="window_ends"):
    """Parent to child, when shards ended their windows apart: the last of these ends. Answered by a WindowDone when
    every request that was scheduled before it has ended."""

    end_ns: int


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """Parent to child: begin nothing new, record what is in flight as cancelled, finish."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Child to parent: the plan is drawn, the first bodies are made."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Child to parent, twice a second."""

    num_scheduled: int
    """Arrivals due so far."""
    num_issued: int
    num_in_flight: int
    num_awaiting_first: int
    """In flight without a token."""
    outcomes: dict[str, int]
    num_window: int = 0
    """Requests of the window that came due."""
    num_window_open: int = 0
    """Of these, not ended."""
    ttft_ms: list[float]
    """Since the last message; at most 1,000."""
    tpot_ms: list[float]
    num_output_tokens: int


class WindowDone(msgspec.Struct, frozen=True, kw_only=True, tag="window_done"):
    """Child to parent: every request of this shard's window has ended. Load goes on until all shards say so."""

    end_ns: int
    """Where that window ended, from `origin_ns`."""


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """Child to parent, last."""

    num_records: int
    loop_lag_ns: list[int]
    """Lateness of the ticker: evenly thinned to at most 20,000."""
    gc_pauses_ns: list[int]
    cpu_ratio: float
    steal_ratio: float | None = None
    """Of this virtual machine's processors, taken by the host meanwhile."""
    num_connections_opened: int
    num_connections_reused: int
    num_in_flight_max: int
    window_end_ns: int
    """Where the window ended, as this shard saw it, from `origin_ns`."""
    num_connections_stale: int = 0
    """Kept connections that the server had closed when a request was sent on them. The request was sent once more on
    a new one, as nothing of an answer had come; its time went on counting."""
    num_own_limit: int = 0
    """Requests that found no connection because this host allows no more."""
    chunk_lag_ns: list[int] = []
    """Receipt of a chunk against the instant the null server wrote it; thinned like `loop_lag_ns`."""
    was_stopped: bool = False
    """By a signal or by the parent before its window was done: the run is not whole."""


class Broken(msgspec.Struct, frozen=True, kw_only=True, tag="broken"):
    """Child to parent: the run cannot be made; in place of Ready or Finished."""

    message: str


class AnswerText(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `texts_path(rows_path)`, where text is kept: input of a tokenizer after the run."""

    request_id: str
    text: str
    chunk_ends: list[int]
    """End of each chunk of `chunk_gaps_ns` in the text, characters."""


def texts_path(rows_path: str) -> str:
    return rows_path + ".texts"


ParentMessage = Start | WindowEnds | Stop
ChildMessage = Ready | Progress | WindowDone | Finished | Broken
