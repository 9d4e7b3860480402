"""The page of a search over rates: the bracket in words, TTFT, goodput, errors and queue age against the rate."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from tailrace.measure.pages import page
from tailrace.measure.pages.plots import AMBER, BLUE, GREY, RED, TEAL, VIOLET, Figure
from tailrace.measure.pages.report_page import identity, number, quantile
from tailrace.measure.report import Quantile
from tailrace.measure.run_info import RunInfo
from tailrace.measure.run_summary import RunOutcome, RunSummary
from tailrace.measure.saturation_result import ProbeResult, SaturationResult
from tailrace.measure.slo import Slo, percentile_name


class SaturationReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `tailrace saturate --json` prints."""

    info: RunInfo
    """Of the first run; the others differ from it in rate, run_id and seed."""
    result: SaturationResult


Value = Callable[[RunSummary], Quantile]
_MARKS = {
    RunOutcome.PASS: ("circle", TEAL),
    RunOutcome.FAIL: ("x", RED),
    RunOutcome.TOO_FEW: ("diamond-open", AMBER),
    RunOutcome.CLIENT: ("square-open", GREY),
    RunOutcome.INVALID: ("square-open", GREY),
}
_COLOURS = (BLUE, AMBER, TEAL, VIOLET, GREY)
_METRICS = {
    "ttft_ms": "TTFT",
    "tpot_ms": "TPOT",
    "e2e_ms": "E2E",
    "stall_ms": "Stall",
    "itl_ms": "ITL",
    "chunk_gap_ms": "Chunk gap",
}
_TONES = {"found": "good", "never_fails": "open"}


def saturation_page(report: SaturationReport) -> str:
    info, result = report.info, report.result
    reasons = "".join(f"<li>{page.text(reason)}</li>" for reason in result.reasons)
    tone = _TONES.get(result.status, "bad") if result.is_confirmed else "open"
    head = (
        f'<p class="soft">{page.text(info.model)} at {page.text(info.url)} ({page.text(info.api)}), '
        f"{page.text(info.workload)}, {page.text(str(info.slo))}</p>"
        f'<div class="answer {tone}">{page.text(bracket(result))}<ul>{reasons}</ul></div>'
    )
    section = page.Section(
        name="saturation",
        before="<h2>Against the rate</h2>",
        figures=saturation_figures(report),
        after="".join(["<h2>Every run</h2>", _runs(result.probes, info.slo), "<h2>Identity</h2>", identity(info)]),
    )
    return page.page("How much it can take", head, [section])


def bracket(result: SaturationResult) -> str:
    """The answer in one sentence."""
    low, high = result.last_pass_per_s, result.first_fail_per_s
    confirmed = "" if result.is_confirmed else " (not confirmed by fresh runs)"
    if low is None and high is None:
        return "No rate could be judged."
    if low is None:
        return f"No rate that was tried passes; {high:g} requests/s fail{confirmed}."
    if high is None:
        return f"{low:g} requests/s pass, and no rate that was tried fails{confirmed}."
    return f"{low:g} requests/s pass, {high:g} requests/s fail{confirmed}."


def saturation_figures(report: SaturationReport) -> list[Figure]:
    result = report.result
    errors = _figure(
        "Errors",
        "Share of the window's requests that did not end well.",
        "",
        result,
        [("errors", RED, lambda s: s.num_errors / s.num_requests if s.num_requests else None)],
    )
    errors.layout["yaxis"] |= {"tickformat": ".0%", "range": [0, _top(errors)]}
    limited = {limit.metric for limit in report.info.slo.limits}
    return [
        *(
            _times(metric, name, report)
            for metric, name in _METRICS.items()
            if metric == "ttft_ms" or metric in limited
        ),
        _figure(
            "Goodput",
            "Requests a second that met the SLO, and those that ended well.",
            "requests/s",
            result,
            [("goodput", VIOLET, lambda s: s.goodput_per_s), ("completed", GREY, lambda s: s.completed_per_s)],
        ),
        errors,
        _figure(
            "Queue age",
            "At each arrival, how long the oldest request without a token had waited: p99.",
            "ms",
            result,
            [("queue age p99", BLUE, lambda s: s.queue_age_ms_p99)],
        ),
    ]


def _times(metric: str, name: str, report: SaturationReport) -> Figure:
    """Percentiles of a metric: those that the SLO limits, each with its limit in its colour, and of TTFT the usual."""
    values: dict[str, Value] = {}
    if metric == "ttft_ms":
        values = {"p95": lambda s: s.ttft_ms_p95, "p99": lambda s: s.ttft_ms_p99}
    limits = {
        percentile_name(limit.percentile_ratio): limit for limit in report.info.slo.limits if limit.metric == metric
    }
    values = {p: partial(RunSummary.limited_ms, limit=limit) for p, limit in limits.items()} | values
    colours = dict(zip(sorted(values), itertools.cycle(_COLOURS), strict=False))
    figure = _figure(
        name,
        "Each run: a dot passes, a cross fails, an open square is invalid; a triangle at the top: failures reach it.",
        "ms",
        report.result,
        [(p, colours[p], values[p]) for p in sorted(values)],
    )
    figure.layout["yaxis"]["type"] = "log"
    figure.layout["annotations"] = []
    for place_x, (p, limit) in enumerate(sorted(limits.items())):
        line = {"color": colours[p], "width": 1, "dash": "dash"}
        place = {"xref": "paper", "x0": 0, "x1": 1, "y0": limit.limit_ms, "y1": limit.limit_ms}
        figure.layout["shapes"].append({"type": "line", "line": line} | place)
        figure.layout["annotations"].append(
            {
                "xref": "paper",
                "x": 0.01 + 0.25 * (place_x % 4),  # side by side: limits may be equal
                "y": math.log10(limit.limit_ms),
                "text": f"{p} limit {limit.limit_ms:g}",
                "showarrow": False,
                "xanchor": "left",
                "yanchor": "bottom",
                "font": {"size": 11, "color": colours[p]},
            }
        )
    return figure


