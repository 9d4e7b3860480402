"""`tailrace report`: the report again from rows, by the same SLO or another."""

import json
from pathlib import Path

import msgspec
import pytest
from report_samples import make_info

from tailrace.cli.main import run
from tailrace.measure.record import Outcome, RequestRecord
from tailrace.measure.rows import encode_record, write_rows

NS = 10**9


def record(number: int, ttft_ms: int, outcome: Outcome = Outcome.OK) -> RequestRecord:
    start = 6 * NS + number * NS // 4
    return RequestRecord(
        request_id=f"r{number}",
        outcome=outcome,
        scheduled_ns=start,
        issued_ns=start,
        connected_ns=start,
        sent_ns=start,
        headers_ns=start,
        ended_ns=start + (ttft_ms + 40) * 1_000_000,
        chunk_gaps_ns=[ttft_ms * 1_000_000, 20_000_000, 20_000_000],
        num_prompt_tokens=9,
        num_output_tokens=3,
        num_output_tokens_asked=3,
        message="" if outcome is Outcome.OK else "no \x1b[31mroom",
    )


def rows(path: Path, run_id: str = "a", num: int = 200) -> str:
    info = msgspec.structs.replace(make_info(slo="ttft_ms_p50<=150"), run_id=run_id)
    records = [record(i, 100 + i % 20, Outcome.REFUSED if i == 7 else Outcome.OK) for i in range(num)]
    write_rows(path, info, map(encode_record, records))
    return str(path)


@pytest.fixture
def kept(tmp_path: Path) -> str:
    return rows(tmp_path / "run.jsonl.gz")


def test_rows_become_a_table(kept: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", kept]) == 0
    text = capsys.readouterr().out
    assert "ttft_ms_p50<=150" in text
    assert "199 ok, 1 refused" in text


def test_json_is_one_document_and_nothing_else(kept: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", kept, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["reports"][0]["num_requests"] == 200
    assert result["reports"][0]["metrics"]["ttft_ms"]["percentiles"]["p50"] == pytest.approx(109, abs=1)


def test_another_slo_judges_the_same_rows(kept: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", kept, "--slo", "ttft_ms_p50<=50", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["passes"] is not True
    assert result["reports"][0]["limits"][0]["limit"] == "ttft_ms_p50<=50"
    assert result["reports"][0]["goodput"]["num_attained"] == 0


def test_check_fails_when_a_limit_does(kept: str) -> None:
    assert run(["report", kept, "--slo", "ttft_ms_p50<=50", "--check"]) == 1
    assert run(["report", kept, "--slo", "ttft_ms_p50<=50"]) == 0


def test_pages_and_files_are_written_beside_the_table(
    kept: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, out = tmp_path / "page.html", tmp_path / "out.json"
    assert run(["report", kept, "--html", str(page), "--out", str(out)]) == 0
    assert "Plotly" in page.read_text(encoding="utf-8")
    assert len(json.loads(out.read_text(encoding="utf-8"))["reports"]) == 1
    assert "TTFT" in capsys.readouterr().out


def test_several_files_are_repeats(kept: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = rows(tmp_path / "other.jsonl.gz", run_id="b")
    assert run(["report", kept, other]) == 0
    assert "all runs together" in capsys.readouterr().out
    assert run(["report", kept, kept]) == 2
    assert "one run is there twice" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"{}\n", b"\x1f\x8bnot gzip", b"not json\n"])
def test_a_file_that_holds_no_rows_is_one_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(content)
    assert run(["report", str(path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_missing_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(tmp_path / "none.jsonl")]) == 2
    assert "cannot read rows" in capsys.readouterr().err
