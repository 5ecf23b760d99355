"""`grpod stop URL`: asks every role of a run to drain and exit. They see it in the bucket; started again, they resume."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from grpod.bucket.base import Bucket


@click.command()
@click.argument("url")
@click.option("--reason", default="", help="Kept with the request.")
def stop(url: str, reason: str) -> int:
    """Ask every role of the run at URL to finish and exit 0."""
    from grpod.cli import look

    click.echo(look.at(url, lambda bucket: request(bucket, reason)))
    return 0


async def request(bucket: Bucket, reason: str) -> str:
    """Returns what was done, in words."""
    from grpod.wire import keys
    from grpod.wire.run import Stop

    ended = await bucket.stat([keys.FINAL_MANIFEST])
    key = keys.stop(secrets.token_hex(8))
    await bucket.put({key: Stop(reason=reason, created_at=time.time()).encode()}, create=True)
    if ended:
        return f"{bucket.url} has ended already; a proxy that still serves it is asked to stop"
    return f"asked to stop: wrote {key} to {bucket.url}; its roles end when they next look, in seconds"
