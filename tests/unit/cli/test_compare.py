"""`tailrace compare` from files: the table, JSON, and files that are no results."""

import json
from pathlib import Path

import msgspec
import pytest
from made_reports import latencies, report

from tailrace.cli.compare import FILE_BYTES_MAX
from tailrace.cli.main import run
from tailrace.measure.combine import combine
from tailrace.measure.report import BenchResult


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    paths = []
    for name, seed, scale in (("a", 0, 100.0), ("b", 10, 130.0)):
        runs = [report(latencies(seed + i, 700, scale), f"run-{seed + i}") for i in range(2)]
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_bytes(msgspec.json.encode(combine(runs, num_resamples=10)))
    return str(paths[0]), str(paths[1])


def test_a_table_names_both_sides_and_what_changed(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "chat, poisson:10, SLO: ttft_ms_p99<=500"
    assert lines[1].startswith("A: smollm2 at http://127.0.0.1:8000, 2 runs, 1,400 requests (0 failed, 1,400 ok)")
    row = next(line for line in lines if line.startswith("ttft_ms_p50"))
    assert row.endswith("higher")
    assert " .. " in row
    assert any(line.startswith("note: A has 2 runs") for line in lines)


def test_json_is_one_object(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", *files, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["percentiles"][0]["name"] == "ttft_ms_p50"
    assert found["percentiles"][0]["finding"] == "higher"


def change_file(path: str, **changed: object) -> None:
    """Rewrites a result with other values in its first report."""
    made = msgspec.json.decode(Path(path).read_bytes(), type=BenchResult)
    first = msgspec.structs.replace(made.reports[0], **changed)
    Path(path).write_bytes(msgspec.json.encode(msgspec.structs.replace(made, reports=[first, *made.reports[1:]])))


def test_results_of_other_workloads_are_refused_in_one_line(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    made = msgspec.json.decode(Path(files[1]).read_bytes(), type=BenchResult)
    change_file(files[1], info=msgspec.structs.replace(made.reports[0].info, workload_sha256="ef" * 32))
    assert run(["compare", *files]) == 2
    error = capsys.readouterr().err
    assert "they differ in: workload (chat abababababab against chat efefefefefef)" in error
    assert error.count("\n") == 1


def test_an_invalid_run_is_compared_when_asked(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    change_file(files[0], is_valid=False)
    assert run(["compare", *files]) == 2
    assert "--allow-invalid" in capsys.readouterr().err
    assert run(["compare", *files, "--allow-invalid"]) == 0
    assert "nothing here is a claim" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"definitions": 1}',
        b'{"definitions": "tailrace-measure/1"}',
        b'{"definitions": "tailrace-measure/1", "reports": [], "intervals": {}, "passes": null, "reasons": []}',
        b'{"definitions": "tailrace-measure/0"}',
        b'{"definitions": "tailrace-measure/1", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=str,
)
def test_a_file_that_is_no_result_is_one_line(
    files: tuple[str, str], content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.json"
    bad.write_bytes(content)
    assert run(["compare", files[0], str(bad)]) == 2
    error = capsys.readouterr().err
    assert "bad.json" in error
    assert error.count("\n") == 1
    assert "internal" not in error


def test_the_result_of_a_search_is_named_as_what_it_is(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "sat.json"
    other.write_bytes(b'{"info": {}, "result": {"status": "found"}}')
    assert run(["compare", files[0], str(other)]) == 2
    assert "is a result of `tailrace saturate`, not of `tailrace bench`" in capsys.readouterr().err


def test_a_file_of_broken_columns_and_one_of_absurd_numbers_are_one_line(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    good = Path(files[1]).read_bytes()
    made = msgspec.json.decode(good, type=BenchResult)
    change_file(files[1], samples=msgspec.structs.replace(made.reports[0].samples, ttft_ms=[1.0]))
    assert run(["compare", *files]) == 2
    assert "make the report again from its rows" in capsys.readouterr().err
    Path(files[1]).write_bytes(good.replace(b'"timeout_ns":60000000000', b'"timeout_ns":1' + b"0" * 400, 1))
    assert run(["compare", *files]) == 2
    assert "internal" not in capsys.readouterr().err


def test_a_missing_file_a_folder_and_a_huge_file_are_one_line(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(FILE_BYTES_MAX + 1)
    for path, words in (("none.json", "cannot be read"), (".", "cannot be read"), ("huge.json", "results are smaller")):
        assert run(["compare", files[0], str(tmp_path / path)]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
