"""The page of a measured run: the answer in plain words, then checks, numbers, figures, the run's identity."""

from collections.abc import Sequence
from typing import Any

import msgspec

from tailrace.measure.pages import page
from tailrace.measure.pages.plots import report_figures
from tailrace.measure.pages.series import RunSeries
from tailrace.measure.report import BenchResult, Distribution, LimitResult, Quantile, Report, Verdict
from tailrace.measure.run_info import ClientStats, Lag, RunInfo

_CHECKS = {
    "steady": "Was it a steady state?",
    "client": "Did the client keep up?",
    "cache": "Prefix cache as declared?",
    "output": "Output lengths as asked?",
    "tokens": "Do token counts agree?",
}
_METRICS = {
    "ttft_ms": "TTFT",
    "ttft_service_ms": "TTFT from sent (service)",
    "send_lag_ms": "send lag",
    "connect_ms": "connect",
    "ttfo_ms": "time to first answer token",
    "tpot_ms": "TPOT",
    "itl_ms": "ITL (token weighted)",
    "chunk_gap_ms": "chunk gap",
    "stall_ms": "stall (largest gap)",
    "e2e_ms": "E2E",
    "tail_ms": "end of stream after last token",
}
_NUMBERS = 40
"""More columns than any table here has."""


def report_page(result: BenchResult, series: Sequence[RunSeries]) -> str:
    """One section a repeat; `series` in the order of the reports."""
    first = result.reports[0].info
    head = (
        f'<p class="soft">{page.text(first.model)} at {page.text(first.url)} ({page.text(first.api)}), '
        f"started {page.text(first.started_at)}</p>{_answer(result)}{_intervals(result)}"
    )
    sections = [
        page.Section(
            name=f"run {number}",
            before=_before(report),
            figures=report_figures(report, curves),
            after=_after(report),
        )
        for number, (report, curves) in enumerate(zip(result.reports, series, strict=True), 1)
    ]
    return page.page(f"{first.workload} at {first.arrivals}", head, sections)


def number(value: float | int | None, unit: str = "") -> str:
    """Three or four significant digits; a dash for what is undefined."""
    if value is None:
        return "–"
    size = abs(value)
    shown = f"{value:,.0f}" if size >= 100 or value == int(value) else f"{value:.1f}" if size >= 10 else f"{value:.2f}"
    return f"{shown} {unit}".rstrip()


def quantile(value: Quantile) -> str:
    return "∞" if value == "inf" else number(value) if isinstance(value, float | int) else "–"


def _answer(result: BenchResult) -> str:
    """What a reader wants first: may the claim be made?"""
    reports = result.reports
    invalid = sorted({name for r in reports for name, v in r.verdicts.items() if v.state == "invalid"})
    limits = str(reports[0].info.slo)
    are_many = len(reports[0].info.slo.limits) > 1
    runs = f"{len(reports)} runs" if len(reports) > 1 else "This run"
    if invalid:
        tone = "bad"
        words = f"No claim can be made: {', '.join(f'invalid-{name}' for name in invalid)}."
    elif not limits:
        tone, words = "open", f"{runs}: measured without an SLO."
    elif result.passes is None:
        tone = "open"
        words = f"It cannot be said whether {f'all limits hold: {limits}' if are_many else f'{limits} holds'}."
    elif result.passes:
        tone, words = "good", f"All limits hold: {limits}." if are_many else f"{limits} holds."
    else:
        tone, words = "bad", f"Not all limits hold: {limits}." if are_many else f"{limits} does not hold."
    reasons = "".join(f"<li>{page.text(reason)}</li>" for reason in result.reasons)
    return f'<div class="answer {tone}">{page.text(words)}{f"<ul>{reasons}</ul>" if reasons else ""}</div>'


def _intervals(result: BenchResult) -> str:
    """Over all runs, where there are several: one run has its bounds."""
    if len(result.reports) < 2:
        return ""
    rows = [
        [
            name,
            quantile(v.low_ms),
            quantile(v.high_ms),
            f"{v.confidence_ratio:.0%}",
            f"{v.num_runs}",
            f"{v.num_blocks:,}",
        ]
        for name, v in result.intervals.items()
    ]
    header = ["over all runs", "from, ms", "to, ms", "confidence", "runs", "blocks of time"]
    return "<h2>All runs together</h2>" + page.table(header, rows, frozenset(range(1, _NUMBERS)))


