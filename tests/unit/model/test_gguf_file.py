"""A GGUF file is hostile until parsed: whatever is cut or flipped ends in ModelSourceError, never in a traceback."""

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.errors import ModelRefused, ModelSourceError
from tailrace.model.gguf_file import open_gguf, read_rows
from tailrace.model.gguf_model import check_gguf, gguf_shape, write_f16
from tailrace.model.gguf_tokenizer import tokenizer_json
from tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_the_header_is_what_the_reference_reader_finds(good: Path) -> None:
    ours, theirs = open_gguf(good), GGUFReader(good)
    for key, value in ours.keys.items():
        assert theirs.fields[key].contents() == value
    assert [(t.name, t.start, t.num_bytes) for t in ours.tensors] == [
        (t.name, t.data_offset, t.n_bytes) for t in theirs.tensors
    ]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q5_0", "Q4_0", "Q4_1"])
def test_rows_are_dequantised_as_the_package_does(tmp_path: Path, kind: str) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", quantization=GGMLQuantizationType[kind])
    source = open_gguf(path)
    for ours, theirs in zip(source.tensors, GGUFReader(path).tensors, strict=True):
        found = np.concatenate([rows.reshape(-1) for rows in read_rows(source, ours)])
        assert np.array_equal(found, dequantize(theirs.data, theirs.tensor_type).reshape(-1))


def test_the_f16_copy_holds_the_same_weights_and_keys(good: Path, tmp_path: Path) -> None:
    source = open_gguf(good)
    ratios: list[float] = []
    write_f16(source, tmp_path / "f16.gguf", ratios.append)
    copy = open_gguf(tmp_path / "f16.gguf")
    assert copy.keys == {**source.keys, "general.file_type": 1}
    assert ratios[-1] == 1.0
    for before, after in zip(source.tensors, copy.tensors, strict=True):
        assert after.type_name == ("F32" if len(before.shape) == 1 else "F16")
        assert after.start % 32 == 0
        expected = np.concatenate(list(read_rows(source, before)))
        assert np.array_equal(np.concatenate(list(read_rows(copy, after))), expected.astype(np.float16))
    GGUFReader(tmp_path / "f16.gguf")  # another reader accepts it


def _use(path: Path) -> None:
    """All that a conversion does before any library sees the file."""
    source = open_gguf(path)
    check_gguf(source)
    gguf_shape(source)
    tokenizer_json(source.keys)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_cut_anywhere_is_a_source_error(good: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = good.read_bytes()
    cut = data.draw(st.integers(0, len(content) - 1))
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[:cut])
    with pytest.raises(ModelSourceError):
        _use(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_in_the_header_never_give_a_traceback(good: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(good.read_bytes())
    end = open_gguf(good).keys_end + 1000
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, end))] ^= data.draw(st.integers(1, 255))
    path = tmp_path / "flipped.gguf"
    path.write_bytes(content)
    try:
        _use(path)
    except (ModelSourceError, ModelRefused):
        return


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"PK\x03\x04 not a model", "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 1), "claims"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 2**40), "claims"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "needs"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 9, 1), "unknown type 9"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 4, 2**50), "claims"),
        (b"GGUF" + struct.pack("<IQQQ1sIB", 3, 0, 1, 1, b"\xff", 0, 1), "not UTF-8"),
    ],
)
def test_hostile_headers_are_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelSourceError, match=says):
        open_gguf(path)


def test_a_missing_file_is_a_source_error(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"nothing\.gguf"):
        open_gguf(tmp_path / "nothing.gguf")


def test_a_layer_count_beyond_the_tensors_is_refused_before_it_costs_memory(good: Path, tmp_path: Path) -> None:
    content = bytearray(good.read_bytes())
    arch = open_gguf(good).keys["general.architecture"]
    begin, _ = open_gguf(good).key_places[f"{arch}.block_count"]
    content[begin : begin + 4] = b"\xff\xff\xff\x7f"
    path = tmp_path / "layers.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelSourceError, match="too few"):
            _use(path)
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()
