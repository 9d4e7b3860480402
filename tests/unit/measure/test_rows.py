"""Files of rows: what is written comes back; what is damaged is named."""

import contextlib
import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_records import failed, record, run_info

from tailrace.errors import ConfigError
from tailrace.measure import rows as rows_module
from tailrace.measure.build import build_report
from tailrace.measure.record import DEFINITIONS, RequestRecord
from tailrace.measure.rows import encode_record, read_info, read_records, read_rows, write_rows
from tailrace.measure.run_info import RunInfo
from tailrace.measure.table import RecordTable

ROWS = [record("a", 0, [10, 2], [2, 1]), failed("b", 5, message="no"), record("c", 9, [1.5])]


def write(path: Path, rows: list[RequestRecord], info: RunInfo | None = None) -> Path:
    assert write_rows(path, info or run_info(), map(encode_record, rows)) == len(rows)
    return path


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl"])
def test_rows_come_back(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, ROWS)
    info, table = read_rows(path)
    assert info == read_info(path) == run_info()
    assert list(read_records(path)) == ROWS
    assert build_report(info, table) == build_report(run_info(), RecordTable.from_records(ROWS))
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")


def test_equal_rows_make_equal_files(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.gz", ROWS), write(tmp_path / "b.gz", ROWS)
    assert first.read_bytes() == second.read_bytes()


def test_a_run_without_requests_is_a_file_too(tmp_path: Path) -> None:
    _, table = read_rows(write(tmp_path / "rows.gz", []))
    assert len(table) == 0


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.gz", ROWS)
    before = path.read_bytes()

    def lines():  # type: ignore[no-untyped-def]
        yield encode_record(ROWS[0])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_rows(path, run_info(), lines())
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write rows to"):
        write_rows(tmp_path / "missing" / "rows.gz", run_info(), [])


def test_many_blocks_read_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "rows.gz", [record(str(i), i, [1, 2]) for i in range(50)])
    expected = list(read_records(path))
    for size in (1, 7, 100, 5_000):
        monkeypatch.setattr(rows_module, "_BLOCK_BYTES", size)
        assert list(read_records(path)) == expected
        assert len(read_rows(path)[1]) == 50


def test_packed_files_put_together_read_as_one(tmp_path: Path) -> None:
    lines = [encode_record(row) + b"\n" for row in ROWS]
    path = write(tmp_path / "rows.gz", ROWS[:1])
    path.write_bytes(path.read_bytes() + b"".join(map(gzip.compress, lines[1:])) + bytes(512))
    assert list(read_records(path)) == ROWS


def test_a_packed_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "rows.gz", ROWS).read_bytes()
    path = tmp_path / "cut.gz"
    for size in range(2, len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"cut short|not the header"):
            read_rows(path)


def test_a_last_line_without_an_end_counts(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert list(read_records(path)) == ROWS


HEADER = rows_module._ENCODER.encode(run_info()) + b"\n"
GOOD = encode_record(ROWS[0]) + b"\n"
LIMIT = b'{"metric":"ttft_ms","percentile_ratio":0.5,"limit_ms":1}'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "line 1: not the header"),
        (b"hello\n", "line 1: not the header"),
        (b"[" * 100_000 + b"\n", "line 1: not the header"),
        (b'{"definitions":"x","server":' + b'{"a":' * 100_000, "line 1: not the header"),
        (GOOD, "line 1: not the header"),
        (b"\xff\xfe\x00", "line 1: not the header"),
        (HEADER.replace(DEFINITIONS.encode(), b"tailrace-measure/99"), "tailrace-measure/99"),
        (HEADER.replace(b'"window_end_ns":1000000000', b'"window_end_ns":-1'), "line 1: the header cannot be"),
        (HEADER.replace(b'"limits":[]', b'"limits":[{"metric":"x","percentile_ratio":0.5,"limit_ms":1}]'), "no metric"),
        (HEADER.replace(b'"limits":[]', b'"limits":[' + b",".join([LIMIT] * 33) + b"]"), "more than 32 limits"),
        (HEADER + GOOD + b"\n" + GOOD, "line 3: not a request's record"),
        (HEADER + GOOD + b'{"request_id":3}\n' + GOOD, "line 3: not a request's record"),
        (HEADER + GOOD + GOOD.strip() + GOOD, "line 3: not a request's record"),
        (HEADER + GOOD + b"\xff\n", "line 3: not a request's record"),
        (HEADER + GOOD + b'{"a":' + b"[" * 100_000, "line 3: not a request's record"),
        (HEADER + GOOD + GOOD.replace(b'"chunk_gaps_ns":[1', b'"chunk_gaps_ns":[-1'), "line 3: chunk_gaps_ns"),
        (gzip.compress(HEADER + GOOD)[:-9], "cut short"),
        (gzip.compress(HEADER + GOOD * 999)[:60], "cut short"),
        (b"\x1f\x8b" + b"x" * 100, "damaged"),
        (gzip.compress(HEADER + GOOD) + b"junk", "damaged"),
    ],
)
def test_a_hostile_file_ends_in_one_readable_error(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "rows"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_rows(path)
    assert said in caught.value.message
    assert "rows" in caught.value.message
    assert len(caught.value.message) < 1_000


def test_a_line_without_end_is_refused_before_it_fills_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "LINE_BYTES_MAX", 1 << 20)
    path = tmp_path / "rows.gz"
    for content, line in ((b"a" * (8 << 20), 1), (HEADER + GOOD + b"a" * (8 << 20), 3)):
        path.write_bytes(gzip.compress(content))
        with pytest.raises(ConfigError, match=f"line {line}: longer than 1 MiB"):
            read_rows(path)


def test_rows_and_chunks_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "rows.gz", ROWS)
    monkeypatch.setattr(rows_module, "ROWS_MAX", 2)
    with pytest.raises(ConfigError, match="more than 2 rows"):
        read_rows(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read rows from"):
        read_rows(tmp_path / "none")


@given(st.binary(max_size=300), st.integers(0, 2))
def test_random_bytes_never_end_in_another_error(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes, kind: int
) -> None:
    path = tmp_path_factory.mktemp("junk") / "rows"
    whole = gzip.compress(HEADER + GOOD)
    path.write_bytes((junk, HEADER + junk, whole[: len(whole) - len(junk)] + junk)[kind])
    with contextlib.suppress(ConfigError):
        read_rows(path)
