"""The figures of a report, as plain data for plotly.js: no plotting library runs here.

In: a Report and its RunSeries. Out: Figures, which `measure.pages.page` puts into a page. Text that others supplied is
escaped here, because plotly.js reads a part of HTML in its labels.
"""

import html
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from tailrace.measure.pages.series import (
    NO_TOKEN,
    Cdf,
    FlightSeries,
    PercentileSeries,
    RateSeries,
    RunSeries,
    WaterfallRow,
)
from tailrace.measure.record import Outcome
from tailrace.measure.report import Quantile, Report
from tailrace.measure.slo import Limit

BLUE, TEAL, AMBER, RED, VIOLET, GREY = "#2b6cb0", "#1a9988", "#d98c00", "#c53030", "#6b46c1", "#8792a2"
OUTCOME_COLOURS = {
    Outcome.OK: TEAL,
    Outcome.REFUSED: AMBER,
    Outcome.REJECTED: "#b7791f",
    Outcome.FAILED: RED,
    Outcome.UNREACHABLE: "#702459",
    Outcome.CUT: VIOLET,
    Outcome.MALFORMED: "#97266d",
    Outcome.EMPTY: "#4a5568",
    Outcome.TIMEOUT: "#e53e3e",
    Outcome.CANCELLED: GREY,
}
PHASE_COLOURS = {
    "send lag": RED,
    "connect": AMBER,
    "send": VIOLET,
    "headers": "#90cdf4",
    "first token": BLUE,
    "stream": TEAL,
    "end": GREY,
    NO_TOKEN: "#9b2c2c",
}
CURVE_COLOURS = {"ttft_ms": BLUE, "e2e_ms": VIOLET, "itl_ms": TEAL, "chunk_gap_ms": AMBER}
CURVE_NAMES = {"ttft_ms": "TTFT", "e2e_ms": "E2E", "tpot_ms": "TPOT", "itl_ms": "ITL", "chunk_gap_ms": "chunk gap"}


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One plot: what `Plotly.newPlot` takes, and the words around it."""

    name: str
    """Part of its element's id."""
    title: str
    caption: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any] = {}
    is_wide: bool = False


class Span(NamedTuple):
    """Seconds from the schedule's zero."""

    first_s: float
    """Where a plot over time begins: the warm-up."""
    start_s: float
    """Of the window."""
    end_s: float
    last_s: float
    """Where the last request had ended."""


def report_figures(report: Report, series: RunSeries) -> list[Figure]:
    """In reading order."""
    times_s = [0.0, series.window_end_s, *series.flight.t_s]
    window = Span(min(times_s), series.window_start_s, series.window_end_s, max(times_s))
    figures = [
        distribution("first", "Time to the first and to the last token (E2E)", report, series, ("ttft_ms", "e2e_ms")),
        distribution(
            "gaps", "Between tokens", report, series, ("itl_ms", "chunk_gap_ms"), "samples of answers that ended well"
        ),
        over_time("ttft-time", "TTFT over time", "ttft_ms", report, series.ttft, window),
        over_time("tpot-time", "TPOT over time", "tpot_ms", report, series.tpot, window),
        in_flight(series.flight, window),
        throughput(series.rates, window),
        outcomes(series.rates, window),
        waterfall(series.slowest),
    ]
    return [figure for figure in figures if figure.traces]


def distribution(
    name: str, title: str, report: Report, series: RunSeries, metrics: Sequence[str], of: str = "samples"
) -> Figure:
    """Cumulative shares over a logarithmic axis. What failed is mass at infinity: its curve ends below 100 %."""
    traces = []
    for metric in metrics:
        cdf = series.cdfs.get(metric)
        if cdf is not None and cdf.ms:
            traces.append(_step(CURVE_NAMES[metric], cdf, CURVE_COLOURS[metric]))
    failed = max((series.cdfs[m].failed_ratio for m in metrics if m in series.cdfs), default=0.0)
    caption = f"Share of the window's {of} at or below a time."
    if failed:
        caption += f" {failed:.1%} never got there."
    layout: dict[str, Any] = {
        "xaxis": {"type": "log", "title": {"text": "ms"}},
        "yaxis": {"range": [0, 1.02], "tickformat": ".0%"},
        "shapes": [],
        "annotations": [],
    }
    for metric in metrics:
        for limit in report.info.slo.limits:
            if limit.metric == metric:
                _mark_limit(layout, limit, CURVE_COLOURS[metric])
    if failed:
        layout["shapes"].append(_line_across(1 - failed, RED))
        layout["annotations"].append(_note(0.01, 1 - failed, f"{failed:.1%} failed: infinity", RED))
    return Figure(name=name, title=title, caption=caption, traces=traces, layout=layout)


