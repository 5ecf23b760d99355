"""`grpod audit URL`: every group ended once, and every object is what its manifest says; from the bucket alone."""

from __future__ import annotations

import json
from functools import partial

import click


@click.command()
@click.argument("url")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--deep", is_flag=True, help="Read every file again and compare its hash, not its size alone.")
def audit(url: str, as_json: bool, deep: bool) -> int:
    """Prove from the bucket that every group of the run at URL ended once. Exit 1: it found a violation."""
    import grpod.run.audit as source
    from grpod.cli import look

    found = look.at(url, partial(source.audit, deep=deep))
    click.echo(json.dumps(found.as_json()) if as_json else source.render(found))
    return 1 if found.violations else 0
