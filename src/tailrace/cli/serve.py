"""`tailrace serve`: a model as an HTTP service."""

import asyncio
from typing import TYPE_CHECKING

import typer

from tailrace.cli import options

if TYPE_CHECKING:
    import socket

    from tailrace.cli.compose import Settings
    from tailrace.model.source import PreparedModel

EPILOG = """\b
Examples:
  tailrace serve smollm2
  tailrace serve model.gguf --port 9000 --api-key KEY --weights f16
  tailrace serve smollm2 --sequences-max 32 --itl-target-ms 60
  tailrace serve smollm2 --config tailrace.toml --set worker.drain_timeout_s=5"""


def serve(
    model: str = options.MODEL,
    host: str | None = typer.Option(None, "--host", help="Address to listen on.  [default: 127.0.0.1]"),
    port: int | None = typer.Option(None, "--port", "-p", help="0 takes a free one.  [default: 8000]"),
    api_key: str | None = typer.Option(None, "--api-key", help="Requests must carry it as bearer token."),
    served_model_name: str | None = typer.Option(
        None, "--served-model-name", help="Name in requests and answers (--alias).  [default: the model's]"
    ),
    chat_template: str | None = options.CHAT_TEMPLATE,
    context_tokens_max: int | None = options.CONTEXT_TOKENS_MAX,
    weights: str | None = options.WEIGHTS,
    kv_memory: str | None = options.KV_MEMORY,
    kv_dtype: str | None = options.KV_DTYPE,
    threads: int | None = options.THREADS,
    sequences_max: int | None = typer.Option(
        None,
        "--sequences-max",
        "--max-num-seqs",
        "--parallel",
        min=1,
        help="Sequences that run at once (max_batch_size).  [default: computed, see config show]",
    ),
    token_budget: int | None = typer.Option(
        None,
        "--token-budget",
        "--max-num-batched-tokens",
        "-b",
        min=1,
        help="Tokens a step may compute (n_batch, max_batch_prefill_tokens).  [default: the largest listed step size]",
    ),
    itl_target_ms: float | None = typer.Option(
        None, "--itl-target-ms", help="Gap between tokens to keep while prompts arrive.  [default: no target]"
    ),
    no_prefix_caching: bool = typer.Option(
        False, "--no-prefix-caching", "--no-enable-prefix-caching", help="Do not reuse KV blocks of earlier prompts."
    ),
    batching: str | None = typer.Option(
        None, "--batching", metavar="continuous|static", help="static admits only into an empty batch (a baseline)."
    ),
    seed: int | None = typer.Option(None, "--seed", help="Base of the seeds of requests that name none."),
    cors: list[str] | None = options.CORS,
    debug_steps: bool = typer.Option(False, "--debug-steps", help="Serve the step log at /debug/steps."),
    config: str | None = options.CONFIG,
    assignments: list[str] | None = options.SET,
) -> None:
    """Serve a model over HTTP, with OpenAI's interface. Ctrl-C drains; a second one stops at once."""
    flags = options.engine_flags(
        chat_template=chat_template,
        context_tokens_max=context_tokens_max,
        weights=weights,
        kv_memory=kv_memory,
        kv_dtype=kv_dtype,
        threads=threads,
    ) | {
        "--host": ("worker.host", host),
        "--port": ("worker.port", port),
        "--api-key": ("worker.api_key", api_key),
        "--served-model-name": ("worker.served_model_name", served_model_name),
        "--sequences-max": ("engine.sequences_max", sequences_max),
        "--token-budget": ("engine.token_budget", token_budget),
        "--itl-target-ms": ("engine.itl_target_ms", itl_target_ms),
        "--no-prefix-caching": ("engine.prefix_caching", False if no_prefix_caching else None),
        "--batching": ("engine.batching", batching),
        "--seed": ("worker.seed", seed),
        "--cors": ("worker.cors_origins", cors or None),
        "--debug-steps": ("worker.debug_steps", debug_steps or None),
    }
    from tailrace.cli import compose

    settings = compose.load_settings(config, assignments, flags)
    _run(model, settings)


def _run(model: str, settings: "Settings") -> None:
    """Binds first: a port in use is told before minutes of conversion."""
    import uvloop

    from tailrace.cli import compose
    from tailrace.worker.serve import bind

    listener = bind(settings.worker)
    try:
        prepared = compose.prepare(model, settings)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(prepared, settings, listener))
    finally:
        listener.close()


async def _serve(prepared: "PreparedModel", settings: "Settings", listener: "socket.socket") -> None:
    from tailrace.cli import compose
    from tailrace.cli.output import note
    from tailrace.cli.start_text import start_text
    from tailrace.worker.app import create_app
    from tailrace.worker.serve import Phase, run_server

    composition = await compose.start_engine(prepared, settings)
    service, engine = composition.service, composition.engine
    engine.on_end(lambda cause: note(f"the engine ended: {cause}; {engine.restarts_total} restarts so far"))

    def on_phase(phase: Phase, address: str) -> None:
        match phase:
            case Phase.LISTENING:
                needs_key = settings.worker.api_key is not None
                name = service.model.names[0]
                note(start_text(prepared.manifest, composition.ready, address, name, needs_key=needs_key))
            case Phase.DRAINING:
                note(f"draining: {service.num_open} requests run; a second signal stops at once")
            case Phase.STOPPING:
                note("stopped")

    try:
        await run_server(create_app(service, settings.worker), service, listener, on_phase=on_phase)
    finally:
        await composition.engine.close()