def over_time(name: str, title: str, metric: str, report: Report, series: PercentileSeries, window: Span) -> Figure:
    """Percentiles of the requests scheduled in each interval."""
    traces = []
    top = max((v for v in [*series.p50, *series.p99] if isinstance(v, float)), default=1.0)
    for label, values, colour in (("p50", series.p50, BLUE), ("p99", series.p99, AMBER)):
        if any(isinstance(value, float) for value in values):
            traces.append(_line(label, series.t_s, [_finite(v) for v in values], colour, markers=True))
        endless = [t for t, v in zip(series.t_s, values, strict=True) if v == "inf"]
        if endless:
            traces.append(_endless(f"{label} is infinite", endless, top * 1.15, colour))
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "s"}},
        "yaxis": {"title": {"text": "ms"}, "rangemode": "tozero"},
        "shapes": _window_shapes(window),
    }
    for limit in report.info.slo.limits:
        own = {0.5: BLUE, 0.99: AMBER}.get(limit.percentile_ratio)
        if limit.metric == metric and own is not None and limit.limit_ms < 3 * top:
            layout["shapes"].append(_line_at(limit.limit_ms, own))
    caption = "By scheduled arrival; dashed: a limit on the curve of its colour; a triangle: failures reach it."
    if any(num < _FEW for num in series.num):
        caption += f" Some intervals hold fewer than {_FEW} requests: there p99 is the maximum."
    return Figure(name=name, title=title, caption=caption, traces=traces, layout=layout)


def in_flight(flight: FlightSeries, window: Span) -> Figure:
    oldest = _line("oldest wait for a first token, s", flight.t_s, flight.oldest_age_s, RED)
    return Figure(
        name="flight",
        title="In flight and queue",
        caption="Requests that have not ended, those without a token, and how long the oldest of these has waited.",
        traces=[
            _line("in flight", flight.t_s, flight.num_in_flight, BLUE),
            _line("awaiting first token", flight.t_s, flight.num_awaiting_first, AMBER),
            oldest | {"yaxis": "y2", "line": {"color": RED, "width": 1, "dash": "dot"}},
        ],
        layout={
            "xaxis": {"title": {"text": "s"}},
            "yaxis": {"title": {"text": "requests"}, "rangemode": "tozero"},
            "yaxis2": {"title": {"text": "s"}, "overlaying": "y", "side": "right", "rangemode": "tozero"} | _RIGHT_AXIS,
            "shapes": _window_shapes(window),
        },
    )


def throughput(rates: RateSeries, window: Span) -> Figure:
    traces = [_line("output tokens/s", rates.t_s, rates.output_tokens_per_s, TEAL)]
    arrivals = _line("arrivals/s", rates.t_s, rates.arrivals_per_s, GREY)
    completed = _line("completed/s", rates.t_s, rates.completed_per_s, BLUE)
    traces += [trace | {"yaxis": "y2"} for trace in (arrivals, completed)]
    if rates.attained_per_s is not None:
        traces.append(_line("goodput/s", rates.t_s, rates.attained_per_s, VIOLET) | {"yaxis": "y2"})
    return Figure(
        name="rates",
        title="Throughput and goodput",
        caption="Tokens by the instant they came; goodput by the scheduled arrival of the requests that met the SLO.",
        traces=traces,
        layout={
            "xaxis": {"title": {"text": "s"}},
            "yaxis": {"title": {"text": "tokens/s"}, "rangemode": "tozero"},
            "yaxis2": {"title": {"text": "requests/s"}, "overlaying": "y", "side": "right", "rangemode": "tozero"}
            | _RIGHT_AXIS,
            "shapes": _window_shapes(window),
        },
    )


def outcomes(rates: RateSeries, window: Span) -> Figure:
    traces = [
        {
            "type": "bar",
            "name": label,
            "x": rates.t_s,
            "y": numbers,
            "width": rates.interval_s,
            "marker": {"color": OUTCOME_COLOURS[Outcome(label)], "line": {"width": 0}},
        }
        for label, numbers in rates.outcomes.items()
    ]
    return Figure(
        name="outcomes",
        title="Outcomes",
        caption="How requests ended, by scheduled arrival.",
        traces=traces,
        layout={
            "barmode": "stack",
            "bargap": 0,
            "xaxis": {"title": {"text": "s"}},
            "yaxis": {"title": {"text": "requests"}},
            "shapes": _window_shapes(window),
        },
    )


