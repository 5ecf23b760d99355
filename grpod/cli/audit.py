"""`grpod audit URL`: every group ended once, and every object is what its manifest says; from the bucket alone."""

from __future__ import annotations

import json

import click


@click.command()
@click.argument("url")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def audit(url: str, as_json: bool) -> int:
    """Prove from the bucket that every group of the run at URL ended once. Exit 1: it found a violation."""
    from grpod.cli import look
    from grpod.run import audit as source

    found = look.at(url, source.audit)
    click.echo(json.dumps(found.as_json()) if as_json else source.render(found))
    return 1 if found.violations else 0