def _before(report: Report) -> str:
    parts = ["<h2>Checks of the run itself</h2>", _checks(report)]
    if report.limits:
        parts += ["<h2>Limits</h2>", _limits(report.limits)]
    parts += ["<h2>In numbers</h2>", _tiles(report), "<h2>In pictures</h2>", _GREY]
    return "".join(parts)


_GREY = (
    '<p class="soft">Grey: outside the window, in no number of this page: the warm-up, and the load that went on until '
    "the window's requests had ended.</p>"
)


def _checks(report: Report) -> str:
    cards = []
    for name, question in _CHECKS.items():
        verdict = report.verdicts.get(name)
        if verdict is not None:
            state = report.steadiness.verdict if name == "steady" else verdict.state
            cards.append(page.card(question, state, "; ".join(verdict.reasons), badge=_tone(verdict)))
    return f'<div class="grid">{"".join(cards)}</div>'


def _tone(verdict: Verdict) -> str:
    return {"ok": "good", "invalid": "bad", "unknown": "open"}[verdict.state]


def _limits(limits: Sequence[LimitResult]) -> str:
    rows = [[r.limit, quantile(r.value_ms), quantile(r.bound_ms), _passes(r.passes), r.reason] for r in limits]
    return page.table(["limit", "value, ms", "upper bound, ms", "holds", "why"], rows, frozenset({1, 2}))


def _passes(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "cannot say"}[value]


def _tiles(report: Report) -> str:
    rates, goodput = report.rates, report.goodput
    planned = f", {report.num_planned_cancels:,} planned to leave" if report.num_planned_cancels else ""
    failed = sum(n for label, n in report.outcomes.items() if label != "ok")
    outcomes = ", ".join(f"{n:,} {label}" for label, n in report.outcomes.items() if n) or "no request"
    tiles = [
        page.card("requests in the window", f"{report.num_requests:,}", f"{report.window_s:.1f} s{planned}"),
        page.card("TTFT p50 / p99", _pair(report, "ttft_ms"), "ms from the scheduled arrival"),
        page.card("TPOT p50 / p99", _pair(report, "tpot_ms"), "ms a token after the first chunk"),
        page.card(
            "requests a second",
            number(rates.completed_per_s),
            "completed; "
            + ("" if rates.offered_per_s is None else f"{number(rates.offered_per_s)} by the law, ")
            + f"{number(rates.issued_per_s)} issued",
        ),
        page.card(
            "output tokens a second",
            f"{'≥ ' if rates.num_uncounted_chunks else ''}{number(rates.output_tokens_per_s)}",
            f"{number(rates.prompt_tokens_per_s)} prompt tokens a second",
        ),
        page.card("in flight, mean", number(report.little.in_flight_mean), _little(report)),
        page.card("did not end well", f"{failed:,}", outcomes),
    ]
    if goodput is not None:
        share = "" if goodput.attainment_ratio is None else f"{goodput.attainment_ratio:.1%} of requests met the SLO"
        tiles.insert(3, page.card("goodput, requests a second", number(goodput.per_s), share))
    return f'<div class="grid">{"".join(tiles)}</div>'


def _pair(report: Report, metric: str) -> str:
    found = report.metrics.get(metric)
    values = {} if found is None else found.percentiles
    return f"{quantile(values.get('p50'))} / {quantile(values.get('p99'))}"


def _little(report: Report) -> str:
    little = report.little
    if little.difference_ratio is None or little.agrees is None:
        return ""
    return f"Little's law differs by {little.difference_ratio:.1%}"


def _after(report: Report) -> str:
    parts = ["<h2>Percentiles</h2>", _percentiles(report), "<h2>Lengths</h2>", _lengths(report)]
    if report.messages:
        rows = [[f"{n:,}", message] for message, n in sorted(report.messages.items(), key=lambda item: -item[1])]
        parts += ["<h2>What went wrong</h2>", page.table(["requests", "message"], rows, frozenset({0}))]
    if report.info.client is not None:
        parts += ["<h2>The client's own part</h2>", _client(report.info.client, report)]
    parts += ["<h2>Identity of the run</h2>", identity(report.info)]
    return "".join(parts)


