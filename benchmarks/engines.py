"""Engines for benchmarks: the same composition as the command line's, with settings given by name."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tailrace.cli.compose import engine_spec, load_settings, prepare
from tailrace.executor.machine import read_hardware
from tailrace.executor.settings import ExecutorSettings, resolve_settings
from tailrace.executor.start import StartedExecutor, start_executor
from tailrace.model.source import PreparedModel
from tailrace.worker.engine_client import EngineClient


def prepared_model(name: str) -> PreparedModel:
    """Converts it first, if need be."""
    return prepare(name, load_settings(None, None))


def production_kv_dtype() -> str:
    """What `executor.kv_dtype` resolves to on this machine when nothing is asked for."""
    return resolve_settings(ExecutorSettings(), read_hardware()).kv_dtype.value


@asynccontextmanager
async def running_engine(name: str, **engine_settings: object) -> AsyncIterator[EngineClient]:
    """An engine child of its own, with `[engine]` settings by name (None: the default). Closed at the end."""
    given = [f"engine.{key}={_toml(value)}" for key, value in engine_settings.items() if value is not None]
    settings = load_settings(None, given)
    engine = EngineClient(engine_spec(prepare(name, settings), settings))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def running_executor(name: str, *, kv_bytes: int, sequences_max: int) -> StartedExecutor:
    """The executor alone, in this process."""
    prepared = prepared_model(name)
    return start_executor(
        prepared.directory / "openvino_model.xml",
        prepared.manifest.shape,
        ExecutorSettings(kv_memory=str(kv_bytes)),
        sequences_max=sequences_max,
        on_phase=lambda phase, message: print(f"{phase}: {message}", file=sys.stderr),
        observe=lambda _plan, _duration_ns: None,
    )


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
