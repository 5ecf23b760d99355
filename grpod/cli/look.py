"""A run seen from the command line: its bucket is opened, looked at, closed; it is never created."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import anyio

from grpod.bucket.base import Bucket
from grpod.bucket.open import open_bucket, run_folder
from grpod.errors import ConfigError, NotFound, NotReady
from grpod.telemetry import log as logs
from grpod.wire import keys
from grpod.wire.run import Run

T = TypeVar("T")
log = logs.get_logger()


def at(url: str, work: Callable[[Bucket], Awaitable[T]]) -> T:
    """Runs `work` on the bucket of the run at `url`. Raises `ConfigError` when there is no run."""
    logs.configure(level="warning")
    return anyio.run(partial(_at, url, work))


async def _at(url: str, work: Callable[[Bucket], Awaitable[T]]) -> T:
    bucket = open_bucket(url, create=False)
    try:
        if not await bucket.stat([keys.RUN]):
            raise ConfigError(f"no run at {bucket.url}: there is no {keys.RUN}")
        return await work(bucket)
    finally:
        await bucket.close()


async def run_json(url: str, wait_s: float) -> Run | None:
    """What was agreed on. None: `wait_s` is 0, and there is no run yet. Raises `NotReady` after `wait_s`."""
    run_folder(url)  # a URL that cannot be is not waited for
    with anyio.move_on_after(wait_s or None):
        while True:
            run = await _run_json(url)
            if run is not None or not wait_s:
                return run
            log.info("waiting_for_run", bucket=url, most_s=wait_s)
            await anyio.sleep(min(2.0, wait_s))
    raise NotReady(f"no run at {url} after {wait_s:g} s: a run is begun by `grpod --role learner --config FILE`")


async def _run_json(url: str) -> Run | None:
    try:
        bucket = open_bucket(url, create=False)
    except ConfigError:  # not made yet
        return None
    try:
        found = await bucket.get(keys.RUN)
    except NotFound:
        return None
    finally:
        await bucket.close()
    assert found is not None
    return Run.decode(found.data, f"{url}/{keys.RUN}")
