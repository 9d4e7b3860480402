"""Hop 1 of a load generator: the body of one answer, from bytes to what a record needs. No clock, no socket.

The usual read is one complete `data: {...}` event: it is decoded where it lies. Everything else that the format
allows goes through `wire.sse`. A chunk counts when it brings text (answer, reasoning or tool call): role-only, empty
and usage-only chunks are no tokens that a reader sees.

A stream ends well with `[DONE]`, or, as some gateways do, without it when a `finish_reason` was seen and the body
itself ended as HTTP says. Everything else was cut.
"""

import msgspec

from tailrace.measure.record import Outcome
from tailrace.measure.table import COUNT_MAX
from tailrace.wire.chunks import Choice, Chunk, Usage, decode_chunk, error_message, error_text, printable, tool_text
from tailrace.wire.sse import DONE_DATA, SseParser

PLAIN_BYTES_MAX = 64 * 1024
"""Kept of an answer that is no stream: enough for its message."""
CHUNKS_MAX = 4_000_000
"""Of one answer: no model's context is longer."""
TEXT_CHARS_MAX = 16 * 1024 * 1024

_DONE = DONE_DATA.encode()


class Answer:
    """Accumulates one answer. `feed` in order, then `finish` once."""

    __slots__ = (
        "_keep_text",
        "_parser",
        "_plain",
        "_status",
        "answer_texts",
        "finish_reason",
        "first_answer_ns",
        "is_done",
        "lags_ns",
        "lengths",
        "message",
        "num_cached_tokens",
        "num_chars",
        "num_output_tokens",
        "num_prompt_tokens",
        "outcome",
        "running_totals",
        "texts",
        "times_ns",
    )  # fmt: skip

    def __init__(self, *, keep_text: bool = False) -> None:
        self._keep_text = keep_text
        self._parser: SseParser | None = None
        self._plain: bytearray | None = None
        self._status = 0
        self.outcome: Outcome | None = None
        """Set as soon as it is known to have gone wrong."""
        self.message = ""
        self.is_done = False
        self.finish_reason: str | None = None
        self.times_ns: list[int] = []
        """Receipt of each chunk with text."""
        self.lengths: list[int] = []
        """Characters of each of these."""
        self.running_totals: list[int] = []
        """The server's count of output tokens so far, at each of these; shorter where it did not always say."""
        self.texts: list[str] = []
        """Of each of these, reasoning included; only if text is kept."""
        self.answer_texts: list[str] = []
        """Without reasoning and tool calls: what a conversation goes on with."""
        self.num_chars = 0
        self.first_answer_ns: int | None = None
        self.num_prompt_tokens: int | None = None
        self.num_cached_tokens: int | None = None
        self.num_output_tokens: int | None = None
        self.lags_ns: list[int] = []
        """Receipt against the instant that the null server wrote the chunk."""

    @property
    def num_tokens_seen(self) -> int:
        """As far as known while the stream runs: the server's count, where it keeps one, or one a chunk."""
        num_chunks = len(self.times_ns)
        if self.running_totals and len(self.running_totals) == num_chunks:
            return max(self.running_totals[-1], num_chunks)
        return num_chunks

    @property
    def answer_text(self) -> str:
        return "".join(self.answer_texts)

    def begin(self, status: int, content_type: str) -> None:
        self._status = status
        # Some small servers name no type; what follows will show itself.
        if status != 200 or content_type not in ("text/event-stream", ""):
            self._plain = bytearray()
            self.message = content_type or "no content type"

    def feed(self, t_ns: int, data: bytes) -> None:
        """One read of the body, received at `t_ns`."""
        if self._plain is not None:
            self._plain += data[: PLAIN_BYTES_MAX - len(self._plain)]
            return
        if self._parser is None and data.startswith(b"data: ") and data.endswith(b"\n\n"):
            if data.count(b"\n") == 2:
                self._event(t_ns, data[6:-2])
                return
            events = data[:-2].split(b"\n\n")
            if all(each.startswith(b"data: ") and b"\n" not in each for each in events):
                for each in events:
                    self._event(t_ns, each[6:])
                return
        self._feed_parser(t_ns, data)

    def finish(self) -> None:
        """The body ended as HTTP says."""
        if self._plain is not None:
            self._finish_plain(bytes(self._plain))
        elif self.outcome is None:
            if not self.is_done and self.finish_reason is None:
                self._fail(Outcome.CUT, "the stream ended without [DONE] and without a finish_reason")
            elif not self.times_ns:
                self._fail(Outcome.EMPTY, "the stream carried no text")
            else:
                self.outcome = Outcome.OK

    def cut(self, message: str) -> None:
        """The connection ended first. A stream that had said `[DONE]` lost nothing."""
        if self._plain is not None and self._status != 200:
            self._finish_plain(bytes(self._plain))
        elif self.is_done:
            self.finish()
        elif self.outcome is None:
            self._fail(Outcome.CUT, message)

    def _feed_parser(self, t_ns: int, data: bytes) -> None:
        parser = self._parser or SseParser()
        self._parser = parser
        try:
            for event in parser.feed(data):
                self._event(t_ns, event.data.encode())
        except ValueError as error:
            self._fail(Outcome.MALFORMED, str(error))
        if data.endswith(b"\n\n"):
            self._parser = None  # After an empty line it holds nothing; the next read may take the short way.

    def _event(self, t_ns: int, data: bytes) -> None:
        if self.is_done or self.outcome is not None:
            return
        try:
            chunk = decode_chunk(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if data.strip() == _DONE:
                self.is_done = True
            else:
                self._fail(Outcome.MALFORMED, f"{error}: {printable(data[:80].decode('utf-8', 'replace'))}")
            return
        choices = chunk.choices
        length = 0
        if choices:
            for choice in choices:
                length += self._choice(t_ns, choice)
        if chunk.usage is not None or chunk.timings is not None:
            self._count(chunk)
        if length:
            self.times_ns.append(t_ns)
            self.lengths.append(length)
            if chunk.written_ns is not None:
                self.lags_ns.append(t_ns - chunk.written_ns)
            if self.num_output_tokens is not None:
                self.running_totals.append(self.num_output_tokens)
            if len(self.lengths) > CHUNKS_MAX:
                self._fail(Outcome.MALFORMED, f"a stream of more than {CHUNKS_MAX} chunks")
        if chunk.error is not None:
            self._fail(Outcome.FAILED, error_message(chunk.error))

    def _choice(self, t_ns: int, choice: Choice) -> int:
        """Characters that it brings."""
        if choice.finish_reason is not None:
            self.finish_reason = printable(choice.finish_reason, 40)
        delta = choice.delta
        thought = called = ""
        if delta is None:
            text = choice.text or ""
        else:
            text = delta.content or ""
            thought = delta.reasoning_content or delta.reasoning or ""
            if delta.tool_calls:
                called = tool_text(delta.tool_calls)
        if self.first_answer_ns is None and (text or called):
            self.first_answer_ns = t_ns
        length = len(text) + len(thought) + len(called)
        if length and self._keep_text:
            self._keep(thought + text + called, text)
        return length

    def _keep(self, everything: str, answer: str) -> None:
        self.num_chars += len(everything)
        if self.num_chars > TEXT_CHARS_MAX:
            self._fail(Outcome.MALFORMED, f"an answer of more than {TEXT_CHARS_MAX} characters")
        else:
            self.texts.append(everything)
            self.answer_texts.append(answer)

    def _count(self, chunk: Chunk) -> None:
        usage = chunk.usage or Usage()
        timings = chunk.timings
        details = usage.prompt_tokens_details
        cached = None if details is None else details.cached_tokens
        prompt, output = usage.prompt_tokens, usage.completion_tokens
        if timings is not None:
            cached = timings.cache_n if cached is None else cached
            output = timings.predicted_n if output is None else output
            if prompt is None and timings.prompt_n is not None:
                prompt = timings.prompt_n + (timings.cache_n or 0)
        self.num_prompt_tokens = _believed(prompt, self.num_prompt_tokens)
        self.num_cached_tokens = _believed(cached, self.num_cached_tokens)
        self.num_output_tokens = _believed(output, self.num_output_tokens)

    def _finish_plain(self, content: bytes) -> None:
        status, kind = self._status, self.message
        if status != 200:
            self._fail(_outcome_of_status(status), error_text(content))
            return
        try:
            value = msgspec.json.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError):
            value = None
        if isinstance(value, dict) and value.get("error") is not None:
            self._fail(Outcome.FAILED, error_message(value["error"]))
        else:
            self._fail(Outcome.MALFORMED, f"answered {printable(kind, 80)}, not an event stream")

    def _fail(self, outcome: Outcome, message: str) -> None:
        self.outcome = outcome
        self.message = printable(message)


def _believed(count: int | None, before: int | None) -> int | None:
    """A count that cannot be is none at all."""
    return before if count is None or not 0 <= count <= COUNT_MAX else count


def _outcome_of_status(status: int) -> Outcome:
    if status in (429, 503):
        return Outcome.REFUSED
    return Outcome.REJECTED if 400 <= status < 500 else Outcome.FAILED
