"""What the pages say exists: make targets, linked files, verbs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)#]+?)(?:#[^)]*)?\)")


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", text_of(ROOT / "Makefile"), re.MULTILINE))


def test_every_make_command_in_the_pages_is_a_target() -> None:
    named = {target for page in PAGES for target in re.findall(r"(?m)(?:^|`)make ([a-z]+)\b", text_of(page))}
    assert {"demo", "test", "check", "bench"} <= named
    assert {name for name in named if name not in make_targets()} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_between_pages_leads_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(text_of(page)) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_file_named_in_the_map_exists() -> None:
    named = re.findall(r"`(src/tailrace/[\w/.]+)`", text_of(ROOT / "ARCHITECTURE.md"))
    assert len(named) >= 5
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_decisions_are_numbered_without_gaps() -> None:
    numbers = [int(path.name[:4]) for path in sorted((ROOT / "docs" / "decisions").glob("*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))
