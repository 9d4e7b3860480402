"""From settings to a running engine, once for all verbs: settings, prepared model, engine spec, engine and service.

Nothing here computes: sections come from `config`, the model from `model.source`, the engine is the child of `worker`.
"""

import asyncio
import datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from tailrace import config
from tailrace.cli.options import Flags
from tailrace.cli.output import ProgressLine
from tailrace.cost.memory import parse_kv_memory
from tailrace.engine.config import EngineConfig
from tailrace.errors import ConfigError, ModelRefused
from tailrace.executor.settings import ExecutorSettings
from tailrace.model.manifest import KL_DECODE_MAX, ModelManifest
from tailrace.model.settings import ModelSettings
from tailrace.model.source import PreparedModel, find_model, prepare_model
from tailrace.model.text import TextModel
from tailrace.worker.channel import EngineSpec, OpenVinoSpec, Progress, Ready
from tailrace.worker.engine_client import EngineClient
from tailrace.worker.service import ServedModel, Service
from tailrace.worker.settings import WorkerSettings

SECTION_TYPES: dict[str, type[msgspec.Struct]] = {
    "model": ModelSettings,
    "executor": ExecutorSettings,
    "engine": EngineConfig,
    "worker": WorkerSettings,
}
"""Sections by name; each is defined in the folder of that name."""


_PHASES = {
    "hash": "reading it",
    "wait": "another process prepares it",
    "dequantise": "dequantising",
    "build": "building",
    "compress": "compressing to int8",
    "check": "checking its logits",
}
"""Phases of `model.source.Progress` as shown."""


class Settings(NamedTuple):
    """The decoded sections, and where each value came from."""

    configuration: config.Configuration
    model: ModelSettings
    executor: ExecutorSettings
    engine: EngineConfig
    worker: WorkerSettings
    cache_dir: Path


class Composition(NamedTuple):
    """A running engine and the service in front of it. Whoever holds it closes the engine."""

    engine: EngineClient
    service: Service
    ready: Ready


def load_settings(config_path: str | None, assignments: list[str] | None, flags: Flags | None = None) -> Settings:
    """File, then `--set`, then named flags. Raises ConfigError."""
    environment = config.read_environment()
    path = Path(config_path) if config_path is not None else environment.config_path
    given = [config.parse_assignment(text) for text in assignments or []]
    configuration = config.load(SECTION_TYPES, path, [*given, *config.flag_assignments(flags or {})])
    model, executor = configuration.section(ModelSettings), configuration.section(ExecutorSettings)
    if executor.kv_memory is not None:
        parse_kv_memory(executor.kv_memory)  # before minutes of conversion
    return Settings(
        configuration=configuration,
        model=model,
        executor=executor,
        engine=configuration.section(EngineConfig),
        worker=configuration.section(WorkerSettings),
        cache_dir=environment.cache_dir if model.cache_dir is None else Path(model.cache_dir).expanduser(),
    )


def cache_dir(config_path: str | None, assignments: list[str] | None) -> Path:
    """Of the prepared models, for verbs that need nothing else of the settings."""
    return load_settings(config_path, assignments).cache_dir


def prepare(name: str, settings: Settings) -> PreparedModel:
    """Finds and, once, converts the model. Blocks; call it outside an event loop, so that Ctrl-C works.

    Raises ModelRefused, ModelSourceError or ConfigError.
    """
    progress = ProgressLine()
    try:
        return prepare_model(
            find_model(name),
            weights=settings.model.weights,
            cache_dir=settings.cache_dir,
            progress=lambda phase, ratio: progress.show(
                f"preparing {name}: {_PHASES.get(phase, phase)}", f"{ratio:.0%}"
            ),
        )
    finally:
        progress.done()


def load_text(prepared: PreparedModel, settings: Settings) -> TextModel:
    """The tokenizer, and the chat template asked for. Raises ModelSourceError or ConfigError."""
    return TextModel.load(prepared.directory, chat_template=settings.model.chat_template)


def engine_spec(prepared: PreparedModel, settings: Settings) -> EngineSpec:
    """What the engine child is made from. Raises ConfigError for a context that the model was not trained for."""
    trained, asked = prepared.manifest.shape.context_tokens_max, settings.executor.context_tokens_max
    if asked is not None and asked > trained:
        raise ConfigError(
            f"executor.context_tokens_max is {asked}, but {prepared.manifest.name} was trained for {trained} tokens",
            param="executor.context_tokens_max",
        )
    executor = OpenVinoSpec(
        model_xml=str(prepared.directory / "openvino_model.xml"),
        shape=prepared.manifest.shape,
        settings=settings.executor,
    )
    return EngineSpec(executor=executor, engine=settings.engine, end_token_ids=prepared.manifest.end_token_ids)


async def start_engine(prepared: PreparedModel, settings: Settings) -> Composition:
    """Starts the engine child, loads the tokenizer beside it and waits for both.

    Raises what the child names, StartFailed, or what `load_text` raises.
    """
    engine = EngineClient(engine_spec(prepared, settings))
    progress = ProgressLine()

    def on_progress(message: Progress) -> None:
        progress.show(f"{message.phase}: {message.message}")

    try:
        loading = asyncio.to_thread(load_text, prepared, settings)
        ready, text_model = await asyncio.gather(engine.start(on_progress), loading)
        check_kv_dtype(prepared.manifest, ready.memory.kv_dtype)
    except BaseException:
        await engine.close()
        raise
    finally:
        progress.done()
    service = Service(engine, text_model, served_model(prepared.manifest, settings.worker), settings.worker)
    return Composition(engine, service, ready)


def check_kv_dtype(manifest: ModelManifest, kv_dtype: str) -> None:
    """Raises ModelRefused when the import gate found that decoding from such a cache is wrong."""
    kl = manifest.gate.kl_decode_production.get(kv_dtype)
    if kl is not None and kl > KL_DECODE_MAX:
        raise ModelRefused(
            f"{manifest.name} decodes wrongly from a {kv_dtype} KV cache (KL {kl:.2g}, limit {KL_DECODE_MAX:g}): "
            "set executor.kv_dtype to a wider type"
        )


def served_model(manifest: ModelManifest, worker: WorkerSettings) -> ServedModel:
    """The model as callers see it."""
    created = datetime.datetime.fromisoformat(manifest.created_at)
    return ServedModel(
        names=(worker.served_model_name or manifest.name,),
        source=manifest.source,
        content_hash=manifest.content_hash,
        created=int(created.timestamp()),
        defaults=manifest.sampling_defaults,
    )
