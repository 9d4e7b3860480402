"""A GGUF file: its key-value header, its table of tensors, and one tensor at a time. Nothing in it is trusted.

Every length is checked against the file before it is used, so that a cut or flipped file ends in ModelSourceError.
Format: github.com/ggml-org/ggml, docs/gguf.md (versions 2 and 3, little-endian).
"""

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.errors import ModelRefused, ModelSourceError

KEYS_MAX = 100_000
TENSORS_MAX = 100_000
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_ROWS_BYTES = 16 * 1024 * 1024
"""Of float32 that one piece of a tensor may take while it is dequantised."""


class GgufTensor(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    shape: tuple[int, ...]
    """Row-major, as numpy has it: the file's order reversed."""
    type_id: int
    """ggml's number of the tensor type."""
    type_name: str
    start: int
    """Byte offset in the file."""
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


class GgufFile(msgspec.Struct, frozen=True, kw_only=True):
    path: Path
    version: int
    keys: dict[str, Any]
    """Arrays are lists; a repeated key is refused."""
    key_places: dict[str, tuple[int, int]]
    """Byte range of each key's value in the file."""
    keys_end: int
    """Byte offset where the keys end and the table of tensors begins."""
    tensors: tuple[GgufTensor, ...]

    @property
    def num_parameters(self) -> int:
        return sum(tensor.num_elements for tensor in self.tensors)


def open_gguf(path: Path) -> GgufFile:
    """Read the header. Raises ModelSourceError for a file that is missing, cut or corrupt."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return _Header(path, view).read()
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelSourceError(f"cannot read {path}: {error}; get the file again") from error


def read_rows(source: GgufFile, tensor: GgufTensor) -> Iterator[NDArray[np.float32]]:
    """The tensor dequantised, in pieces of whole rows of about 16 MiB, so that memory stays bounded.

    Raises ModelRefused for a tensor type that the `gguf` package cannot dequantise.
    """
    from gguf.quants import dequantize

    kind = _tensor_type(tensor.type_id)
    row_elements = tensor.shape[-1]
    num_rows = tensor.num_elements // row_elements
    row_bytes = tensor.num_bytes // num_rows
    step = max(1, _ROWS_BYTES // (4 * row_elements))
    with source.path.open("rb") as file:
        for first in range(0, num_rows, step):
            rows = min(step, num_rows - first)
            data = _read_exactly(file, tensor.start + first * row_bytes, rows * row_bytes)
            try:
                values = dequantize(_typed(data, tensor.type_name).reshape(rows, -1), kind)
            except NotImplementedError as error:
                raise ModelRefused(
                    f"{source.path.name} has tensors of type {tensor.type_name}, which cannot be dequantised here; "
                    "llama.cpp can run it"
                ) from error
            yield np.asarray(values, dtype=np.float32)


def _read_exactly(file: BinaryIO, start: int, size: int) -> NDArray[np.uint8]:
    file.seek(start)
    data = file.read(size)
    if len(data) != size:
        raise ModelSourceError(f"{file.name} ended early: it changed while it was read; start again")
    return np.frombuffer(data, dtype=np.uint8)


def _typed(data: NDArray[np.uint8], type_name: str) -> NDArray[Any]:
    """Plain float types are viewed as such; the package dequantises all others from bytes."""
    plain = {"F32": np.float32, "F16": np.float16, "F64": np.float64}.get(type_name)
    return data if plain is None else data.view(plain)


def _tensor_type(type_id: int) -> Any:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType(type_id)


class _Header:
    """Walks the header with one cursor. Every read checks that the bytes are there."""

    def __init__(self, path: Path, view: mmap.mmap) -> None:
        self._path = path
        self._view = view
        self._size = len(view)
        self._at = 0

    def read(self) -> GgufFile:
        if self._take(4) != b"GGUF":
            raise ModelSourceError(f"{self._path} is not a GGUF file (it does not begin with GGUF)")
        version = self._number("I")
        if version not in (2, 3):
            raise ModelSourceError(
                f"{self._path} is a GGUF file of version {version}; versions 2 and 3 (little-endian) are read: "
                "convert the model again with a current llama.cpp"
            )
        num_tensors, num_keys = self._count(TENSORS_MAX, "tensors"), self._count(KEYS_MAX, "keys")
        keys: dict[str, Any] = {}
        places: dict[str, tuple[int, int]] = {}
        for _ in range(num_keys):
            key = self._string()
            if key in keys:
                self._corrupt(f"it has the key {key!r} twice")
            kind = self._number("I")
            start = self._at
            keys[key] = self._value(kind)
            places[key] = (start, self._at)
        keys_end = self._at
        infos = [self._tensor_info() for _ in range(num_tensors)]
        tensors = self._place_tensors(infos, keys)
        return GgufFile(
            path=self._path, version=version, keys=keys, key_places=places, keys_end=keys_end, tensors=tensors
        )

    def _place_tensors(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], keys: dict[str, Any]
    ) -> tuple[GgufTensor, ...]:
        alignment = keys.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 2**20:
            self._corrupt(f"its alignment is {alignment!r}")
        data_start = -(-self._at // alignment) * alignment
        tensors = tuple(self._placed(info, data_start) for info in infos)
        if len({tensor.name for tensor in tensors}) != len(tensors):
            self._corrupt("two tensors have the same name")
        return tensors

    def _placed(self, info: tuple[str, tuple[int, ...], int, int], data_start: int) -> GgufTensor:
        from gguf import GGML_QUANT_SIZES

        name, dims, type_id, offset = info
        try:
            kind = _tensor_type(type_id)
            block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            self._corrupt(f"tensor {name!r} has the unknown type {type_id}")
        num_elements = 1
        for dim in dims:
            num_elements *= dim
        if num_elements == 0 or dims[0] % block_elements:
            self._corrupt(f"tensor {name!r} has the shape {dims}, which its type {kind.name} cannot have")
        num_bytes = num_elements // block_elements * block_bytes
        start = data_start + offset
        if start + num_bytes > self._size:
            self._corrupt(f"tensor {name!r} ends at byte {start + num_bytes}, the file at {self._size}")
        return GgufTensor(
            name=name, shape=dims[::-1], type_id=type_id, type_name=kind.name, start=start, num_bytes=num_bytes
        )

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._number("I")
        if not 1 <= num_dims <= 4:
            self._corrupt(f"tensor {name!r} has {num_dims} dimensions")
        dims = tuple(self._number("Q") for _ in range(num_dims))
        return name, dims, self._number("I"), self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(self._code(kind))
        item_kind = self._number("I")
        length = self._count(self._size, "array items")
        if item_kind == _STRING:
            return [self._string() for _ in range(length)]
        code = self._code(item_kind)
        return np.frombuffer(
            self._take(length * struct.calcsize(code)), dtype=np.dtype(code).newbyteorder("<")
        ).tolist()

    def _code(self, kind: int) -> str:
        code = _SCALARS.get(kind)
        if code is None:
            self._corrupt(f"a key has the unknown type {kind}")
        return code

    def _string(self) -> str:
        value = self._take(self._number("Q"))
        try:
            return value.decode()
        except UnicodeDecodeError:
            self._corrupt("a string in its header is not UTF-8")

    def _count(self, limit: int, what: str) -> int:
        count: int = self._number("Q")
        if count > limit:
            self._corrupt(f"it claims {count} {what}")
        return count

    def _number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _take(self, size: int) -> bytes:
        if size > self._size - self._at:
            self._corrupt(f"its header needs {size} bytes at {self._at}, the file has {self._size}")
        value = self._view[self._at : self._at + size]
        self._at += size
        return value

    def _corrupt(self, what: str) -> NoReturn:
        raise ModelSourceError(f"{self._path} is cut or corrupt: {what}; get the file again")
