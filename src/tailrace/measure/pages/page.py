"""One HTML file that needs no network: plotly.js, data and style are inside.

In: a title, an answer in plain words, sections of HTML with Figures. Out: the text of the page. Everything that is not
ours is escaped by `text` on its way into HTML and by `script_json` on its way into a script, and a content policy lets
no other script run.
"""

import hashlib
import html
from collections.abc import Sequence
from importlib import resources
from typing import Any

import msgspec

from tailrace.measure.pages.plots import Figure


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """One run, or one view: shown alone, chosen by its name."""

    name: str
    before: str
    """HTML above the figures."""
    figures: Sequence[Figure]
    after: str
    """HTML below them."""


def page(title: str, head: str, sections: Sequence[Section]) -> str:
    """`head` is HTML that all sections share."""
    drawn = [_drawn(number, section) for number, section in enumerate(sections)]
    body = "\n".join(
        [
            f"<header><h1>{text(title)}</h1>{head}{_chooser(sections)}</header>",
            "<main>",
            *(part for part, _ in drawn),
            "<footer>Made by tailrace. This file holds all its data and loads nothing.</footer>",
            "</main>",
        ]
    )
    data = "".join(json for _, json in drawn)
    # Whoever wrote a part of the data cannot know the hash of all of it.
    nonce = hashlib.sha256((body + data).encode("utf-8", "replace")).hexdigest()[:32]
    policy = f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; img-src data: blob:"
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{text(title)}</title><style>{_asset('page.css')}</style></head><body>",
            body,
            data,
            f'<script nonce="{nonce}">{_plotly()}</script>',
            f'<script nonce="{nonce}">{_asset("page.js")}</script>',
            "</body></html>",
        ]
    )


def text(value: object) -> str:
    """As HTML text or as the value of a quoted attribute. Lone surrogates, which no encoding takes, are replaced."""
    return html.escape(str(value).encode("utf-8", "replace").decode("utf-8"), quote=True)


def script_json(value: Any) -> str:
    """JSON that cannot end its script element: `<` and its like are written as escapes."""
    encoded = msgspec.json.encode(value).decode("utf-8")
    for char in "<>&\u2028\u2029":
        encoded = encoded.replace(char, f"\\u{ord(char):04x}")
    return encoded


def table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: frozenset[int] = frozenset()) -> str:
    """Cells are text, not HTML; the columns in `numbers` are aligned to the right."""

    def cells(kind: str, row: Sequence[str]) -> str:
        classes = ["number" if i in numbers else "text" for i in range(len(row))]
        return "".join(f'<{kind} class="{c}">{text(cell)}</{kind}>' for c, cell in zip(classes, row, strict=True))

    lines = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head = f"<thead><tr>{cells('th', header)}</tr></thead>"
    return f'<div class="scroll"><table>{head}<tbody>{lines}</tbody></table></div>'


def card(name: str, value: str, detail: str = "", badge: str | None = None) -> str:
    """A number with its name. `badge`: `good`, `bad` or `open` shows the value as a mark."""
    shown = f'<span class="badge {badge}">{text(value)}</span>' if badge is not None else text(value)
    size = "value" if badge is None else ""
    return (
        f'<div class="card"><div class="name">{text(name)}</div><div class="{size}">{shown}</div>'
        f'<div class="detail">{text(detail)}</div></div>'
    )


def _drawn(number: int, section: Section) -> tuple[str, str]:
    """The section's HTML, and its data as a script element that is not run."""
    ids = [f"figure-{number}-{figure.name}" for figure in section.figures]
    frames = "".join(
        f'<div class="figure{" wide" if figure.is_wide else ""}"><h3>{text(figure.title)}</h3>'
        f'<p class="caption">{text(figure.caption)}</p><div id="{text(id_)}"></div></div>'
        for id_, figure in zip(ids, section.figures, strict=True)
    )
    data = [
        {"id": id_, "traces": figure.traces, "layout": figure.layout}
        for id_, figure in zip(ids, section.figures, strict=True)
    ]
    data_id = f"data-{number}"
    hidden = " hidden" if number else ""
    return (
        f'<section data-figures="{data_id}"{hidden}>{section.before}<div class="figures">{frames}</div>'
        f"{section.after}</section>",
        f'<script type="application/json" id="{data_id}">{script_json(data)}</script>',
    )


def _chooser(sections: Sequence[Section]) -> str:
    if len(sections) < 2:
        return ""
    buttons = "".join(f'<button type="button">{text(section.name)}</button>' for section in sections)
    return f"<nav>{buttons}</nav>"


def _asset(name: str) -> str:
    return (resources.files("tailrace.measure.pages") / "assets" / name).read_text(encoding="utf-8")


def _plotly() -> str:
    # The library's script as a string; the rest of the package, slow to import, is not needed.
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    assert "</script" not in script.lower(), "the library can stand in a script element"
    return script
