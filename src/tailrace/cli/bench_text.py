"""A measured run as text for a terminal: verdicts first, then the limits, then the numbers that stand behind them."""

from collections.abc import Iterable, Mapping, Sequence

from tailrace.cli.output import table
from tailrace.measure.report import (
    BenchResult,
    Distribution,
    Interval,
    LengthQuantiles,
    LimitResult,
    Quantile,
    Rates,
    Report,
)

METRIC_NAMES = {
    "ttft_ms": "TTFT",
    "ttft_service_ms": "  service",
    "send_lag_ms": "  send lag",
    "connect_ms": "  connect",
    "ttfo_ms": "TTFO",
    "tpot_ms": "TPOT",
    "itl_ms": "ITL",
    "chunk_gap_ms": "chunk gap",
    "stall_ms": "stall",
    "e2e_ms": "E2E",
    "tail_ms": "  tail",
}
"""In the order they are shown; indented: parts of the one above."""

VERDICT_QUESTIONS = {
    "steady": "steady state",
    "client": "client kept up",
    "cache": "prefix cache",
    "output": "output lengths",
    "tokens": "token counts",
}
_PERCENTILES = ("p50", "p90", "p95", "p99")
_MESSAGES_MAX = 5


def result_text(result: BenchResult) -> str:
    """Every repeat, and what they say together."""
    many = len(result.reports) > 1
    parts = []
    for number, report in enumerate(result.reports, 1):
        title = f"run {number} of {len(result.reports)}: {report.info.run_id}\n\n" if many else ""
        parts.append(title + report_text(report))
    if many:
        parts.append(_together(result))
    return "\n\n".join(parts)


def report_text(report: Report) -> str:
    sections = [
        headline(report),
        _verdicts(report),
        _limits(report.limits),
        _percentiles(report),
        _rates(report),
        _lengths(report),
        _outcomes(report),
        "\n".join(f"note: {note}" for note in report.info.notes),
    ]
    return "\n\n".join(section for section in sections if section)


def headline(report: Report) -> str:
    info = report.info
    seed = "" if info.arrivals.startswith("trace:") else f", seed {info.seed}"
    planned = f", {count(report.num_planned_cancels)} planned to leave early" if report.num_planned_cancels else ""
    return (
        f"{info.workload} at {info.arrivals}{seed}: {count(report.num_requests)} requests{planned} "
        f"in {report.window_s:.1f} s\n{info.model} at {info.url} ({info.api})"
    )


