"""The cache of prepared models: staged in a private folder, made visible by one rename, keyed by content.

::

    cache_dir/models/<content hash>/        a whole prepared model, or nothing
             /staging/<anything>/           being written; `lock` inside is held by whoever writes
             /locks/<content hash>          held while that model is prepared, so the work is done once

A process that dies lets go of its locks, so a staging folder whose lock is free is rubbish.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from tailrace.errors import ConfigError, ModelSourceError
from tailrace.model.manifest import MANIFEST_NAME, ModelManifest


class CachedModel(msgspec.Struct, frozen=True, kw_only=True):
    directory: Path
    manifest: ModelManifest
    num_bytes: int
    """On disk, without what symbolic links point to."""


class Staging(msgspec.Struct, frozen=True, kw_only=True):
    directory: Path
    """Where the model is put together; becomes the cache entry."""
    lock_fd: int
    """Held while this is written. A child that writes too inherits it."""


def entry_path(cache_dir: Path, content_hash: str) -> Path:
    return cache_dir / "models" / content_hash


def read_manifest(directory: Path) -> ModelManifest | None:
    """None when there is no readable manifest, which an entry of another version may lack too."""
    try:
        return msgspec.json.decode((directory / MANIFEST_NAME).read_bytes(), type=ModelManifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def list_models(cache_dir: Path) -> list[CachedModel]:
    """All whole entries, by name then age. Raises ModelSourceError when the cache cannot be read."""
    found = []
    root = cache_dir / "models"
    try:
        directories = list(root.iterdir())
    except FileNotFoundError:
        directories = []
    except OSError as error:
        raise ModelSourceError(f"cannot read the cache {root}: {error.strerror or error}") from error
    for directory in directories:
        manifest = read_manifest(directory)
        if manifest is not None:
            # Somebody else may delete it now.
            with contextlib.suppress(FileNotFoundError):
                found.append(CachedModel(directory=directory, manifest=manifest, num_bytes=_disk_bytes(directory)))
    return sorted(found, key=lambda model: (model.manifest.name, model.manifest.created_at))


def remove_model(cache_dir: Path, key: str) -> CachedModel:
    """Delete the one entry whose content hash begins with `key` or whose name is `key`.

    A service that runs from it goes on: its files are mapped. Raises ConfigError when none or several match.
    """
    models = list_models(cache_dir)
    matches = [model for model in models if model.manifest.content_hash.startswith(key) or model.manifest.name == key]
    if len(matches) != 1:
        known = ", ".join(f"{m.manifest.content_hash[:12]} ({m.manifest.name})" for m in models) or "nothing"
        problem = "no prepared model" if not matches else f"{len(matches)} prepared models"
        raise ConfigError(f"{problem} match {key!r}; the cache holds {known}: give the beginning of one hash")
    with staging(cache_dir) as stage:
        # Renamed first: nobody may find half an entry.
        try:
            os.rename(matches[0].directory, stage.directory / "removed")
        except FileNotFoundError:
            raise ConfigError(f"{matches[0].manifest.name} was deleted by somebody else meanwhile") from None
        except OSError as error:
            raise ModelSourceError(f"cannot delete {matches[0].directory}: {error.strerror or error}") from error
    return matches[0]


@contextlib.contextmanager
def preparing(cache_dir: Path, content_hash: str, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the right to prepare this model; `waiting` is called once if another process has it."""
    path = cache_dir / "locks" / content_hash
    _make_directory(path.parent)
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def staging(cache_dir: Path) -> Iterator[Staging]:
    """A private folder on the cache's file system, gone afterwards unless it was published."""
    root = cache_dir / "staging"
    _make_directory(root)
    with (root / "lock").open("wb") as all_staging:
        # Between making a folder and locking it, it looks like rubbish: both are done under one lock.
        fcntl.flock(all_staging, fcntl.LOCK_EX)
        _remove_rubbish(root)
        directory = Path(tempfile.mkdtemp(dir=root))
        lock_fd = os.open(directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
    inner = directory / "model"
    inner.mkdir()
    try:
        yield Staging(directory=inner, lock_fd=lock_fd)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock_fd)


def publish(stage: Staging, cache_dir: Path, content_hash: str) -> Path:
    """Make the staged model visible, all at once and durably. An entry that is there already is replaced."""
    final = entry_path(cache_dir, content_hash)
    _make_directory(final.parent)
    for path in stage.directory.iterdir():
        if not path.is_symlink():
            _sync(path)
    _sync(stage.directory)
    if final.exists():
        os.rename(final, stage.directory.parent / "replaced")
    os.rename(stage.directory, final)
    _sync(final.parent)
    return final


def check_room(cache_dir: Path, needed_bytes: int) -> None:
    """Raises ModelSourceError when the disk has not the room to prepare a model."""
    _make_directory(cache_dir)
    free = shutil.disk_usage(cache_dir).free
    if free < needed_bytes:
        raise disk_full(cache_dir, needed_bytes, free)


def disk_full(cache_dir: Path, needed_bytes: int, free_bytes: int) -> ModelSourceError:
    return ModelSourceError(
        f"preparing this model needs {needed_bytes / 1e6:,.0f} MB ({needed_bytes} bytes) in {cache_dir}, "
        f"{free_bytes / 1e6:,.0f} MB are free; make room there, or name another disk with --set model.cache_dir=PATH"
    )


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelSourceError(
            f"cannot write the cache {path}: {error.strerror}; name another with --set model.cache_dir=PATH"
        ) from error


def _remove_rubbish(root: Path) -> None:
    for directory in root.iterdir():
        if not directory.is_dir():
            continue
        try:
            with (directory / "lock").open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        except FileNotFoundError:
            pass  # died before it made its lock
        shutil.rmtree(directory, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _disk_bytes(directory: Path) -> int:
    return sum(path.lstat().st_size for path in directory.iterdir())
