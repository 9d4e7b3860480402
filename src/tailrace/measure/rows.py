"""Files of rows: a run's header and its records, one JSON object a line, gzip or plain.

The first line is a RunInfo, every other one a RequestRecord. A file from outside is hostile until read: lines, rows and
chunks are bounded, and what is wrong is named with its line.
"""

import contextlib
import gc
import gzip
import os
import tempfile
import zlib
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import IO, cast

import msgspec

from tailrace.errors import ConfigError
from tailrace.measure.record import DEFINITIONS, RequestRecord
from tailrace.measure.run_info import RunInfo
from tailrace.measure.slo import POOLED_METRICS, REQUEST_METRICS
from tailrace.measure.table import TIME_NS_MAX, BadRecord, RecordTable, TableBuilder

LINE_BYTES_MAX = 16 << 20
ROWS_MAX = 10_000_000
CHUNKS_MAX = 200_000_000
_BLOCK_BYTES = 1 << 20
_GZIP_LEVEL = 4
"""Rows shrink about as much at the highest level, at several times the cost."""
_GZIP_MAGIC = b"\x1f\x8b"

_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_ENCODER = msgspec.json.Encoder()
_RECORDS = msgspec.json.Decoder(RequestRecord)


def encode_record(record: RequestRecord) -> bytes:
    """One line of a file of rows, without its end."""
    return _ENCODER.encode(record)


def write_rows(path: Path, info: RunInfo, lines: Iterable[bytes]) -> int:
    """Writes the header and encoded records; gzip when the name ends in `.gz`. Returns the number of records.

    The file appears whole or not at all. Raises ConfigError when it cannot be written.
    """
    num = 0
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as raw, _compressed(raw, path.suffix == ".gz") as file:
                file.write(_ENCODER.encode(info) + b"\n")
                for line in lines:
                    file.write(line.rstrip(b"\n") + b"\n")
                    num += 1
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise ConfigError(f"cannot write rows to {path}: {error.strerror or error}") from None
    return num


def read_rows(path: Path) -> tuple[RunInfo, RecordTable]:
    """The whole file as a table. Raises ConfigError that names the line at fault."""
    blocks = _blocks(path)
    info = _read_info(path, next(blocks))
    builder = TableBuilder()
    for first_line, block in blocks:
        with _no_collection():
            _add_block(path, builder, first_line, block)
        if builder.num_rows > ROWS_MAX or builder.num_chunks > CHUNKS_MAX:
            raise ConfigError(f"{path} has more than {ROWS_MAX:,} rows or {CHUNKS_MAX:,} chunks; report it in parts")
    return info, builder.table()


def read_info(path: Path) -> RunInfo:
    """The header alone. Raises ConfigError."""
    blocks = _blocks(path)
    with contextlib.closing(blocks):
        return _read_info(path, next(blocks))


def read_records(path: Path) -> Iterator[RequestRecord]:
    """The records one by one, for what columns do not keep. Raises ConfigError that names the line at fault."""
    blocks = _blocks(path)
    with contextlib.closing(blocks):
        _read_info(path, next(blocks))
        for first_line, block in blocks:
            yield from _decode(path, first_line, block)


def _add_block(path: Path, builder: TableBuilder, first_line: int, block: bytes) -> None:
    records = _decode(path, first_line, block)
    try:
        builder.add(records)
    except BadRecord as bad:
        raise _at(path, first_line + bad.index, bad.reason) from None


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Records make no cycles; looking for some among thousands of new lists costs as much as decoding them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _compressed(raw: IO[bytes], wanted: bool) -> Iterator[IO[bytes]]:
    if not wanted:
        yield raw
        return
    # No time and no name inside: equal rows give equal files.
    with gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=_GZIP_LEVEL, mtime=0) as packed:
        yield cast(IO[bytes], packed)


def _blocks(path: Path) -> Generator[tuple[int, bytes], None, None]:
    """(number of its first line, whole lines): the header alone, then blocks of lines."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == _GZIP_MAGIC
            raw.seek(0)
            file = cast(IO[bytes], gzip.GzipFile(fileobj=raw, mode="rb")) if packed else raw
            header = file.readline(LINE_BYTES_MAX + 1)
            if len(header) > LINE_BYTES_MAX:
                raise _too_long(path, 1)
            yield 1, header
            yield from _line_blocks(path, file)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(f"{path} is damaged or was cut short while it was written ({error})") from None
    except OSError as error:
        raise ConfigError(f"cannot read rows from {path}: {error.strerror or error}") from None


def _line_blocks(path: Path, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    line, rest = 2, b""
    while block := file.read(_BLOCK_BYTES):
        whole, end, rest = (rest + block).rpartition(b"\n")
        if end:
            yield line, whole
            line += whole.count(b"\n") + 1
        if len(rest) > LINE_BYTES_MAX:
            raise _too_long(path, line)
    if rest:
        yield line, rest


def _decode(path: Path, first_line: int, block: bytes) -> list[RequestRecord]:
    num_lines = block.count(b"\n") + 1
    try:
        records = _RECORDS.decode_lines(block)
        if len(records) == num_lines:
            return records
    except _UNDECODABLE:
        pass
    # Line by line, to name the one at fault; a blank line or a line of two objects is one too.
    for number, line in enumerate(block.split(b"\n")):
        try:
            _RECORDS.decode(line)
        except _UNDECODABLE as error:
            raise _at(path, first_line + number, f"not a request's record: {error}") from None
    raise AssertionError("a block that does not decode has a line that does not")


def _read_info(path: Path, first: tuple[int, bytes]) -> RunInfo:
    try:
        version = msgspec.json.decode(first[1], type=_Version).definitions
        if version != DEFINITIONS:
            raise ConfigError(
                f"{path} was written under the definitions {version[:60]!r}, this tailrace reads {DEFINITIONS!r}; "
                "use the version that wrote it"
            )
        info = msgspec.json.decode(first[1], type=RunInfo)
    except _UNDECODABLE as error:
        raise _at(
            path, 1, f"not the header of a run: {error}; is it a file that `tailrace bench --rows` wrote?"
        ) from None
    wrong = _wrong_in(info)
    if wrong:
        raise _at(path, 1, f"the header cannot be: {wrong}")
    return info


class _Version(msgspec.Struct):
    definitions: str


def _wrong_in(info: RunInfo) -> str | None:
    times = (info.origin_ns, info.window_start_ns, info.window_end_ns, info.timeout_ns, *info.scheduled_gaps_ns)
    if not all(0 <= each < TIME_NS_MAX for each in times):
        return "a time is negative or too large"
    if info.window_end_ns < info.window_start_ns:
        return "the window ends before it starts"
    if info.offered_per_s is not None and not 0 <= info.offered_per_s < 1e12:
        return "the offered rate is negative or too large"
    for limit in info.slo.limits:
        if limit.metric not in REQUEST_METRICS + POOLED_METRICS:
            return f"the SLO limits {limit.metric[:60]!r}, which is no metric"
        if not (0 < limit.percentile_ratio < 1 and 0 < limit.limit_ms < 1e15):
            return "a limit of the SLO is out of range"
    return None


def _at(path: Path, line: int, reason: str) -> ConfigError:
    return ConfigError(f"{path}, line {line}: {reason}")


def _too_long(path: Path, line: int) -> ConfigError:
    return _at(path, line, f"longer than {LINE_BYTES_MAX >> 20} MiB; not a file of rows")
