"""Options that several verbs share, and what each is an alias of. Help names the other engines' words."""

from collections.abc import Mapping
from typing import Any

import typer

Flags = Mapping[str, tuple[str, Any]]
"""Flag -> (`section.key` it is an alias of, value or None when not given)."""

MODEL: Any = typer.Argument(
    metavar="MODEL", help="A packaged name (smollm2), a GGUF file, or a directory with an OpenVINO model."
)
CONFIG: Any = typer.Option(
    None, "--config", metavar="FILE", help="TOML file with sections.  [default: $TAILRACE_CONFIG, else none]"
)
SET: Any = typer.Option(
    None, "--set", metavar="SECTION.KEY=VALUE", help="Any value of the configuration; repeat it. Wins over the file."
)
CORS: Any = typer.Option(
    None, "--cors", metavar="ORIGIN", help="Origin a browser may call from; repeat it, * allows all."
)
JSON: Any = typer.Option(False, "--json", help="Print JSON.")

MAX_TOKENS: Any = typer.Option(
    None, "--max-tokens", "-n", min=1, help="New tokens at most.  [default: what is left of the context]"
)
TEMPERATURE: Any = typer.Option(
    None, "--temperature", min=0.0, max=2.0, help="0 always takes the most probable token.  [default: the model's]"
)
SEED: Any = typer.Option(None, "--seed", help="Same seed, same draws.")

CHAT_TEMPLATE: Any = typer.Option(
    None, "--chat-template", metavar="FILE", help="Jinja chat template to use instead of the model's."
)
CONTEXT_TOKENS_MAX: Any = typer.Option(
    None,
    "--context-tokens-max",
    "--max-model-len",
    "-c",
    min=1,
    help="Tokens a sequence may reach, prompt and answer (n_ctx).  [default: what model and KV pool allow]",
)
WEIGHTS: Any = typer.Option(None, "--weights", metavar="f16|int8", help="Kept as f16, or compressed once to int8.")
KV_MEMORY: Any = typer.Option(
    None,
    "--kv-memory",
    metavar="BYTES|RATIO",
    help="KV pool: 2GiB, or a ratio such as 0.5 of what is left after weights (compare gpu_memory_utilization).",
)
KV_DTYPE: Any = typer.Option(
    None, "--kv-dtype", metavar="bf16|f16|u8|u4", help="Type of the KV cache (--kv-cache-dtype, --cache-type-k)."
)
THREADS: Any = typer.Option(
    None, "--threads", "-t", min=1, help="Threads of the kernels.  [default: from cpu.max and affinity]"
)


def engine_flags(
    *,
    chat_template: str | None = None,
    context_tokens_max: int | None = None,
    weights: str | None = None,
    kv_memory: str | None = None,
    kv_dtype: str | None = None,
    threads: int | None = None,
) -> dict[str, tuple[str, Any]]:
    """The flags of every verb that runs an engine."""
    return {
        "--chat-template": ("model.chat_template", chat_template),
        "--context-tokens-max": ("executor.context_tokens_max", context_tokens_max),
        "--weights": ("model.weights", weights),
        "--kv-memory": ("executor.kv_memory", kv_memory),
        "--kv-dtype": ("executor.kv_dtype", kv_dtype),
        "--threads": ("executor.threads", threads),
    }
