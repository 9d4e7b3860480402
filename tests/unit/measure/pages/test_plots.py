"""Figures: what is drawn, and that foreign text stays text."""

import json

import msgspec
import pytest
from report_samples import make_report, make_series

from tailrace.measure.pages import plots


def test_a_report_has_its_figures_in_reading_order() -> None:
    figures = plots.report_figures(make_report(), make_series())
    assert [figure.name for figure in figures] == [
        "first",
        "gaps",
        "ttft-time",
        "tpot-time",
        "flight",
        "rates",
        "outcomes",
        "waterfall",
    ]
    assert json.loads(msgspec.json.encode(figures))


def test_a_curve_with_failures_ends_below_the_top_and_says_so() -> None:
    figure = plots.report_figures(make_report(), make_series())[0]
    assert figure.traces[0]["y"][-1] == pytest.approx(1 - 5 / 280)
    assert "1.8% never got there" in figure.caption
    assert any("infinity" in note["text"] for note in figure.layout["annotations"])


def test_limits_are_drawn_where_they_apply() -> None:
    figures = {f.name: f for f in plots.report_figures(make_report(slo="ttft_ms_p99<=500"), make_series())}
    assert [s["x0"] for s in figures["first"].layout["shapes"] if s.get("x0") == s.get("x1")] == [500.0]
    assert any(s["y0"] == 500.0 for s in figures["ttft-time"].layout["shapes"])
    assert not any(s.get("y0") == 500.0 for s in figures["tpot-time"].layout["shapes"])


def test_a_limit_over_time_is_drawn_for_a_curve_that_is_there() -> None:
    slo = "ttft_ms_p50<=300, ttft_ms_p95<=301, ttft_ms_p99<=302"
    figures = {f.name: f for f in plots.report_figures(make_report(slo=slo), make_series())}
    lines = {s["y0"]: s["line"]["color"] for s in figures["ttft-time"].layout["shapes"] if s.get("y0", 0) > 1}
    assert lines == {300.0: plots.BLUE, 302.0: plots.AMBER}
    labels = [note["y"] for note in figures["first"].layout["annotations"][:3]]
    assert len(set(labels)) == 3, "limits that lie close together have their labels apart"


def test_what_lies_outside_the_window_is_shaded() -> None:
    series = make_series()
    figure = next(f for f in plots.report_figures(make_report(), series) if f.name == "flight")
    shaded = [(s["x0"], s["x1"]) for s in figure.layout["shapes"] if s["type"] == "rect"]
    assert shaded == [(0.0, series.window_start_s), (series.window_end_s, series.flight.t_s[-1])]


def test_an_infinite_percentile_is_a_mark_not_a_gap_alone() -> None:
    figures = {f.name: f for f in plots.report_figures(make_report(), make_series())}
    names = [trace["name"] for trace in figures["ttft-time"].traces]
    assert "p99 is infinite" in names


def test_each_phase_starts_where_the_one_before_ended() -> None:
    figure = plots.waterfall(make_series().slowest[:1])
    bars = [trace for trace in figure.traces if trace["type"] == "bar"]
    ends = [trace["base"][0] + trace["x"][0] for trace in bars]
    assert [trace["base"][0] for trace in bars] == pytest.approx([0.0, *ends[:-1]])
