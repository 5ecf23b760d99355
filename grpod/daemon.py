"""One process of a run: its roles on one event loop, until they are done, are asked to stop, or one of them fails.

    anyio.run ─ root task group
      ├─ signals       1st SIGINT/SIGTERM: request stop     2nd: exit at once
      ├─ watch_stop    a new control/stop-*: request stop
      ├─ grace         after the request: cancel what is still running when the grace period is nearly over
      ├─ readiness     every role has called started(): "ready"     never: NotReady
      └─ roles ─┬─ learner      imported here by name only: grpod.learner.loop:run
                ├─ generator-0
                └─ proxy        ends when the other roles have ended; alone it serves until it is asked to stop

A role that fails cancels the others. Its error leaves through the root task group, is logged once, and is the exit code.
"""

from __future__ import annotations

import importlib
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
import anyio.abc
import anyio.to_thread
import structlog

from grpod.bucket.base import LOCAL, Bucket
from grpod.bucket.open import open_bucket
from grpod.config import Config
from grpod.context import Context, Stopping, Takeover
from grpod.ending import HardEnd, at_once, blame, cancel_after_s, report
from grpod.errors import BucketError, GrpodError, NotReady
from grpod.imports import IMPORTING
from grpod.telemetry import log as logs
from grpod.wire import keys
from grpod.wire.state import LearnerState

__all__ = ["ROLES", "Context", "Stopping", "Takeover", "main"]

ROLES: Mapping[str, str] = {
    "learner": "grpod.learner.loop:run",
    "generator": "grpod.generator.loop:run",
    "proxy": "grpod.proxy.loop:run",
}
Run = Callable[..., Awaitable[None]]
ROLES_ENDED = "the roles have ended"
_LOADING_S = 10.0  # of what a role needs before it waits for anything
NO_BUCKET = "memory://no-bucket"  # what a proxy gets that was given none

log = logs.get_logger()


def main(
    config: Config,
    folder: Path,
    roles: Sequence[str],
    *,
    takeover: Takeover = "wait",
    table: Mapping[str, str] = ROLES,
) -> int:
    """Runs `roles` ("learner", "generator-0", …) to their end. Returns the exit code; must be called in the main thread."""
    logs.configure(fmt=config.telemetry.log_format, level=config.telemetry.log_level)
    hard_end = HardEnd()
    try:
        anyio.run(partial(_root, config, folder, tuple(roles), takeover, table, hard_end))
    except (Exception, BaseExceptionGroup) as error:
        return report(error)
    finally:
        hard_end.disarm()
    return 0


@dataclass(kw_only=True)
class _Role:
    """Owned by the daemon. It is the role's `task_status`, too."""

    name: str  # "generator-0"
    ready: anyio.Event = field(default_factory=anyio.Event)
    running: bool = True

    @property
    def kind(self) -> str:
        return self.name.partition("-")[0]

    @property
    def index(self) -> int | None:
        index = self.name.partition("-")[2]
        return int(index) if index else None

    def started(self, value: None = None) -> None:
        self.ready.set()


async def _root(
    config: Config, folder: Path, names: tuple[str, ...], takeover: Takeover, table: Mapping[str, str], hard_end: HardEnd
) -> None:
    stop = Stopping()
    if config.run.name:
        structlog.contextvars.bind_contextvars(run=config.run.name)
    async with anyio.create_task_group() as root:
        await root.start(_signals, stop)
        bucket = _open(config, folder)
        ctx = Context(config=config, folder=folder, bucket=bucket, stop=stop, roles=names, takeover=takeover)
        log.info("starting", roles=list(names), bucket=config.run.bucket or "none")
        try:
            await ctx.stop.unless(partial(_first_look, ctx, root))
            over = not stop.requested and await _over(ctx)
            if not stop.requested:
                await _roles(ctx, root, table, hard_end)
            log.info("ended", reason=stop.reason)
            await _tell(ctx, over=over)
        finally:
            with anyio.move_on_after(5, shield=True):
                await bucket.close()
        root.cancel_scope.cancel()  # the helpers above have nothing left to do


def _open(config: Config, folder: Path) -> Bucket:
    try:
        return open_bucket(config.run.bucket or NO_BUCKET, folder=folder, create=config.run.create_bucket)
    except BucketError as error:
        raise NotReady(f"bucket {config.run.bucket}: {error}") from error


async def _first_look(ctx: Context, root: anyio.abc.TaskGroup) -> None:
    """The bucket answers, and stop requests in it are watched for."""
    if not ctx.config.run.bucket:
        return
    watch = _StopWatch(ctx.bucket, ctx.stop)
    with anyio.move_on_after(ctx.config.run.startup_timeout_s) as waiting:
        await root.start(watch.run)
    if waiting.cancelled_caught:
        raise NotReady(f"bucket {ctx.bucket.url} did not answer in {ctx.config.run.startup_timeout_s:g} s: {watch.fault}")


def _import(target: str) -> Run:
    module, _, function = target.partition(":")
    with IMPORTING:
        run: Run = getattr(importlib.import_module(module), function)
    return run


async def _roles(ctx: Context, root: anyio.abc.TaskGroup, table: Mapping[str, str], hard_end: HardEnd) -> None:
    roles = [_Role(name=name) for name in ctx.roles]
    with anyio.CancelScope() as work:
        root.start_soon(_grace, ctx, roles, work, hard_end)
        root.start_soon(_readiness, ctx, roles)
        async with anyio.create_task_group() as group:
            for role in roles:  # all at once: a generator is ready only after the learner's first version
                group.start_soon(_role, ctx, roles, role, table[role.kind], hard_end)


