"""What the verbs print: results on standard output, everything about them on standard error."""

import sys
from collections.abc import Sequence
from typing import Any

import msgspec


def print_json(value: Any) -> None:
    """One JSON document, indented, on standard output."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode("utf-8")
    print(text, flush=True)


def note(text: str) -> None:
    """One line for the person at the terminal, on standard error."""
    print(text, file=sys.stderr, flush=True)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> str:
    """Columns padded to their widest cell; the column numbers in `right` are aligned to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [cell.rjust(widths[i]) if i in right else cell.ljust(widths[i]) for i, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


class ProgressLine:
    """Progress on standard error: one line rewritten at a terminal, one line a phase elsewhere."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._shown = ""

    def show(self, text: str, detail: str = "") -> None:
        """`detail` changes often (a ratio); it is for a terminal only."""
        if self._live:
            sys.stderr.write(f"\r\x1b[2K{text} {detail}".rstrip())
            sys.stderr.flush()
        elif text != self._shown:
            note(text)
        self._shown = text

    def done(self) -> None:
        """Leaves a terminal's line clean for what follows."""
        if self._live and self._shown:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
        self._shown = ""


def printable(text: str) -> str:
    """Text of a model for this standard output: a terminal gets no control characters but line ends and tabs."""
    if not sys.stdout.isatty():
        return text
    return "".join(char for char in text if char in "\n\t" or (char >= " " and not "\x7f" <= char <= "\x9f"))
