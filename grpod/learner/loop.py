"""The learner: admitted groups -> one optimizer step -> a new version, and nothing waits for the slowest.

claim ─▶ restore ─▶ publish first version ─▶ ┌─ take groups ─▶ step (worker thread) ─▶ record ends ─▶ snapshot ─┐ ─▶ final/
                                             └──────────────────────────────────────────────────────────────────┘
beside it   feed        rollouts -> pending groups                      consumes  rollouts/, state/generators/
            publisher   newest snapshot -> adapters/, checkpoints/      produces  adapters/, ledger/, checkpoints/
            announcer   state/learner.json: version and credits         unblocks  generators
            pace        ends and publishes -> credit
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.abc import TaskStatus

from grpod.bucket.base import Bucket
from grpod.context import Context
from grpod.learner import checkpoint
from grpod.learner.model import resolve_targets
from grpod.learner.policy import Policy
from grpod.learner.session import LoadPolicy, Session
from grpod.run.base_model import fingerprint, resolve_base
from grpod.run.join import Joined, join
from grpod.run.lease import RunEnded, hold
from grpod.run.lineage import Lineage
from grpod.telemetry.log import get_logger
from grpod.wire import keys
from grpod.wire.lease import Claim, ResumedFrom


async def run(
    ctx: Context,
    *,
    index: int | None = None,
    load_policy: LoadPolicy = Policy.load,
    task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Raises LeaseLost (3), NotReady (75), ConfigError (2)."""
    log = get_logger()
    config = ctx.config
    base = await anyio.to_thread.run_sync(resolve_base, config, ctx.folder)
    await anyio.to_thread.run_sync(resolve_targets, base, config.lora)  # before run.json keeps them for ever
    base_fingerprint = await anyio.to_thread.run_sync(fingerprint, base)

    async def begin() -> Joined:
        await ctx.wait_for_inputs()
        return await join(ctx.bucket, config, base_fingerprint, may_create=True, timeout_s=config.run.startup_timeout_s)

    joined = await ctx.stop.unless(begin)
    if joined is None:
        return
    if joined.changes and not joined.created:
        log.warning("learner_config_changed", **joined.changes)
    if keys.FINAL_MANIFEST in await ctx.bucket.stat([keys.FINAL_MANIFEST]):
        log.info("run_is_over", bucket=ctx.bucket.url, help="for another run: --set run.bucket=URL")
        task_status.started()
        return
    with tempfile.TemporaryDirectory(prefix="grpod-") as scratch:
        resumption = Resumption(ctx.bucket, joined.run.run_id, Path(scratch), may_restart=config.run.restart)
        try:
            async with hold(
                ctx.bucket,
                run_id=joined.run.run_id,
                ttl_s=config.run.lease_ttl_s,
                takeover=ctx.takeover,
                prepare=resumption.choose,
                changes=joined.changes,
                stop=ctx.stop,
                on_wait=task_status.started,  # a standby is as ready as it can be
            ) as lease:
                session = await Session.open(ctx, lease, joined.run, base, resumption.chosen, load_policy)
                await session.train(task_status)
        except RunEnded:
            if not ctx.stop.requested:
                log.info("run_is_over", bucket=ctx.bucket.url, help="for another run: --set run.bucket=URL")
            task_status.started()


class Resumption:
    """What a new holder begins from, decided before it claims: the claim tells it to everybody."""

    def __init__(self, bucket: Bucket, run_id: str, scratch: Path, *, may_restart: bool) -> None:
        self._bucket, self._run_id, self._scratch, self._may_restart = bucket, run_id, scratch, may_restart
        self.chosen: checkpoint.Resume | None = None

    async def choose(self, claims: tuple[Claim, ...]) -> tuple[ResumedFrom | None, int]:
        """(what is resumed from, first_version)"""
        highest = await checkpoint.highest_version(self._bucket)
        self.chosen = await checkpoint.newest_whole(self._bucket, Lineage(claims), self._run_id, self._scratch)
        if self.chosen is None:
            if highest > 0 and not self._may_restart and (step := await checkpoint.furthest_step(self._bucket)):
                raise checkpoint.refuse_restart(highest, step)
            return None, highest + 1
        manifest = self.chosen.manifest
        origin = ResumedFrom(step=manifest.step, version=manifest.version, epoch=manifest.version_epoch, pos=manifest.pos)
        return origin, highest + 1
