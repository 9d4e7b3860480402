"""SHA-256 of a model's files, remembered so that only the first launch reads hundreds of megabytes for it."""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from tailrace.errors import ModelSourceError

_REMEMBERED_MAX = 1000
_CHUNK_BYTES = 4 * 1024 * 1024


class _Known(msgspec.Struct, frozen=True):
    """A file's hash holds while all of these are the same."""

    size: int
    mtime_ns: int
    inode: int
    sha256: str


def content_hash(paths: Sequence[Path], cache_dir: Path, progress: Callable[[float], None]) -> str:
    """SHA-256 over the names and contents of the files. Raises ModelSourceError when one cannot be read.

    `progress` is told the ratio done. What is remembered lies in `cache_dir/hashes.json`; losing it costs time only.
    """
    memory = cache_dir / "hashes.json"
    known = _recall(memory)
    total = hashlib.sha256()
    changed = False
    for i, path in enumerate(paths):
        try:
            status = path.stat()
            entry = known.get(str(path))
            if entry is None or (entry.size, entry.mtime_ns, entry.inode) != _identity(status):
                digest = _hash_file(path, lambda ratio, i=i: progress((i + ratio) / len(paths)))  # type: ignore[misc]
                entry = _Known(*_identity(status), digest)
                known[str(path)] = entry
                changed = True
        except OSError as error:
            raise ModelSourceError(f"cannot read {path}: {error.strerror}; check the path and its rights") from error
        total.update(f"{path.name}\0{entry.sha256}\n".encode())
    if changed:
        _remember(memory, known)
    return total.hexdigest()


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ino


def _hash_file(path: Path, progress: Callable[[float], None]) -> str:
    digest = hashlib.sha256()
    size = max(1, path.stat().st_size)
    done = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress(min(1.0, done / size))
    return digest.hexdigest()


def _recall(memory: Path) -> dict[str, _Known]:
    try:
        return msgspec.json.decode(memory.read_bytes(), type=dict[str, _Known])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}


def _remember(memory: Path, known: dict[str, _Known]) -> None:
    """Two launches at once may lose one's entry, never break the file."""
    kept = dict(list(known.items())[-_REMEMBERED_MAX:])
    with contextlib.suppress(OSError):  # a full disk is reported where it matters
        memory.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=memory.parent, prefix="hashes-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.encode(kept))
            os.replace(name, memory)
        except OSError:
            os.unlink(name)
