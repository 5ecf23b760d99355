"""Run by test_daemon.py as a process of its own: `daemon.main` with the roles below in place of the real ones.

usage: python -m tests.daemon_script FOLDER ROLE=FUNCTION … [--set KEY=VALUE …]      as in generator-1=drains
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import anyio
import anyio.abc
import anyio.to_thread

from grpod import configure, daemon
from grpod.context import Context
from grpod.errors import ConfigError, LeaseLost, NotReady
from grpod.telemetry.log import get_logger

Status = anyio.abc.TaskStatus[None]
log = get_logger()


_arrived: list[str] = []
_all_there = anyio.Event()


async def _together(ctx: Context, name: str) -> None:
    """Returns when every role of the process has come so far: roles are imported and begun in any order."""
    _arrived.append(name)
    if len(_arrived) == len(ctx.roles):
        _all_there.set()
    await _all_there.wait()


async def drains(ctx: Context, *, index: int | None, task_status: Status) -> None:
    """A good role: ready at once, ends when it is asked to."""
    task_status.started()
    log.info("serving", index=index, roles=list(ctx.roles))
    await ctx.stop.wait()
    log.info("drained")


async def deaf(ctx: Context, *, index: int | None, task_status: Status) -> None:
    task_status.started()
    try:
        if "crashes" in ctx.config.run.name:
            await _together(ctx, "deaf")
        await anyio.sleep_forever()
    finally:
        log.info("cleaned_up")


async def stuck(ctx: Context, *, index: int | None, task_status: Status) -> None:
    """In a thread that nothing ends."""
    task_status.started()
    await anyio.to_thread.run_sync(time.sleep, 3600)


async def blocks(ctx: Context, *, index: int | None, task_status: Status) -> None:
    """The event loop itself, from the first signal on."""
    task_status.started()
    await ctx.stop.wait()
    log.info("blocking")
    time.sleep(3600)  # noqa: ASYNC251  that is the fault


async def done(ctx: Context, *, index: int | None, task_status: Status) -> None:
    """Finds nothing to do, and does not even call started()."""


async def never_ready(ctx: Context, *, index: int | None, task_status: Status) -> None:
    await anyio.sleep_forever()


async def crashes(ctx: Context, *, index: int | None, task_status: Status) -> None:
    if ctx.config.run.name:
        await _together(ctx, "crashes")
    async with anyio.create_task_group() as group:
        group.start_soon(_divide, 0)


async def _divide(by: int) -> None:
    print(1 / by)


async def config_error(ctx: Context, *, index: int | None, task_status: Status) -> None:
    if ctx.config.run.name:
        await _together(ctx, "config_error")
    raise ConfigError("data.source: no such file")


async def lease_lost(ctx: Context, *, index: int | None, task_status: Status) -> None:
    async with anyio.create_task_group() as group:  # comes out as a group of a group
        group.start_soon(_lose)


async def _lose() -> None:
    raise LeaseLost("held by pid 7 on elsewhere")


async def not_ready(ctx: Context, *, index: int | None, task_status: Status) -> None:
    raise NotReady("no version was published")


async def waits_for_learner(ctx: Context, *, index: int | None, task_status: Status) -> None:
    """Ready only after `begins`, whichever of the two is named first."""
    while not await ctx.bucket.stat(["state/learner.json"]):
        await ctx.bucket.changed(1)
    task_status.started()


async def begins(ctx: Context, *, index: int | None, task_status: Status) -> None:
    await ctx.bucket.put({"state/learner.json": b"{}"})
    task_status.started()


async def spawns(ctx: Context, *, index: int | None, task_status: Status) -> None:
    """A signal that arrives before anything else was told."""
    task_status.started()
    os.kill(os.getpid(), signal.SIGTERM)
    await ctx.stop.wait()


def main(argv: list[str]) -> int:
    daemon._LOADING_S = 0.0  # these roles load nothing
    folder = Path(argv[0])
    pairs = [text.split("=", 1) for text in argv[1:] if text.partition("=")[0].partition("-")[0] in daemon.ROLES]
    sets = [text for text in argv[1:] if text.partition("=")[0].partition("-")[0] not in daemon.ROLES]
    table = {name.partition("-")[0]: f"tests.daemon_script:{function}" for name, function in pairs}
    loaded = configure.load(None, env={}, sets=[f"run.bucket={folder}", "telemetry.log_format=json", *sets])
    return daemon.main(loaded.config, folder, [name for name, _ in pairs], table=table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
