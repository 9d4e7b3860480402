"""Hop 12: finds stop strings in text that arrives in pieces. Pure.

Text that may still become a stop string is held back, so no chunk ever carries a part of one. The result does not
depend on where the pieces are cut: of several matches the one that *ends* first wins, then the longest.
"""


class StopStrings:
    """Push text until `hit`; `flush` gives what is held when the text ends without one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops), "a stop string has at least one character"
        self._stops = stops
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """The text that is final now. After a hit: what precedes the stop string, then nothing any more."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        end, start = self._first_match(text)
        if end is not None:
            self._held = ""
            self.hit = text[start:end]
            return text[:start]
        keep = self._hold_from(text)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """What was held back; no more text comes."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int | None, int]:
        best_end: int | None = None
        best_start = 0
        for stop in self._stops:
            start = text.find(stop)
            if start < 0:
                continue
            end = start + len(stop)
            if best_end is None or (end, start) < (best_end, best_start):
                best_end, best_start = end, start
        return best_end, best_start

    def _hold_from(self, text: str) -> int:
        """Start of the longest suffix that begins a stop string."""
        keep = len(text)
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= at < keep:
                if stop.startswith(text[at:]):
                    keep = at
                    break
                at = text.find(stop[0], at + 1)
        return keep
