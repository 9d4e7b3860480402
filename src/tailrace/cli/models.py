"""`tailrace models`: what the cache of prepared models holds."""

import typer

from tailrace.cli import options

EPILOG = "\b\nExamples:\n  tailrace models\n  tailrace models --json\n  tailrace models rm 3f2a9c"
RM_EPILOG = "\b\nExamples:\n  tailrace models rm 3f2a9c\n  tailrace models rm smollm2"

app = typer.Typer(
    help="List the prepared models in the cache; `rm` deletes one.",
    invoke_without_command=True,
    epilog=EPILOG,
    rich_markup_mode=None,
)


@app.callback()
def models(
    context: typer.Context,
    as_json: bool = options.JSON,
    config: str | None = options.CONFIG,
    assignments: list[str] | None = options.SET,
) -> None:
    """List the prepared models in the cache; `rm` deletes one."""
    from tailrace.cli import compose
    from tailrace.cli.output import print_json, table
    from tailrace.cost.memory import format_bytes
    from tailrace.model.cache import list_models

    if context.invoked_subcommand is not None:
        return
    cache_dir = compose.cache_dir(config, assignments)
    found = list_models(cache_dir)
    if as_json:
        rows = [{"directory": str(m.directory), "num_bytes": m.num_bytes, "manifest": m.manifest} for m in found]
        print_json({"cache_dir": str(cache_dir), "models": rows})
        return
    if found:
        cells = [
            [m.manifest.name, m.manifest.content_hash[:12], m.manifest.weights_format, format_bytes(m.num_bytes),
             f"{m.manifest.shape.num_parameters / 1e6:,.0f}M", m.manifest.created_at, m.manifest.source]
            for m in found
        ]  # fmt: skip
        header = ["name", "hash", "weights", "size", "parameters", "prepared at", "from"]
        print(table(header, cells, right=frozenset({3, 4})))
    print(f"{format_bytes(sum(m.num_bytes for m in found))} in {cache_dir}")


@app.command("rm", epilog=RM_EPILOG)
def remove(
    key: str = typer.Argument(metavar="HASH|NAME", help="The beginning of one content hash, or a name."),
    config: str | None = options.CONFIG,
    assignments: list[str] | None = options.SET,
) -> None:
    """Delete one prepared model from the cache.

    It is prepared again when it is asked for.
    """
    from tailrace.cli import compose
    from tailrace.cost.memory import format_bytes
    from tailrace.model.cache import remove_model

    removed = remove_model(compose.cache_dir(config, assignments), key)
    print(f"removed {removed.manifest.name} {removed.manifest.content_hash[:12]}, {format_bytes(removed.num_bytes)}")
