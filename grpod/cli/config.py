"""`grpod config`: checks a config without starting anything, or prints its JSON Schema."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click


@click.command()
@click.option("--check", "path", metavar="FILE", help="Check FILE with the GRPOD_* variables and --set over it.")
@click.option("--schema", is_flag=True, help="Print the JSON Schema of the file, for editors.")
@click.option("--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Overrides a key. May be repeated.")
@click.option("--role", "roles", multiple=True, metavar="ROLE", help="Check for these only; default: learner and generator.")
def config(path: str | None, schema: bool, sets: tuple[str, ...], roles: tuple[str, ...]) -> int:
    """Check a config file, or print its schema. Writes nothing."""
    if schema == (path is not None):
        raise click.UsageError("one of --check FILE and --schema")
    from grpod import configure

    if path is None:
        click.echo(json.dumps(configure.schema(), indent=2))
        return 0
    from grpod.bucket.open import run_folder
    from grpod.cli.start import parse_roles

    loaded = configure.load(Path(path), env=os.environ, sets=sets)
    found = loaded.config
    trains = found.model.base or found.data or found.rewards or not found.proxy.replicas
    names = parse_roles(roles) if roles else ("learner", "generator") if trains else ("proxy",)
    configure.check_roles(found, names, path=loaded.path)
    rows = {
        "roles": ", ".join(names),
        "bucket": "",
        "model": found.model.base,
        "data": found.data.source if found.data else "",
        "rewards": ", ".join(reward.function for reward in found.rewards),
        "engine": found.generator.engine,
        "folder": str(loaded.folder),
    }
    if found.run.bucket:
        run = run_folder(found.run.bucket)
        rows["bucket"] = found.run.bucket if run.absolute else f"file://{loaded.folder / run.path}"
    click.echo(f"ok: {path} (keys and values; whether data, rewards and base are there shows at the start)")
    for name, value in rows.items():
        click.echo(f"  {name:8} {value or '-'}")
    return 0
