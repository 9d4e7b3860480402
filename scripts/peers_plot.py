"""Bars of `benchmarks/results/peers_*.json` as one small SVG: each engine's share of the best one, row by row."""

from html import escape
from typing import Any

Result = dict[str, Any]

COLOURS = {"tailrace": "#0f766e", "vllm": "#b45309", "llama": "#6d28d9"}
"""By the first word of an engine's name; a second setting of it is paler."""
WIDTH, LABEL, BAR, GAP, HEAD = 860, 130, 16, 26, 34
FULL = WIDTH - LABEL - 150


def peers_svg(results: dict[str, Result]) -> str:
    """`results` by benchmark name, those of peers only."""
    parts: list[str] = []
    y = HEAD
    for result in results.values():
        bars = _bars(result)
        if not bars:
            continue
        parts.append(_text(0, y, f"{result['parameters']['row']}: {_unit(result)}", weight="bold"))
        for number, (name, share, text) in enumerate(bars):
            parts.append(_bar(y + 8 + number * (BAR + 4), name, share, text))
        y += 8 + len(bars) * (BAR + 4) + GAP
    title = _text(0, 14, "Longer is better: share of the best engine of each row, and its figure")
    body = "\n".join([title, *parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" '
        f'font-family="sans-serif" font-size="13" role="img">\n'
        f'<rect width="{WIDTH}" height="{y}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _bars(result: Result) -> list[tuple[str, float, str]]:
    """(engine, share of the best, figure) in the order measured."""
    medians = {name: each["median"] for name, each in result["results"].items() if each["median"]}
    if not medians:
        return []
    lower_is_better = result["parameters"]["unit"] == "ms"
    best = min(medians.values()) if lower_is_better else max(medians.values())
    return [
        (name, best / value if lower_is_better else value / best, f"{value:,.4g}") for name, value in medians.items()
    ]


def _unit(result: Result) -> str:
    figure = result["parameters"].get("figure")
    return f"{figure}, {result['parameters']['unit']}" if figure else str(result["parameters"]["unit"])


def _bar(y: int, name: str, share: float, text: str) -> str:
    engine, _, setting = name.partition("-")
    colour = COLOURS.get(engine, "#475569")
    width = max(1, round(FULL * share))
    opacity = "0.55" if setting else "1"
    return (
        _text(LABEL - 8, y + 12, name, anchor="end")
        + f'<rect x="{LABEL}" y="{y}" width="{width}" height="{BAR}" fill="{colour}" fill-opacity="{opacity}"/>'
        + _text(LABEL + width + 6, y + 12, text)
    )


def _text(x: int, y: int, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}" fill="#0f172a">{escape(text)}</text>'