def _percentiles(report: Report) -> str:
    metrics = {label: report.metrics[name] for name, label in _METRICS.items() if name in report.metrics}
    names = sorted({p for m in metrics.values() for p in m.percentiles}, key=lambda p: float(p[1:].replace("_", ".")))
    header = ["ms", *names, "p99 bound", "ok p50", "ok p99", "samples", "failed", "undefined", "estimated"]
    rows = [[label, *_metric_cells(metric, names)] for label, metric in metrics.items()]
    note = (
        '<p class="soft">Nearest rank over all requests of the window, failures as ∞; “ok” leaves failures out, '
        "as other tools do. The bound holds with 99 % confidence for independent samples.</p>"
    )
    return page.table(header, rows, frozenset(range(1, _NUMBERS))) + note


def _metric_cells(metric: Distribution, names: Sequence[str]) -> list[str]:
    times = [metric.percentiles.get(name) for name in names]
    times += [metric.bounds.get("p99"), metric.successes.get("p50"), metric.successes.get("p99")]
    counts = (metric.num, metric.num_failed, metric.num_undefined, metric.num_estimated)
    return [*map(quantile, times), *(f"{n:,}" for n in counts)]


def _lengths(report: Report) -> str:
    lengths = report.lengths
    named = {
        "prompt, asked": lengths.prompt_asked,
        "prompt, as the server counts": lengths.prompt,
        "output, asked": lengths.output_asked,
        "output": lengths.output,
    }
    rows = [
        [name, f"{v.num:,}", number(v.mean), number(v.p5), number(v.p50), number(v.p95), number(v.max)]
        for name, v in named.items()
    ]
    return page.table(["tokens", "n", "mean", "p5", "p50", "p95", "max"], rows, frozenset(range(1, _NUMBERS)))


def _client(client: ClientStats, report: Report) -> str:
    lag = report.metrics.get("send_lag_ms")
    rows = [
        ["send lag, p50 / p99", "–" if lag is None else _pair(report, "send_lag_ms") + " ms"],
        ["event loop lag, p50 / p99 / max", _lag(client.loop_lag)],
        ["collector pauses", f"{client.num_gc_pauses:,}, the longest {number(client.gc_pause_ms_max)} ms"],
        ["busiest sender", f"{client.cpu_ratio_max:.0%} of a core; {client.num_senders} senders"],
        ["taken by the host", "not said" if client.steal_ratio is None else f"{client.steal_ratio:.1%} of all time"],
        ["processors, governor", f"{client.num_cpus}, {client.governor or 'unknown'}"],
        ["connections", f"{client.num_connections_opened:,} opened, {client.num_connections_reused:,} times reused"],
        ["in flight, most", f"{client.num_in_flight_max:,}"],
    ]
    null = client.null_run
    if null is not None:
        rows += [
            ["same schedule, null server: TTFT p99", f"{number(null.ttft_ms_p99)} ms ({null.num_requests:,} requests)"],
            ["same schedule, null server: send lag p99", f"{number(null.send_lag_ms_p99)} ms"],
            ["same schedule, null server: chunk lag p99", f"{number(null.chunk_lag_ms_p99)} ms"],
        ]
    return page.table(["self-check", ""], rows)


def _lag(lag: Lag) -> str:
    return f"{number(lag.p50_ms)} / {number(lag.p99_ms)} / {number(lag.max_ms)} ms"


def identity(info: RunInfo) -> str:
    """All of RunInfo but the schedule's gaps, which are many, the client, which has its own table, and what means
    nothing to a reader: a zero of the clock, the seed of a trace."""
    fields: dict[str, Any] = msgspec.to_builtins(info)
    for name in ("scheduled_gaps_ns", "client", "notes", "slo", "origin_ns"):
        fields.pop(name, None)
    if info.arrivals.startswith("trace:"):
        fields.pop("seed")
    rows = [["slo", str(info.slo) or "none"]]
    for name, value in fields.items():
        if isinstance(value, dict):
            rows += [[f"{name}: {key}", _plain(part)] for key, part in value.items()]
        elif name.endswith("_ns") and isinstance(value, int):
            rows.append([name.removesuffix("_ns"), f"{value / 1e9:,.6g} s"])
        else:
            rows.append([name, _plain(value)])
    notes = "".join(f"<p>{page.text(note)}</p>" for note in info.notes)
    return notes + page.table(["", ""], rows)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode("utf-8")
