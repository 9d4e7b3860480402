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
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import IO, NamedTuple, cast

import msgspec

from tailrace.errors import ConfigError
from tailrace.measure.record import DEFINITIONS, RequestRecord
from tailrace.measure.run_info import RunInfo
from tailrace.measure.slo import LIMITS_MAX, POOLED_METRICS, REQUEST_METRICS
from tailrace.measure.table import TIME_NS_MAX, BadRecord, RecordTable, TableBuilder

LINE_BYTES_MAX = 16 << 20
ROWS_MAX = 10_000_000
CHUNKS_MAX = 200_000_000
_BLOCK_BYTES = 1 << 20
_GZIP_LEVEL = 4
"""Rows shrink about as much at the highest level, at several times the cost."""
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WINDOW = 16 + zlib.MAX_WBITS
_PACKED_BYTES = 1 << 18

_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_ENCODER = msgspec.json.Encoder()
_RECORDS = msgspec.json.Decoder(RequestRecord)


class _Block(NamedTuple):
    """Whole lines of a file, the last without its end."""

    first_line: int
    text: bytes
    num_lines: int


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
    for block in blocks:
        with _no_collection():
            _add_block(path, builder, block)
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
        for block in blocks:
            yield from _decode(path, block)


def _add_block(path: Path, builder: TableBuilder, block: _Block) -> None:
    records = _decode(path, block)
    try:
        builder.add(records)
    except BadRecord as bad:
        raise _at(path, block.first_line + bad.index, bad.reason) from None


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


def _blocks(path: Path) -> Generator[_Block, None, None]:
    """The header alone, then blocks of whole lines."""
    try:
        with path.open("rb") as raw:
            is_packed = raw.read(2) == _GZIP_MAGIC
            raw.seek(0)
            pieces = _read_ahead(_unpacked(raw)) if is_packed else iter(lambda: raw.read(_BLOCK_BYTES), b"")
            yield from _line_blocks(path, pieces)
    except (EOFError, zlib.error) as error:
        raise ConfigError(f"{path} is damaged or was cut short while it was written ({error})") from None
    except OSError as error:
        raise ConfigError(f"cannot read rows from {path}: {error.strerror or error}") from None


def _unpacked(raw: IO[bytes]) -> Iterator[bytes]:
    """What one gzip member, or several in a row, hold. `gzip` itself reads 8 KiB at a time, which costs twice."""
    member, rest = zlib.decompressobj(_GZIP_WINDOW), b""
    while True:
        packed = rest or raw.read(_PACKED_BYTES)
        if member.eof:
            packed = packed.lstrip(b"\0")  # a file may be filled up to a whole sector
            member = zlib.decompressobj(_GZIP_WINDOW) if packed else member
        piece = member.decompress(packed, _BLOCK_BYTES)
        rest = member.unused_data if member.eof else member.unconsumed_tail
        if piece:
            yield piece
        elif not packed:
            break
    if not member.eof:
        raise EOFError("its end is missing")


def _read_ahead(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The same pieces: while one is decoded, a thread unpacks the next (zlib lets go of the interpreter meanwhile)."""
    with ThreadPoolExecutor(max_workers=1) as unpacker:
        coming = unpacker.submit(next, pieces, b"")
        while piece := coming.result():
            coming = unpacker.submit(next, pieces, b"")
            yield piece


def _line_blocks(path: Path, pieces: Iterator[bytes]) -> Iterator[_Block]:
    text = b""
    while b"\n" not in text and len(text) <= LINE_BYTES_MAX and (piece := next(pieces, b"")):
        text += piece
    header, _, text = text.partition(b"\n")
    if len(header) > LINE_BYTES_MAX:
        raise _too_long(path, 1)
    yield _Block(1, header, 1)
    line, rest = 2, b""
    for piece in chain((text,), pieces):
        whole, end, rest = (rest + piece).rpartition(b"\n")
        if end:
            num_lines = whole.count(b"\n") + 1
            yield _Block(line, whole, num_lines)
            line += num_lines
        if len(rest) > LINE_BYTES_MAX:
            raise _too_long(path, line)
    if rest:
        yield _Block(line, rest, 1)


def _decode(path: Path, block: _Block) -> list[RequestRecord]:
    try:
        records = _RECORDS.decode_lines(block.text)
        if len(records) == block.num_lines:
            return records
    except _UNDECODABLE:
        pass
    # Line by line, to name the one at fault; a blank line or a line of two objects is one too.
    for number, line in enumerate(block.text.split(b"\n")):
        try:
            _RECORDS.decode(line)
        except _UNDECODABLE as error:
            raise _at(path, block.first_line + number, f"not a request's record: {error}") from None
    raise AssertionError("a block that does not decode has a line that does not")


def _read_info(path: Path, first: _Block) -> RunInfo:
    try:
        version = msgspec.json.decode(first.text, type=_Version).definitions
        if version != DEFINITIONS:
            raise ConfigError(
                f"{path} was written under the definitions {version[:60]!r}, this tailrace reads {DEFINITIONS!r}; "
                "use the version that wrote it"
            )
        info = msgspec.json.decode(first.text, type=RunInfo)
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
    if len(info.slo.limits) > LIMITS_MAX:
        return f"the SLO has more than {LIMITS_MAX} limits"
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
