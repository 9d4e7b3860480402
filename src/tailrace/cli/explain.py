"""What settings left out become, and why: the rows of `config show` that are not as written.

The decisions are those of the folders that own the settings; nothing is decided here.
"""

from tailrace.cli.compose import Settings
from tailrace.config import Resolved
from tailrace.cost.hardware import HardwareFacts
from tailrace.cost.memory import KvMemory, format_bytes
from tailrace.engine.config import SEQUENCES_MAX_DEFAULT, EngineConfig
from tailrace.executor.settings import ExecutorSettings, resolve_settings, step_tokens_max
from tailrace.model.manifest import ModelManifest
from tailrace.model.source import INT8_BELOW_PARAMETERS

Rows = dict[str, Resolved]


def resolved(settings: Settings, facts: HardwareFacts, manifest: ModelManifest | None) -> Rows:
    """By `section.key`. Without a manifest, what depends on the model stays open.

    Raises ConfigError or ModelRefused where a setting contradicts the machine.
    """
    rows = _machine(settings.executor, facts, manifest) | _engine(settings.engine)
    if manifest is not None and settings.engine.token_budget is None:
        rows["engine.token_budget"] = _token_budget(settings.engine, facts)
    if settings.model.cache_dir is None:
        rows["model.cache_dir"] = Resolved(str(settings.cache_dir), "below XDG_CACHE_HOME, else ~/.cache")
    if manifest is not None:
        rows |= _model(settings, manifest)
    return rows


def _model(settings: Settings, manifest: ModelManifest) -> Rows:
    trained = manifest.shape.context_tokens_max
    rows = {}
    if settings.executor.context_tokens_max is None:
        rows["executor.context_tokens_max"] = Resolved(
            trained, "what the model was trained for; less in a small KV pool"
        )
    if settings.model.weights is None:
        rows["model.weights"] = Resolved(manifest.weights_format, _weights_reason(manifest))
    if settings.model.chat_template is None:
        rows["model.chat_template"] = Resolved(None, "the model's own")
    if settings.worker.served_model_name is None:
        rows["worker.served_model_name"] = Resolved(manifest.name, "the model's own")
    return rows


def _weights_reason(manifest: ModelManifest) -> str:
    if manifest.weights_format == "as_is":
        return "an OpenVINO model is used as it is"
    side = "below" if manifest.shape.num_parameters < INT8_BELOW_PARAMETERS else "not below"
    cost = manifest.gate.kl_weights_against_source
    measured = "" if cost is None else f"; KL {cost:.2g} against the source"
    return (
        f"{manifest.shape.num_parameters / 1e6:,.0f}M parameters, {side} {INT8_BELOW_PARAMETERS / 1e6:,.0f}M{measured}"
    )


def _machine(executor: ExecutorSettings, facts: HardwareFacts, manifest: ModelManifest | None) -> Rows:
    decided = resolve_settings(
        executor,
        facts,
        shape=None if manifest is None else manifest.shape,
        weights_bytes=0 if manifest is None else manifest.weights_bytes,
        context_tokens_max=executor.context_tokens_max,
    )
    return {
        "executor.kv_memory": Resolved(_pool(decided.kv_memory.value), decided.kv_memory.reason),
        "executor.kv_dtype": Resolved(decided.kv_dtype.value, decided.kv_dtype.reason),
        "executor.threads": Resolved(decided.threads.value, decided.threads.reason),
    }


def _token_budget(engine: EngineConfig, facts: HardwareFacts) -> Resolved:
    value = step_tokens_max(facts, None, engine.sequences_max or SEQUENCES_MAX_DEFAULT)
    speed = "with" if facts.has_bf16 else "without"
    return Resolved(value, f"a step of bearable length {speed} bf16 instructions, at least one token a sequence")


def _pool(wish: KvMemory | None) -> str | None:
    if wish is None:
        return None
    return format_bytes(wish.num_bytes) if wish.num_bytes is not None else f"{wish.ratio:g}"


def _engine(engine: EngineConfig) -> Rows:
    rows = {}
    if engine.sequences_max is None:
        reason = "past it throughput stops growing, ITL does not; fewer if the KV pool has fewer blocks"
        rows["engine.sequences_max"] = Resolved(SEQUENCES_MAX_DEFAULT, reason)
    if engine.token_budget is None:
        rows["engine.token_budget"] = Resolved(None, "the largest step size that start-up warms")
    if engine.itl_target_ms is None:
        rows["engine.itl_target_ms"] = Resolved(None, "no time budget: prefill slices as large as the token budget")
    return rows