def milliseconds(value: Quantile) -> str:
    """Three or four significant digits; `-` for undefined, `inf` where failures reach."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def count(value: int) -> str:
    return f"{value:,}"


def rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.1f}" if value >= 100 else f"{value:.3g}"


def ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def limit_verdict(result: LimitResult) -> str:
    return {True: "pass", False: "FAIL", None: "cannot say"}[result.passes]


def percentile_order(name: str) -> float:
    """`p99_9` -> 99.9, to sort by."""
    return float(name[1:].replace("_", "."))


def shown_percentiles(metrics: Iterable[Distribution]) -> list[str]:
    """The usual ones and those of the SLO, in order."""
    names = set(_PERCENTILES)
    for metric in metrics:
        names |= set(metric.percentiles)
    return sorted(names, key=percentile_order)


def _verdicts(report: Report) -> str:
    rows = []
    for name, question in VERDICT_QUESTIONS.items():
        verdict = report.verdicts.get(name)
        if verdict is None:
            continue
        state = report.steadiness.verdict if name == "steady" else verdict.state
        word = f"{state.upper()} (invalid-{name})" if verdict.state == "invalid" else state
        reasons = verdict.reasons or [""]
        rows.append([question, word, reasons[0]])
        rows += [["", "", reason] for reason in reasons[1:]]
    return table(["check", "verdict", "why"], rows) if rows else ""


def _limits(limits: Sequence[LimitResult]) -> str:
    if not limits:
        return ""
    rows = [[r.limit, milliseconds(r.value_ms), milliseconds(r.bound_ms), limit_verdict(r), r.reason] for r in limits]
    return table(["limit", "value ms", "bound ms", "", "why"], rows, right=frozenset({1, 2}))


def _percentiles(report: Report) -> str:
    """`all` counts what failed as +inf; `ok` leaves it out, as other tools do."""
    metrics = {name: report.metrics[name] for name in METRIC_NAMES if name in report.metrics}
    names = shown_percentiles(metrics.values())
    header = ["ms", *names, *(f"ok {name}" for name in ("p50", "p99")), "n", "failed", "undefined"]
    rows = []
    for name, metric in metrics.items():
        if metric.num == 0 and metric.num_undefined == 0:
            continue
        cells = [milliseconds(metric.percentiles.get(p)) for p in names]
        cells += [milliseconds(metric.successes.get(p)) for p in ("p50", "p99")]
        mark = "~" if metric.num_estimated else ""
        rows.append([METRIC_NAMES[name] + mark, *cells, *map(count, (metric.num, metric.num_failed))])
        rows[-1].append(count(metric.num_undefined))
    lines = [table(header, rows, right=frozenset(range(1, len(header))))]
    lines.append("ok: requests that ended well only; TTFO: time to the first token that is not reasoning")
    if any(metric.num_estimated for metric in metrics.values()):
        lines.append("~ rests in part on several tokens that came together, or on estimated counts")
    return "\n".join(lines)


def _uncounted(rates: Rates) -> str:
    if not rates.num_uncounted_chunks:
        return ""
    return f" (output at least: {count(rates.num_uncounted_chunks)} chunks have no count; --chunk-usage asks for one)"


def _rates(report: Report) -> str:
    rates, goodput = report.rates, report.goodput
    rows = [
        [
            "requests/s",
            _joined(
                {"by the law": rates.offered_per_s, "issued": rates.issued_per_s, "completed": rates.completed_per_s}
            ),
        ],
        [
            "tokens/s",
            _joined({"output": rates.output_tokens_per_s, "prompt": rates.prompt_tokens_per_s}) + _uncounted(rates),
        ],
    ]
    if goodput is not None:
        tokens = "" if goodput.output_tokens_per_s is None else f", {rate(goodput.output_tokens_per_s)} tokens/s"
        met = f"{count(goodput.num_attained)} of {count(goodput.num)} ({ratio(goodput.attainment_ratio)}) met the SLO"
        rows.append(["goodput", f"{rate(goodput.per_s)} requests/s{tokens}: {met}"])
    rows.append(["in flight", f"{report.little.in_flight_mean:.1f} on average{_little(report)}"])
    cache = report.cache
    if cache.num_prompt_tokens and (cache.num_declared_tokens or cache.num_cached_tokens is not None):
        seen = (
            "not said" if cache.num_cached_tokens is None else ratio(cache.num_cached_tokens / cache.num_prompt_tokens)
        )
        declared = ratio(cache.num_declared_tokens / cache.num_prompt_tokens)
        rows.append(["prefix cache", f"{declared} of prompt tokens declared shared, {seen} found in the cache"])
    return table(["rate", ""], rows)


def _little(report: Report) -> str:
    little = report.little
    if little.difference_ratio is None:
        return ""
    if little.agrees is None:
        return " (too short a window to hold Little's law against it)"
    return f" (Little's law differs by {ratio(little.difference_ratio)})"


def _joined(rates: Mapping[str, float | None]) -> str:
    return ", ".join(f"{rate(value)} {name}" for name, value in rates.items() if value is not None) or "-"


def _lengths(report: Report) -> str:
    lengths = report.lengths
    asked = {"prompt asked": lengths.prompt_asked, "prompt": lengths.prompt}
    asked |= {"output asked": lengths.output_asked, "output": lengths.output}
    rows = [[name, *_length_cells(value)] for name, value in asked.items() if value.num]
    header = ["tokens", "n", "mean", "p5", "p50", "p95", "max"]
    return table(header, rows, right=frozenset(range(1, 7))) if rows else ""


def _length_cells(value: LengthQuantiles) -> list[str]:
    numbers = [value.mean, value.p5, value.p50, value.p95, value.max]
    return [count(value.num), *("-" if n is None else f"{n:,.0f}" for n in numbers)]


def _outcomes(report: Report) -> str:
    lines = ["outcomes: " + (_counted(report.outcomes) or "none")]
    ranked = sorted(report.messages.items(), key=lambda item: -item[1])[:_MESSAGES_MAX]
    lines += [f"  {count(number)} x {message}" for message, number in ranked]
    return "\n".join(lines)


def _counted(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{count(number)} {name}" for name, number in numbers.items() if number)


def _together(result: BenchResult) -> str:
    lines = []
    if result.intervals:
        rows = [_interval_cells(name, value) for name, value in result.intervals.items()]
        lines.append(table(["over all runs", "from ms", "to ms", "confidence", "runs", "blocks"], rows, _RIGHT))
    verdict = {True: "pass", False: "FAIL", None: "cannot say"}[result.passes]
    lines.append("\n".join([f"all runs together: {verdict}", *(f"  {reason}" for reason in result.reasons)]))
    return "\n\n".join(lines)


_RIGHT = frozenset({1, 2, 3, 4, 5})


def _interval_cells(name: str, value: Interval) -> list[str]:
    confidence = f"{value.confidence_ratio:.0%}"
    ends = [milliseconds(value.low_ms), milliseconds(value.high_ms)]
    return [name, *ends, confidence, count(value.num_runs), count(value.num_blocks)]