def waterfall(rows: Sequence[WaterfallRow]) -> Figure:
    """Each request's time from its scheduled arrival, by phase, with a tick a chunk."""
    labels = [_label(row) for row in rows]
    traces: list[dict[str, Any]] = []
    for phase, colour in PHASE_COLOURS.items():
        bars = [
            (label, start, end - start)
            for label, row in zip(labels, rows, strict=True)
            for name, start, end in row.phases
            if name == phase
        ]
        if bars:
            traces.append(_bars(phase, bars, colour))
    ticks = [(ms, label) for label, row in zip(labels, rows, strict=True) for ms in row.chunks_ms]
    if ticks:
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "chunk",
                "x": [ms for ms, _ in ticks],
                "y": [label for _, label in ticks],
                "marker": {"symbol": "line-ns-open", "size": 9, "color": "#1a202c", "opacity": 0.55},
                "hovertemplate": "chunk at %{x:.1f} ms<extra></extra>",
            }
        )
    return Figure(
        name="waterfall",
        title="The slowest requests",
        caption="From the scheduled arrival: what the client added, the wait for the first token, the stream.",
        traces=traces,
        layout={
            "barmode": "overlay",
            "height": 140 + 24 * len(rows),
            "xaxis": {"title": {"text": "ms since scheduled"}},
            "yaxis": {"autorange": "reversed", "type": "category", "automargin": True, "tickfont": {"size": 11}},
        },
        is_wide=True,
    )


_FEW = 100
_RIGHT_AXIS = {"showgrid": False, "tickmode": "auto", "nticks": 6}


def _label(row: WaterfallRow) -> str:
    lengths = " + ".join("?" if n is None else str(n) for n in (row.num_prompt_tokens, row.num_output_tokens))
    return f"row {row.row}, {row.outcome}, {lengths} tokens"


def _bars(phase: str, bars: Sequence[tuple[str, float, float]], colour: str) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": phase,
        "y": [label for label, _, _ in bars],
        "base": [start for _, start, _ in bars],
        "x": [length for _, _, length in bars],
        "marker": {"color": colour},
        "hovertemplate": phase + ": %{x:.1f} ms<extra></extra>",
    }


def _step(name: str, cdf: Cdf, colour: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": cdf.ms,
        "y": cdf.ratio,
        "line": {"color": colour, "width": 2, "shape": "hv"},
        "hovertemplate": "%{y:.2%} within %{x:.4~g} ms",
    }


def _line(
    name: str, x: Sequence[float], y: Sequence[float | None], colour: str, *, markers: bool = False
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if markers else "lines",
        "name": name,
        "x": list(x),
        "y": list(y),
        "marker": {"size": 4},
        "line": {"color": colour, "width": 1.6},
    }


def _endless(name: str, x: Sequence[float], y: float, colour: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": list(x),
        "y": [y] * len(x),
        "marker": {"symbol": "triangle-up", "size": 9, "color": colour},
        "hovertemplate": "infinite<extra></extra>",
    }


def _finite(value: Quantile) -> float | None:
    return value if isinstance(value, float) else None


def _mark_limit(layout: dict[str, Any], limit: Limit, colour: str) -> None:
    """A line of the curve's colour: the curve passes when it runs above and left of its upper end."""
    ms, ratio = limit.limit_ms, limit.percentile_ratio
    line = {"color": colour, "width": 1, "dash": "dash"}
    layout["shapes"].append({"type": "line", "x0": ms, "x1": ms, "y0": 0, "y1": ratio, "line": line})
    layout["annotations"].append(
        {
            "x": math.log10(ms),  # on a logarithmic axis annotations, unlike shapes, are placed by exponent
            "y": 0.08 * (1 + len(layout["annotations"])),  # one above the other: limits may lie close together
            "bgcolor": "rgba(255, 255, 255, 0.85)",
            "text": html.escape(str(limit)),
            "showarrow": False,
            "xanchor": "left",
            "yanchor": "top",
            "font": {"size": 11, "color": colour},
        }
    )


def _line_across(y: float, colour: str) -> dict[str, Any]:
    line = {"color": colour, "width": 1, "dash": "dot"}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line}


def _line_at(y: float, colour: str) -> dict[str, Any]:
    return _line_across(y, colour) | {"line": {"color": colour, "width": 1, "dash": "dash"}}


def _note(x: float, y: float, text: str, colour: str) -> dict[str, Any]:
    place = {"xref": "paper", "x": x, "y": y, "xanchor": "left", "yanchor": "top", "showarrow": False}
    return place | {"text": text, "font": {"size": 11, "color": colour}}


def _window_shapes(window: Span) -> list[dict[str, Any]]:
    """Where the window that is reported begins and ends, and what lies outside."""
    whole = {"yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
    edges = [whole | {"type": "line", "x0": x, "x1": x, "line": _EDGE} for x in (window.start_s, window.end_s)]
    outside = [(window.first_s, window.start_s), (window.end_s, window.last_s)]
    return edges + [
        whole | {"type": "rect", "x0": x0, "x1": x1, "fillcolor": _OUTSIDE, "line": {"width": 0}}
        for x0, x1 in outside
        if x1 > x0
    ]


_EDGE = {"color": "#a0aec0", "width": 1, "dash": "dot"}
_OUTSIDE = "rgba(160, 174, 192, 0.22)"
