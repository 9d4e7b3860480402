"""Hop 12: server-sent events, both ways. Pure: bytes in, bytes out.

The server writes one `data:` line an event. The parser is for the client side (chat, load generator, accounting) and
accepts the whole format: any line end, comments, several data lines, a BOM, chunks cut anywhere.
"""

from collections.abc import Iterator

import msgspec

DONE = b"data: [DONE]\n\n"
"""OpenAI's end of a stream that ended well. A stream without it was cut or ended with an error frame."""
DONE_DATA = "[DONE]"
EVENT_BYTES_MAX = 16 * 1024 * 1024
"""Bound on what the parser holds for one event: far above any chunk, below what would hurt."""


def encode_event(payload: bytes) -> bytes:
    """One event. `payload` is compact JSON, so it has no line end in it."""
    assert b"\n" not in payload, "an event's payload is one line"
    return b"data: " + payload + b"\n\n"


class SseEvent(msgspec.Struct, frozen=True):
    data: str
    event: str | None = None
    """The event's type; None where the stream names none."""

    @property
    def is_done(self) -> bool:
        return self.data == DONE_DATA


class SseParser:
    """Incremental: `feed` chunks in order, take the events that became complete.

    Raises ValueError when one event exceeds `EVENT_BYTES_MAX`. What is not UTF-8 is replaced, as the format says.
    """

    def __init__(self) -> None:
        self._tail: list[bytes] = []
        """Pieces of a line without its end yet: joined once, however many reads bring it."""
        self._tail_bytes = 0
        self._data: list[str] = []
        self._event: str | None = None
        self._held_bytes = 0
        self._is_first_line = True
        self._skip_line_feed = False

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Events completed by `chunk`, in order."""
        events = []
        for line in self._lines(chunk):
            event = self._take_line(line)
            if event is not None:
                events.append(event)
        if self._held_bytes + self._tail_bytes > EVENT_BYTES_MAX:
            raise ValueError(f"an event of more than {EVENT_BYTES_MAX} bytes: this is not a stream of completions")
        return events

    def _lines(self, chunk: bytes) -> Iterator[bytes]:
        """Complete lines without their ends. A line ends with CR LF, LF or CR; a CR may be cut from its LF."""
        if not chunk:
            return
        if self._skip_line_feed and chunk.startswith(b"\n"):
            chunk = chunk[1:]
        self._skip_line_feed = False
        if b"\n" not in chunk and b"\r" not in chunk:
            self._keep(chunk)
            return
        lines = b"".join((*self._tail, chunk)).splitlines(keepends=True)
        self._tail, self._tail_bytes = [], 0
        for line in lines:
            if line.endswith((b"\n", b"\r")):
                self._skip_line_feed = line.endswith(b"\r")
                yield line.rstrip(b"\r\n")
            else:
                self._skip_line_feed = False
                self._keep(line)

    def _keep(self, piece: bytes) -> None:
        self._tail.append(piece)
        self._tail_bytes += len(piece)

    def _take_line(self, raw: bytes) -> SseEvent | None:
        line = raw.decode("utf-8", "replace")
        if self._is_first_line:
            self._is_first_line = False
            line = line.removeprefix("\ufeff")
        if not line:
            return self._dispatch()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
            self._held_bytes += len(raw)
        elif name == "event":
            self._event = value
        return None

    def _dispatch(self) -> SseEvent | None:
        event = SseEvent("\n".join(self._data), self._event) if self._data else None
        self._data, self._event, self._held_bytes = [], None, 0
        return event
