"""The page: one file, no network, and nothing of what others said runs in it."""

import json
import re
from html.parser import HTMLParser

import msgspec
import pytest
from report_samples import make_info, make_report, make_series

from tailrace.measure.pages import page
from tailrace.measure.pages.report_page import identity, number, quantile, report_page
from tailrace.measure.report import BenchResult, Report, Verdict

ATTACKS = [
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "]]><!--<script>",
    "\u2028alert(1)//\ud800",
]


class Elements(HTMLParser):
    """Elements with their attributes, as a browser finds them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def result(*reports: Report, passes: bool | None = None) -> BenchResult:
    return BenchResult(definitions="x", reports=list(reports), intervals={}, passes=passes, reasons=["why <b>"])


def rendered(*reports: Report, passes: bool | None = None) -> str:
    return report_page(result(*reports, passes=passes), [make_series() for _ in reports])


@pytest.fixture(scope="module")
def plain() -> str:
    return rendered(make_report(), make_report())


@pytest.mark.parametrize("attack", ATTACKS)
def test_foreign_text_stays_text(attack: str, plain: str) -> None:
    attacked = rendered(make_report(model=attack, message=attack), make_report())
    expected, found = Elements(plain).found, Elements(attacked).found
    assert [tag for tag, _ in found] == [tag for tag, _ in expected]
    assert not any(name.startswith("on") for _, attributes in found for name in attributes)


def test_only_scripts_with_the_nonce_may_run(plain: str) -> None:
    elements = Elements(plain).found
    policy = next(a["content"] for tag, a in elements if tag == "meta" and "content" in a and a.get("http-equiv"))
    assert policy is not None
    nonce = re.search(r"'nonce-([0-9a-f]{32})'", policy)
    assert nonce is not None
    assert "default-src 'none'" in policy
    scripts = [a for tag, a in elements if tag == "script"]
    assert all(a.get("nonce") == nonce[1] or a.get("type") == "application/json" for a in scripts)


def test_nothing_is_loaded(plain: str) -> None:
    for tag, attributes in Elements(plain).found:
        assert not {"src", "href", "srcset"} & set(attributes), tag


def test_the_data_of_every_section_is_json(plain: str) -> None:
    blocks = re.findall(r'<script type="application/json" id="(data-\d)">(.*?)</script>', plain, re.DOTALL)
    assert [name for name, _ in blocks] == ["data-0", "data-1"]
    for _, block in blocks:
        figures = json.loads(block)
        assert all(f'id="{figure["id"]}"' in plain for figure in figures)


def test_several_runs_have_a_chooser_and_one_has_none(plain: str) -> None:
    assert [tag for tag, _ in Elements(plain).found].count("button") == 2
    assert "button" not in [tag for tag, _ in Elements(rendered(make_report())).found]


@pytest.mark.parametrize(
    ("passes", "words"),
    [(True, "{} holds."), (False, "{} does not hold."), (None, "It cannot be said whether {} holds.")],
)
def test_the_answer_comes_in_words(passes: bool | None, words: str) -> None:
    slo = "ttft_ms_p99<=500"
    text = rendered(make_report(slo=slo, passes=passes), passes=passes)
    assert words.format(page.text(slo)) in text


@pytest.mark.parametrize(
    ("passes", "words"),
    [(True, "All limits hold: {}."), (False, "Not all limits hold: {}."), (None, "whether all limits hold: {}.")],
)
def test_several_limits_hold_or_do_not(passes: bool | None, words: str) -> None:
    limits = page.text("ttft_ms_p99<=500, tpot_ms_p99<=60")
    assert words.format(limits) in rendered(make_report(passes=passes), passes=passes)


def test_identity_has_seconds_and_no_seed_of_a_trace() -> None:
    info = make_info()
    assert '<td class="text">window_end</td><td class="text">65 s</td>' in identity(info)
    assert ">seed<" in identity(info)
    assert ">seed<" not in identity(msgspec.structs.replace(info, arrivals="trace:a.jsonl"))
    assert "_ns" not in identity(info)


def test_an_invalid_run_makes_no_claim_even_if_its_numbers_pass() -> None:
    report = make_report(passes=True)
    report = type(report)(
        **{name: getattr(report, name) for name in report.__struct_fields__}
        | {"verdicts": {"client": Verdict(state="invalid", reasons=["late"])}, "is_valid": False}
    )
    text = rendered(report, passes=True)
    assert "No claim can be made: invalid-client." in text
    assert "holds." not in text


def test_numbers_keep_their_significant_digits() -> None:
    assert [number(v) for v in (None, 0.123, 12.34, 1234.5, 4)] == ["–", "0.12", "12.3", "1,234", "4"]
    assert [quantile(v) for v in ("inf", None, 5.25)] == ["∞", "–", "5.25"]


def test_json_in_a_script_reads_back_as_it_was() -> None:
    value = {"a": "</script>\u2028&<!--"}
    encoded = page.script_json(value)
    assert json.loads(encoded) == value
    assert not set("<>&\u2028") & set(encoded)
