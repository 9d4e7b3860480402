"""What a service says when it starts: weights, memory plan, limits, address. Pure: values in, text out."""

from tailrace.cost.memory import MemoryPlan, fits_by_length, format_bytes
from tailrace.model.manifest import ModelManifest
from tailrace.worker.channel import Ready


def weights_line(manifest: ModelManifest) -> str:
    """Which format the weights have, and what it cost."""
    shown = {"as_is": "as in the source"}.get(manifest.weights_format, manifest.weights_format)
    cost = manifest.gate.kl_weights_against_source
    against = "" if cost is None else f", KL {cost:.2g} against the source"
    return (
        f"model    {manifest.name} ({manifest.shape.num_parameters / 1e6:,.0f}M parameters), weights {shown}{against}, "
        f"hash {manifest.content_hash[:12]}"
    )


def memory_lines(plan: MemoryPlan, context_tokens_max: int, kl_decode: float | None = None) -> list[str]:
    """Where the bytes go, how many sequences that holds, and what the KV type costs in KL."""
    cost = "" if kl_decode is None else f" (KL {kl_decode:.2g} against f32)"
    fits = ", ".join(f"{num:,} of {tokens:,}" for tokens, num in fits_by_length(plan, context_tokens_max))
    return [
        f"memory   weights and kernels {format_bytes(plan.weights_bytes)} resident, "
        f"KV pool {format_bytes(plan.kv_pool_bytes)}, scratch {format_bytes(plan.scratch_bytes)}, "
        f"of {format_bytes(plan.available_bytes)} available",
        f"KV pool  {plan.num_blocks:,} blocks, {plan.kv_tokens:,} tokens, {plan.kv_dtype}{cost}, "
        f"{format_bytes(plan.kv_bytes_per_token)} a token",
        f"fits     {fits} tokens (sequences, nothing shared)",
    ]


def kl_of(manifest: ModelManifest, ready: Ready) -> float | None:
    """What the import gate measured for the KV type in use; None for one it did not try."""
    return manifest.gate.kl_decode_production.get(ready.memory.kv_dtype)


def limits_line(ready: Ready) -> str:
    target = "none" if ready.itl_target_ms is None else f"{ready.itl_target_ms:g} ms"
    return (
        f"engine   context {ready.context_tokens_max:,} tokens, {ready.sequences_max} sequences at once, "
        f"{ready.token_budget} tokens a step, ITL target {target}, {ready.num_threads} threads"
    )


def address_lines(address: str, model_name: str, *, needs_key: bool) -> list[str]:
    """The address, and a command that tries it."""
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    name = model_name.replace("'", "'\\''")
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Name three rivers."}}]}}'
    return [
        f"ready    {address}/v1",
        f"try      curl {address}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'",
    ]


def start_text(manifest: ModelManifest, ready: Ready, address: str, model_name: str, *, needs_key: bool) -> str:
    return "\n".join(
        [
            weights_line(manifest),
            *memory_lines(ready.memory, ready.context_tokens_max, kl_of(manifest, ready)),
            limits_line(ready),
            *address_lines(address, model_name, needs_key=needs_key),
        ]
    )
