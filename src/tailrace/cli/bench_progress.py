"""The live display of a run on standard error: a small panel at a terminal, a line every five seconds elsewhere."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from tailrace.cli.bench_text import count, milliseconds, rate
from tailrace.cli.output import note
from tailrace.clock import NS_PER_S, monotonic_ns

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tailrace.workload.run.live import LiveNumbers

LINE_NS = 5 * NS_PER_S
_FRAME_NS = NS_PER_S // 4
OUTRUN = (
    "requests in flight only grow: the service does not carry this rate; Ctrl-C ends the run with the report so far"
)


class Display(Protocol):
    def show(self, numbers: "LiveNumbers") -> None:
        """Called whenever something is new; draws when it is time."""


@contextmanager
def display(title: str) -> Iterator[Display]:
    """At a terminal the panel vanishes at the end: the result takes its place."""
    if not sys.stderr.isatty():
        yield LineDisplay()
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        yield PanelDisplay(title, lambda renderable: live.update(renderable, refresh=True))


class LineDisplay:
    """A phase when it begins; numbers every five seconds."""

    def __init__(self) -> None:
        self._phase = ""
        self._next_ns = 0
        self._is_outrun_said = False

    def show(self, numbers: "LiveNumbers") -> None:
        now_ns = monotonic_ns()
        if not self._is_outrun_said and numbers.is_outrun(now_ns):
            self._is_outrun_said = True
            note(OUTRUN)
        if numbers.phase != self._phase:
            self._phase, self._next_ns = numbers.phase, now_ns + LINE_NS
            note(numbers.phase)
        elif numbers.start_ns is not None and now_ns >= self._next_ns:
            self._next_ns = now_ns + LINE_NS
            note("  " + "; ".join(text for _, text in lines(numbers, now_ns)))


class PanelDisplay:
    """Redraws four times a second at most."""

    def __init__(self, title: str, draw: "Draw") -> None:
        self._title = title
        self._draw = draw
        self._next_ns = 0
        self._phase = ""

    def show(self, numbers: "LiveNumbers") -> None:
        now_ns = monotonic_ns()
        if now_ns >= self._next_ns or numbers.phase != self._phase:
            self._next_ns, self._phase = now_ns + _FRAME_NS, numbers.phase
            self._draw(panel(self._title, numbers, now_ns))


class Draw(Protocol):
    def __call__(self, renderable: "RenderableType", /) -> object: ...


def panel(title: str, numbers: "LiveNumbers", now_ns: int) -> "RenderableType":
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    if numbers.start_ns is not None:
        for name, text in lines(numbers, now_ns):
            grid.add_row(name, Text(text))
        if numbers.is_outrun(now_ns):
            grid.add_row("", Text(OUTRUN))
    bar = ProgressBar(total=1.0, completed=numbers.done_ratio(now_ns))
    return Panel(Group(Text(numbers.phase), bar, grid), title=Text(title), title_align="left")


def lines(numbers: "LiveNumbers", now_ns: int) -> list[tuple[str, str]]:
    """(name, text) of each line."""
    elapsed_s = numbers.elapsed_s(now_ns)
    failed = [
        f"{count(number)} {label}" for label, number in sorted(numbers.outcomes.items()) if label != "ok" and number
    ]
    return [
        ("time", stage(numbers, elapsed_s)),
        ("rate", f"{_per_s(numbers.num_issued, elapsed_s)} issued a second, {count(numbers.num_ended)} requests ended"),
        (
            "in flight",
            f"{count(numbers.num_in_flight)} in flight, {count(numbers.num_awaiting_first)} awaiting first token",
        ),
        ("TTFT", f"TTFT p50 {milliseconds(numbers.ttft_ms(0.5))}, p99 {milliseconds(numbers.ttft_ms(0.99))} ms"),
        ("TPOT", f"TPOT p50 {milliseconds(numbers.tpot_ms(0.5))}, p99 {milliseconds(numbers.tpot_ms(0.99))} ms"),
        ("errors", ", ".join(failed) or "no errors"),
    ]


def stage(numbers: "LiveNumbers", elapsed_s: float) -> str:
    """Warm-up, window, or what comes after it."""
    into_s = elapsed_s - numbers.warmup_s
    if into_s < 0:
        return f"warm-up {elapsed_s:.0f}/{numbers.warmup_s:.0f} s"
    if numbers.duration_s is not None and into_s < numbers.duration_s:
        return f"window {into_s:.0f}/{numbers.duration_s:.0f} s"
    if numbers.num_requests is not None and numbers.num_window < numbers.num_requests:
        return f"window {count(numbers.num_window)}/{count(numbers.num_requests)} requests"
    waiting = f"{count(numbers.num_window_open)} of {count(numbers.num_window)}"
    return f"window over; waiting for {waiting} to end, load goes on"


def _per_s(number: int, elapsed_s: float) -> str:
    return rate(number / elapsed_s) if elapsed_s > 0 else "-"