def _top(errors: Figure) -> float:
    """Of the axis: a run without an error is at the bottom, not in the middle."""
    return max([0.05, *(1.1 * float(share) for trace in errors.traces for share in trace["y"])])


def _figure(
    title: str, caption: str, unit: str, result: SaturationResult, curves: Sequence[tuple[str, str, Value]]
) -> Figure:
    traces = [trace for name, colour, value in curves for trace in _curve(name, colour, value, result.probes)]
    return Figure(
        name=title.lower().replace(" ", "-"),
        title=title,
        caption=caption,
        traces=traces,
        layout={
            "xaxis": {"type": "log", "title": {"text": "offered requests/s"}},
            "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
            "shapes": _shaded(result),
        },
    )


def _curve(name: str, colour: str, value: Value, probes: Sequence[ProbeResult]) -> list[dict[str, Any]]:
    """A mark a run by its outcome, and a line through the median of each rate's valid runs."""
    points = sorted(((p.rate_per_s, value(p.summary), p.outcome) for p in probes), key=lambda point: point[0])
    finite = [(rate, float(v), outcome) for rate, v, outcome in points if v is not None and v != "inf"]
    endless = [(rate, outcome) for rate, v, outcome in points if v == "inf"]
    valid = [(rate, v) for rate, v, outcome in finite if outcome not in (RunOutcome.CLIENT, RunOutcome.INVALID)]
    rates = sorted({rate for rate, _ in valid})
    medians = [_median([v for r, v in valid if r == rate]) for rate in rates]
    line = {"type": "scatter", "mode": "lines", "name": name, "x": rates, "y": medians, "line": {"color": colour}}
    top = max((v for _, v, _ in finite), default=1.0) * 1.3
    marks = [(rate, v, outcome, False) for rate, v, outcome in finite]
    marks += [(rate, top, outcome, True) for rate, outcome in endless]
    shown = {
        "type": "scatter",
        "mode": "markers",
        "name": f"{name}, runs",
        "showlegend": False,
        "x": [rate for rate, *_ in marks],
        "y": [v for _, v, *_ in marks],
        "text": [f"{name} {'infinite' if out else f'{v:.4g}'}, {outcome.value}" for _, v, outcome, out in marks],
        "hovertemplate": "%{x:.4~g}/s: %{text}<extra></extra>",
        "marker": {
            "size": 9,
            "color": colour,
            "symbol": ["triangle-up-open" if out else _MARKS[outcome][0] for _, _, outcome, out in marks],
        },
    }
    return [line, shown]


def _median(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


def _shaded(result: SaturationResult) -> list[dict[str, Any]]:
    """The bracket: between its ends lies the limit."""
    low, high = result.last_pass_per_s, result.first_fail_per_s
    if low is None or high is None:
        return []
    place = {"type": "rect", "yref": "paper", "y0": 0, "y1": 1, "x0": low, "x1": high, "layer": "below"}
    return [place | {"fillcolor": "rgba(217, 140, 0, 0.18)", "line": {"width": 0}}]


def _runs(probes: Sequence[ProbeResult], slo: Slo) -> str:
    values = shown_values(slo)
    header = ["run", "rate", "for", "outcome", "steady", "n", "errors", *values]
    header += ["goodput/s", "queue age p99", "Little"]
    rows = [[f"{i}", *_run_cells(probe, values.values())] for i, probe in enumerate(probes, 1)]
    reasons = [
        [f"{i}", f"{probe.rate_per_s:g}", probe.outcome.value, "; ".join(probe.reasons)]
        for i, probe in enumerate(probes, 1)
        if probe.reasons
    ]
    # A table of its own: beside so many columns sentences have no room.
    why = "<h2>Why</h2>" + page.table(["run", "rate", "outcome", "why"], reasons, frozenset({0, 1})) if reasons else ""
    return page.table(header, rows, frozenset(range(5, len(header))) | {0, 1}) + why


def shown_values(slo: Slo) -> dict[str, Value]:
    """Columns of a table: TTFT p95 and p99, and the percentiles that the SLO limits, named with their limits."""
    usual: dict[str, Value] = {"TTFT p95": lambda s: s.ttft_ms_p95, "TTFT p99": lambda s: s.ttft_ms_p99}
    limited = {f"{limit.metric}_{percentile_name(limit.percentile_ratio)}" for limit in slo.limits}
    shown = {name: value for name, value in usual.items() if name.replace("TTFT ", "ttft_ms_") not in limited}
    return shown | {str(limit): partial(RunSummary.limited_ms, limit=limit) for limit in slo.limits}


def _run_cells(probe: ProbeResult, values: Iterable[Value]) -> list[str]:
    s = probe.summary
    little = "–" if s.little_agrees is None or s.little_difference_ratio is None else f"{s.little_difference_ratio:.1%}"
    return [
        f"{probe.rate_per_s:g}",
        probe.purpose,
        probe.outcome.value,
        s.steadiness,
        f"{s.num_requests:,}",
        f"{s.num_errors:,}",
        *(quantile(value(s)) for value in values),
        number(s.goodput_per_s),
        number(s.queue_age_ms_p99),
        little,
    ]
