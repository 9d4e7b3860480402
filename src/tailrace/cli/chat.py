"""`tailrace chat`: a conversation at the terminal, or with lines from a pipe, with a model or an address."""

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from tailrace.cli import options
from tailrace.errors import TailraceError

if TYPE_CHECKING:
    from tailrace.cli.backend import AskOptions, Backend, Turn
    from tailrace.cli.compose import Settings
    from tailrace.model.source import PreparedModel
    from tailrace.request import Message

EPILOG = """\b
Examples:
  tailrace chat smollm2
  tailrace chat http://127.0.0.1:8000
  printf 'Name three rivers.\\n/stats\\n' | tailrace chat smollm2
\b
In the conversation:
  /stats   tokens and latency of the last turn, tokens left of the context by message
  /reset   forget the conversation
  /help    this list
  /exit    leave (so does the end of input)
  Ctrl-C   stop the answer that is being written; at the prompt, leave"""

HELP = EPILOG.rpartition("\b\n")[2].partition("\n")[2]


def chat(
    target: str = typer.Argument(
        metavar="MODEL|URL", help="A model as for `tailrace serve`, or an OpenAI-compatible address (http://host:port)."
    ),
    system: str | None = typer.Option(None, "--system", help="The system message."),
    model: str | None = typer.Option(None, "--model", help="With URL: the model's name there.  [default: the first]"),
    api_key: str | None = typer.Option(None, "--api-key", help="With URL: the key sent as bearer token."),
    max_tokens: int | None = options.MAX_TOKENS,
    temperature: float | None = options.TEMPERATURE,
    seed: int | None = options.SEED,
    chat_template: str | None = options.CHAT_TEMPLATE,
    context_tokens_max: int | None = options.CONTEXT_TOKENS_MAX,
    weights: str | None = options.WEIGHTS,
    kv_memory: str | None = options.KV_MEMORY,
    kv_dtype: str | None = options.KV_DTYPE,
    threads: int | None = options.THREADS,
    config: str | None = options.CONFIG,
    assignments: list[str] | None = options.SET,
) -> None:
    """Talk with a model or an OpenAI-compatible address."""
    from tailrace.cli import compose
    from tailrace.cli.backend import AskOptions

    ask_options = AskOptions(max_tokens=max_tokens, temperature=temperature, seed=seed)
    flags = options.engine_flags(
        chat_template=chat_template,
        context_tokens_max=context_tokens_max,
        weights=weights,
        kv_memory=kv_memory,
        kv_dtype=kv_dtype,
        threads=threads,
    )
    is_url = target.startswith(("http://", "https://"))
    local = {**flags, "--config": ("", config), "--set": ("", assignments or None)}
    remote = {"--model": ("", model), "--api-key": ("", api_key)}
    _refuse_unused(local if is_url else remote, "a model run here" if is_url else "an address")
    with asyncio.Runner() as runner:
        if is_url:
            from tailrace.cli.remote import RemoteBackend

            backend: Backend = runner.run(RemoteBackend.connect(target, model=model, api_key=api_key))
        else:
            settings = compose.load_settings(config, assignments, flags)
            backend = runner.run(_start(compose.prepare(target, settings), settings))
        try:
            Conversation(runner, backend, ask_options, system).run(_lines())
        finally:
            runner.run(backend.close())


def _refuse_unused(flags: "options.Flags", meant_for: str) -> None:
    """A flag that would do nothing is a mistake of the caller's. Raises ConfigError."""
    from tailrace.errors import ConfigError

    given = [flag for flag, (_, value) in flags.items() if value is not None]
    if given:
        raise ConfigError(f"{', '.join(given)}: for {meant_for} only; leave it out")


async def _start(prepared: "PreparedModel", settings: "Settings") -> "Backend":
    from tailrace.cli.compose import start_engine
    from tailrace.cli.local import LocalBackend

    return await LocalBackend.of(await start_engine(prepared, settings))


def _lines() -> Iterator[str]:
    """Lines of standard input; at a terminal with a prompt and line editing."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # importing it gives `input` its editing keys
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return


class Conversation:
    """The messages so far and the last turn. `run` reads lines until `/exit` or their end."""

    def __init__(
        self, runner: asyncio.Runner, backend: "Backend", ask_options: "AskOptions", system: str | None
    ) -> None:
        from tailrace.request import Message

        self._runner = runner
        self._backend = backend
        self._options = ask_options
        self._first: list[Message] = [Message(role="system", content=system)] if system else []
        self.messages: list[Message] = list(self._first)
        self.last_turn: Turn | None = None

    def run(self, lines: Iterator[str]) -> None:
        for line in lines:
            text = line.strip()
            if text == "/exit":
                return
            if text.startswith("/"):
                self._command(text)
            elif text:
                self._ask(text)

    def _command(self, text: str) -> None:
        match text:
            case "/stats":
                print(self._runner.run(self._statistics()))
            case "/reset":
                self.messages, self.last_turn = list(self._first), None
                print("The conversation is forgotten.")
            case "/help":
                print(HELP)
            case _:
                print(f"There is no {text}.\n{HELP}")

    def _ask(self, text: str) -> None:
        from tailrace.request import Message

        asked = [*self.messages, Message(role="user", content=text)]
        try:
            turn = self._runner.run(self._backend.ask(asked, self._options, _show))
        except KeyboardInterrupt:
            print("\n(stopped; this turn is forgotten)")
            return
        except TailraceError as error:
            if not sys.stdin.isatty():
                raise
            print(f"\ntailrace: {error.message}", file=sys.stderr)
            return
        print(flush=True)
        self.messages = [*asked, Message(role="assistant", content=turn.text)]
        self.last_turn = turn

    async def _statistics(self) -> str:
        from tailrace.cli.backend import statistics_line

        lines = [f"model {self._backend.name}"]
        if self.last_turn is not None:
            lines.append(f"last turn: {statistics_line(self.last_turn)}")
        counts = await self._backend.count(self.messages) if self.messages else []
        if counts is None:
            lines.append("the other side does not count the tokens of a conversation")
        else:
            lines.append(context_table(self.messages, counts, self._backend.context_tokens_max))
        return "\n".join(lines)


def context_table(messages: "list[Message]", counts: list[int], context_tokens_max: int | None) -> str:
    """A line a message: its tokens, and what is left of the context after it."""
    from tailrace.cli.output import table

    total = 0
    rows = []
    for message, count in zip(messages, counts, strict=True):
        total += count
        left = "?" if context_tokens_max is None else str(context_tokens_max - total)
        beginning = " ".join(message.content.split())[:40]
        rows.append([message.role, str(count), left, beginning])
    limit = "unknown" if context_tokens_max is None else f"{context_tokens_max} tokens"
    body = table(["message", "tokens", "left", ""], rows, right=frozenset({1, 2})) if rows else "no messages yet"
    return f"context {limit}, used {total}\n{body}"


def _show(text: str) -> None:
    from tailrace.cli.output import printable

    print(printable(text), end="", flush=True)
