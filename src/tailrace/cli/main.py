"""The command `tailrace`: which verbs there are, and how an error becomes one line and an exit code.

Verb modules import only typer at the top; what a verb needs is imported when it runs, so that `--help` is quick.
"""

import sys
import traceback

import typer

from tailrace.cli import bench, chat, coldstart, compare, generate, models, report, saturate, serve, tokenize, version
from tailrace.cli import config as config_verb
from tailrace.errors import TailraceError

EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""
EXIT_BROKEN_PIPE = 141
"""128 + SIGPIPE."""

_DEBUG_FLAG = "--debug"

app = typer.Typer(
    name="tailrace",
    help="An LLM inference service whose numbers can be defended.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    epilog="\b\nExamples:\n  tailrace serve smollm2\n  tailrace generate smollm2 -p 'Name three rivers.'\n"
    "  tailrace chat http://127.0.0.1:8000",
)


@app.callback()
def options(
    debug: bool = typer.Option(False, _DEBUG_FLAG, help="Show the traceback of an error instead of one line."),
) -> None:
    """An LLM inference service whose numbers can be defended."""
    del debug  # read by `main`, which must know it also when the options cannot be parsed


app.command("serve", epilog=serve.EPILOG)(serve.serve)
app.command("generate", epilog=generate.EPILOG)(generate.generate)
app.command("bench", epilog=bench.EPILOG)(bench.bench)
app.command("saturate", epilog=saturate.EPILOG)(saturate.saturate)
app.command("report", epilog=report.EPILOG)(report.report)
app.command("compare", epilog=compare.EPILOG)(compare.compare)
app.command("chat", epilog=chat.EPILOG)(chat.chat)
app.command("tokenize", epilog=tokenize.EPILOG)(tokenize.tokenize)
app.add_typer(models.app, name="models")
app.add_typer(config_verb.app, name="config")
app.command("coldstart", epilog=coldstart.EPILOG)(coldstart.coldstart)
app.command("version", epilog=version.EPILOG)(version.version)


def run(arguments: list[str]) -> int:
    """Runs one command line and returns its exit code; operating errors become one line on standard error."""
    debug = arguments[:1] == [_DEBUG_FLAG]
    try:
        app(arguments, prog_name="tailrace")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_BROKEN_PIPE
    except TailraceError as error:
        return _report(error.message, error.row.exit_code, debug)
    except Exception as error:
        hint = "" if debug else "; `tailrace --debug ...` shows where"
        return _report(f"internal error: {type(error).__name__}: {error}{hint}", 1, debug)
    return 0


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def _report(message: str, exit_code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"tailrace: {' '.join(message.split())}", file=sys.stderr)
    return exit_code
