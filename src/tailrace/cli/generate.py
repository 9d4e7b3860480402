"""`tailrace generate`: one answer on standard output, without a server."""

import asyncio
import sys
from typing import TYPE_CHECKING

import typer

from tailrace.cli import options

if TYPE_CHECKING:
    from tailrace.cli.backend import AskOptions, Turn
    from tailrace.cli.compose import Settings
    from tailrace.model.source import PreparedModel

EPILOG = """\b
Examples:
  tailrace generate smollm2 -p 'Name three rivers.' --stats
  tailrace generate smollm2 -p 'Once upon a time' --raw --max-tokens 40
  tailrace generate smollm2 -p 'Name three rivers.' --temperature 0 --json
  echo 'Name three rivers.' | tailrace generate smollm2 -p -"""

RAW_MAX_TOKENS = 256
"""With `--raw` when none is asked for: OpenAI's default for completions is 16, which surprises at a terminal."""
PROMPT_CHARS_MAX = 4 * 1024 * 1024
"""Read from standard input at most; far above any context."""


def generate(
    model: str = options.MODEL,
    prompt: str = typer.Option(..., "-p", "--prompt", metavar="TEXT", help="The prompt; - reads standard input."),
    raw: bool = typer.Option(
        False, "--raw/--chat", help="Continue the text as it is, or answer it through the chat template."
    ),
    system: str | None = typer.Option(None, "--system", help="With --chat: the system message."),
    max_tokens: int | None = options.MAX_TOKENS,
    temperature: float | None = options.TEMPERATURE,
    seed: int | None = options.SEED,
    stats: bool = typer.Option(False, "--stats", help="Tokens, TTFT, tokens/s and stop reason on standard error."),
    as_json: bool = options.JSON,
    chat_template: str | None = options.CHAT_TEMPLATE,
    context_tokens_max: int | None = options.CONTEXT_TOKENS_MAX,
    weights: str | None = options.WEIGHTS,
    kv_memory: str | None = options.KV_MEMORY,
    kv_dtype: str | None = options.KV_DTYPE,
    threads: int | None = options.THREADS,
    config: str | None = options.CONFIG,
    assignments: list[str] | None = options.SET,
) -> None:
    """Answer one prompt and leave.

    The text streams to standard output, everything else goes to standard error.
    """
    from tailrace.cli import compose
    from tailrace.cli.backend import AskOptions, statistics_line
    from tailrace.cli.output import note, print_json

    flags = options.engine_flags(
        chat_template=chat_template,
        context_tokens_max=context_tokens_max,
        weights=weights,
        kv_memory=kv_memory,
        kv_dtype=kv_dtype,
        threads=threads,
    )
    settings = compose.load_settings(config, assignments, flags)
    text = read_prompt(prompt)
    if raw and max_tokens is None:
        max_tokens = RAW_MAX_TOKENS
    ask = AskOptions(max_tokens=max_tokens, temperature=temperature, seed=seed)
    prepared = compose.prepare(model, settings)
    turn = asyncio.run(_generate(prepared, settings, text, ask, raw=raw, system=system, quiet=as_json))
    if as_json:
        print_json(turn_object(prepared.manifest.name, turn))
    else:
        print()
    if stats:
        note(statistics_line(turn))


def read_prompt(prompt: str) -> str:
    """The prompt, or for `-` standard input. Raises ConfigError, before a model is loaded, when it is not UTF-8."""
    from tailrace.config import is_utf8
    from tailrace.errors import ConfigError

    try:
        text = sys.stdin.read(PROMPT_CHARS_MAX) if prompt == "-" else prompt
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8 text (byte {error.start})") from error
    if not is_utf8(text):
        # What Python makes of other bytes in an argument, and in standard input with the C locale.
        raise ConfigError("the prompt is not UTF-8 text")
    return text


async def _generate(
    prepared: "PreparedModel",
    settings: "Settings",
    text: str,
    ask: "AskOptions",
    *,
    raw: bool,
    system: str | None,
    quiet: bool,
) -> "Turn":
    from tailrace.cli.compose import start_engine
    from tailrace.cli.local import LocalBackend
    from tailrace.request import Message

    def show(piece: str) -> None:
        from tailrace.cli.output import printable

        if not quiet:
            print(printable(piece), end="", flush=True)

    backend = await LocalBackend.of(await start_engine(prepared, settings))
    try:
        if raw:
            return await backend.complete(text, ask, show)
        messages = [Message(role="user", content=text)]
        if system:
            messages.insert(0, Message(role="system", content=system))
        return await backend.ask(messages, ask, show)
    finally:
        await backend.close()


def turn_object(model: str, turn: "Turn") -> dict[str, object]:
    """A turn for `--json`; times in milliseconds."""
    return {
        "model": model,
        "text": turn.text,
        "finish_reason": turn.finish_reason,
        "num_prompt_tokens": turn.num_prompt_tokens,
        "num_cached_tokens": turn.num_cached_tokens,
        "num_output_tokens": turn.num_output_tokens,
        "ttft_ms": None if turn.ttft_ns is None else turn.ttft_ns / 1e6,
        "duration_ms": turn.duration_ns / 1e6,
        "tokens_per_s": turn.tokens_per_s,
    }