async def _role(ctx: Context, roles: Sequence[_Role], role: _Role, target: str, hard_end: HardEnd) -> None:
    structlog.contextvars.bind_contextvars(role=role.name)
    try:
        log.info("loading")
        # in a thread: importing torch takes seconds, and signals are to be heard meanwhile
        run = await ctx.stop.unless(partial(anyio.to_thread.run_sync, _import, target, abandon_on_cancel=True))
        if run is not None:
            await run(ctx, index=role.index, task_status=role)
    except Exception as error:
        blame(error, role.name)
        hard_end.arm(ctx.config.run.grace_s, error)  # the others are cancelled now, and may not notice
        raise
    role.running = False
    role.started()  # one that found nothing to do is not waited for
    log.info("role_ended")
    others = [other for other in roles if other.kind != "proxy"]
    if others and not any(other.running for other in others):
        ctx.stop.request(ROLES_ENDED)


async def _readiness(ctx: Context, roles: Sequence[_Role]) -> None:
    # longer than a role itself waits, for a run and then for a replica: it knows better what it lacks
    timeout_s = 2 * ctx.config.run.startup_timeout_s + _LOADING_S
    with anyio.move_on_after(timeout_s):
        for role in roles:
            await role.ready.wait()
        if not ctx.stop.requested or ctx.stop.reason == ROLES_ENDED:  # else they have ended before they were
            log.info("ready")
        return
    if not ctx.stop.requested:
        late = ", ".join(role.name for role in roles if not role.ready.is_set())
        raise NotReady(f"{late}: not ready after {timeout_s:g} s (run.startup_timeout_s)")


async def _grace(ctx: Context, roles: Sequence[_Role], work: anyio.CancelScope, hard_end: HardEnd) -> None:
    grace_s = ctx.config.run.grace_s
    await ctx.stop.wait()
    log.info("stopping", reason=ctx.stop.reason, grace_s=grace_s, next_signal="ends it at once")
    hard_end.arm(grace_s, None)
    await anyio.sleep(cancel_after_s(grace_s))
    log.warning("grace_over", still_running=[role.name for role in roles if role.running])
    work.cancel()


async def _signals(stop: Stopping, *, task_status: anyio.abc.TaskStatus[None]) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
        task_status.started()
        async for signum in received:
            for again in (signal.SIGINT, signal.SIGTERM):
                signal.signal(again, at_once)  # not through the loop: a loop that is stuck hears it as well
            stop.request(signal.Signals(signum).name)


async def _over(ctx: Context) -> bool:
    """Had the run ended before this process came? A bucket that does not say is the roles' own affair."""
    try:
        return bool(ctx.config.run.bucket) and keys.FINAL_MANIFEST in await ctx.bucket.stat([keys.FINAL_MANIFEST])
    except BucketError as error:
        log.warning("bucket_fails", looking_for="the end of the run", error=str(error))
        return False


async def _tell(ctx: Context, *, over: bool) -> None:
    """Who has trained is told on stdout what came out of it, or how it goes on."""
    if "learner" not in {name.partition("-")[0] for name in ctx.roles}:
        return
    try:
        if keys.FINAL_MANIFEST in await ctx.bucket.stat([keys.FINAL_MANIFEST]):
            from grpod.run.report import report  # reads Parquet: no other process needs it

            if over:
                print(
                    f"\nthe run at {ctx.bucket.url} had ended before: nothing was trained now, and nothing that differs in "
                    "the config has any effect. For another run: --set run.bucket=URL"
                )
            print("\n" + await report(ctx.bucket, ctx.config, ctx.folder), flush=True)
        elif keys.LEARNER_STATE in await ctx.bucket.stat([keys.LEARNER_STATE]):
            found = await ctx.bucket.get(keys.LEARNER_STATE)
            assert found is not None
            state = LearnerState.decode(found.data, keys.LEARNER_STATE)
            print(f"\nstopped at step {state.step} of {state.steps}: the same command goes on from there", flush=True)
    except GrpodError as error:  # the work is done and whole; only its summary is not to be had
        log.warning("no_report", error=str(error))


class _StopWatch:
    """Sees a control/stop-* that was not there at the start. A bucket that fails meanwhile is looked at again."""

    def __init__(self, bucket: Bucket, stop: Stopping) -> None:
        self.bucket, self.stop = bucket, stop
        self.fault = "no answer"
        # on a distant bucket every look counts against a quota that all processes of the run share
        self.least_s, self.most_s = (0.5, 5.0) if bucket.url.startswith(LOCAL) else (10.0, 30.0)

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        known: set[str] | None = None
        failing = False
        while True:
            try:
                found = {meta.key async for meta in self.bucket.list(keys.CONTROL) if keys.parse_stop(meta.key)}
                failing = False
                if known is None:
                    known = found
                    task_status.started()
                if found - known:
                    self.stop.request(f"stop request {min(found - known)}")
                    return
                await anyio.sleep(self.least_s)
                await self.bucket.changed(self.most_s - self.least_s)
            except BucketError as error:
                self.fault = str(error)
                if not failing:
                    log.warning("bucket_fails", looking_for="stop requests", error=self.fault)
                failing = True
                await anyio.sleep(self.least_s)
