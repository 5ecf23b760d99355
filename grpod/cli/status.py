"""`grpod status URL`: how a run is doing, from its bucket alone."""

from __future__ import annotations

import json

import click


@click.command()
@click.argument("url")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def status(url: str, as_json: bool) -> int:
    """Show how the run at URL is doing. Needs no running process."""
    import grpod.run.status as source
    from grpod.cli import look

    found = look.at(url, source.status)
    click.echo(json.dumps(found.as_json()) if as_json else source.render(found))
    return 0
