"""`tailrace config`: every setting with its value, where it came from, and why."""

import typer

from tailrace.cli import options

EPILOG = """\b
Examples:
  tailrace config show
  tailrace config show smollm2
  tailrace config show smollm2 --set executor.kv_memory=0.5 --json"""

app = typer.Typer(help="Show the configuration.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def config_group() -> None:
    """Show the configuration."""


@app.command("show", epilog=EPILOG)
def show(
    model: str | None = typer.Argument(None, metavar="[MODEL]", help="With it, what is computed from it is shown too."),
    as_json: bool = options.JSON,
    config: str | None = options.CONFIG,
    assignments: list[str] | None = options.SET,
) -> None:
    """Print every setting: value, origin, reason.

    The origin is `default`, `computed`, the file, or the flag.
    """
    from tailrace import config as mechanism
    from tailrace.cli import compose, explain
    from tailrace.cli.output import print_json, table
    from tailrace.executor.machine import read_hardware

    settings = compose.load_settings(config, assignments)
    manifest = None if model is None else compose.prepare(model, settings).manifest
    found = explain.resolved(settings, read_hardware(), manifest)
    rows = mechanism.rows(settings.configuration, found)
    if as_json:
        print_json({"settings": rows})
        return
    cells = [[f"{row.section}.{row.key}", _shown(row.value), row.origin, row.reason or ""] for row in rows]
    print(table(["setting", "value", "origin", "reason"], cells))


def _shown(value: object) -> str:
    import msgspec

    if value is None:
        return "-"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
