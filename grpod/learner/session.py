"""One holder's time at the run: everything that the loop's tasks share, and the order in which they act."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import anyio
import anyio.to_thread
from anyio.abc import TaskStatus

from grpod.bucket.base import LOCAL
from grpod.config import Config
from grpod.context import Context
from grpod.errors import AlreadyExists, BucketError, GrpodError, NotReady
from grpod.learner.book import Book
from grpod.learner.checkpoint import Resume
from grpod.learner.dispatch import Dispatch
from grpod.learner.feed import Feed, Pending, Rules
from grpod.learner.finish import write_final
from grpod.learner.pacing import Pacing
from grpod.learner.policy import Policy, StepReport
from grpod.learner.publish import Identity, Publisher, Snapshot
from grpod.learner.record import Recorder
from grpod.learner.schedule import Due, probe_ids
from grpod.learner.versions import Version, Versions
from grpod.run.lease import FencedBucket, Lease
from grpod.run.metrics_log import MetricWriter
from grpod.telemetry.log import get_logger
from grpod.wire import keys
from grpod.wire.adapter import Lora
from grpod.wire.run import Run

LoadPolicy = Callable[[Config, Path, int], Policy]
_SETTLE_S = 3.0  # for what others copy into a folder by hand; every other store shows whole objects only
_SKIPPED = 10  # steps in a row of which none could be made


class Session:
    def __init__(
        self, ctx: Context, lease: Lease, run: Run, policy: Policy, base_logprobs: list[float], resume: Resume | None
    ) -> None:
        """`base_logprobs`: of the probe under the base model. Without a loop's clock it cannot be built in a worker thread."""
        config, bucket = ctx.config, FencedBucket(ctx.bucket, lease)
        self._config, self._stop, self._lease, self._bucket = config, ctx.stop, lease, bucket
        self._run, self._policy = run, policy
        self._log = get_logger(epoch=lease.epoch)
        trainer = resume.trainer if resume else None
        self._step = trainer.step if trainer else 0  # steps done
        self._resumed = resume is not None
        self._skipped = 0  # steps that could not be made, in a row
        self._book = Book(resume.ends if resume else ())
        self._pacing = Pacing(trainer.begun if trainer else {}, trainer.ended if trainer else {})
        self._versions = Versions(bucket, lease.lineage)
        self._feed = Feed(
            bucket,
            rules=Rules(
                run_id=run.run_id,
                base_fingerprint=run.base_fingerprint,
                max_lag=config.run.max_lag,
                vocab_size=policy.vocab_size,
                max_positions=policy.max_positions,
                mask_truncated=config.learner.loss.mask_truncated,
                keep_zero_spread=config.learner.zero_spread == "keep",
                ttl_s=config.run.lease_ttl_s,
                list_every_s=1.0 if bucket.url.startswith(LOCAL) else 5.0,
                settle_s=_SETTLE_S if bucket.url.startswith("file:") else 0.0,
            ),
            book=self._book,
            pacing=self._pacing,
            versions=self._versions,
            cursors=dict(trainer.cursors) if trainer else {},
        )
        self._feed.step = self._step
        self._probe_ids = _probe(config, run, policy)
        claim = lease.claim
        self._publisher = Publisher(
            bucket,
            Identity(
                run_id=run.run_id,
                epoch=lease.epoch,
                base_fingerprint=run.base_fingerprint,
                lora=Lora(r=config.lora.rank, alpha=config.lora.alpha, targets=policy.lora_targets),
                probe_ids=self._probe_ids,
                base_logprobs=base_logprobs,
                keep_checkpoints=config.learner.keep_checkpoints,
            ),
            book=self._book,
            versions=self._versions,
            next_version=claim.first_version,
            next_pos=claim.resumed_from.pos if claim.resumed_from else 0,
            segments=list(resume.manifest.ledger) if resume else [],
            kept=[*resume.older, keys.checkpoint_folder(resume.manifest.step, resume.manifest.epoch)] if resume else [],
            score=policy.score_files,
            on_landed=self._landed,
            fence=lambda: _fence(lease),
        )
        self._due = Due(config.learner, step=self._step, resumable_bytes=policy.resumable_bytes)
        self._dispatch = Dispatch(
            bucket,
            config,
            epoch=lease.epoch,
            step=lambda: self._step,
            feed=self._feed,
            pacing=self._pacing,
            versions=self._versions,
        )
        self._recorder = Recorder(
            MetricWriter(bucket, f"learner-e{lease.epoch}"),
            self._log,
            feed=self._feed,
            book=self._book,
            versions=self._versions,
            step=self._step,
            steps=config.learner.steps,
        )

    @classmethod
    async def open(
        cls, ctx: Context, lease: Lease, run: Run, base: Path, resume: Resume | None, load_policy: LoadPolicy
    ) -> Session:
        def load() -> tuple[Policy, list[float]]:
            policy = load_policy(ctx.config, base, ctx.config.data.seed if ctx.config.data else 0)
            if resume:
                policy.restore(resume.files, resume.trainer)
            return policy, policy.score(_probe(ctx.config, run, policy), adapter=False)

        policy, base_logprobs = await anyio.to_thread.run_sync(load)
        session = cls(ctx, lease, run, policy, base_logprobs, resume)
        session._log.info("policy_loaded", step=session._step, resumed=session._resumed, **policy.describe())
        return session

    # ---- the turn

    async def train(self, task_status: TaskStatus[None]) -> None:
        async with anyio.create_task_group() as tasks:
            await self._publish_first()
            await self._feed.roster.read_states()  # what comes after this, and after the state that now goes out, is alive
            tasks.start_soon(self._publisher.run)
            tasks.start_soon(self._feed.run)
            tasks.start_soon(self._recorder.writer.run)
            tasks.start_soon(self._dispatch.run, self._publisher)
            tasks.start_soon(self._wake_on_stop)
            task_status.started()
            reason, failure = None, None
            try:
                with self._recorder:
                    reason = await self._steps()
            except NotReady as error:  # how the groups ended is kept all the same
                failure = error
            await self._publisher.drain()
            tasks.cancel_scope.cancel()
        await self._end(reason)  # alone now: nothing else publishes, credits or ends a group any more
        if failure is not None:
            raise failure

    async def _steps(self) -> str | None:
        """Why the run has ended; None: the process was asked to stop."""
        goal = self._config.learner
        while self._step < goal.steps:
            waited_from = anyio.current_time()
            taken = await self._next_groups(goal.groups_per_step)
            if taken is None:
                return None
            waited_s = anyio.current_time() - waited_from
            self._lease.check()
            lags = [self._versions.lag(pending.version) for pending in taken]
            begun = anyio.current_time()
            report = await anyio.to_thread.run_sync(self._policy.step, [pending.group for pending in taken])
            if report.skipped:
                self._skip(taken, report)
                continue
            self._step += 1
            self._skipped = 0
            self._feed.step = self._step
            self._feed.trained(taken, self._step)
            blocked_s = await self._snapshot_if_due()
            self._recorder.step(
                self._step,
                {
                    **report.metrics,
                    "lag/mean": fmean(lags),
                    "lag/max": max(lags),
                    "perf/step_s": anyio.current_time() - begun,
                    "perf/rollout_wait_s": waited_s,
                    "publish/blocked_s": blocked_s,
                },
            )
            self._feed.notice.tell()
            target, reward = self._config.run.stop_at_reward, self._recorder.reward
            if target is not None and reward is not None and reward >= target:
                return "reward"
        return "steps"

    def _skip(self, taken: list[Pending], report: StepReport) -> None:
        """Its groups gave no finite step. Raises GrpodError when none can any more."""
        self._skipped += 1
        self._log.error("step_skipped", step=self._step + 1, reason=report.reason, **report.metrics)
        self._feed.drop(taken, "not_finite" if report.reason == "not_finite" else "all_masked")
        if self._skipped == _SKIPPED:
            raise GrpodError(f"loss or gradient of {_SKIPPED} steps in a row were not finite: the training has diverged")

    async def _next_groups(self, count: int) -> list[Pending] | None:
        feed = self._feed
        while not self._stop.requested:
            taken = feed.take(count)
            self._dispatch.waiting_for(0 if taken else count - feed.num_pending)
            if taken:
                return taken
            self._give_up_if_hopeless()
            self._recorder.waiting(self._step + 1)
            await self._snapshot_if_due()
            await feed.notice.wait(1.0)
        return None

    def _give_up_if_hopeless(self) -> None:
        feed = self._feed
        if feed.idle_run >= self._config.learner.give_up_after:
            raise NotReady(
                f"{feed.idle_run} groups in a row gave nothing to learn from (dropped: {dict(self._book.dropped)}); "
                "do the rewards ever differ within a group? (learner.give_up_after)"
            )
        if why := feed.hopeless():
            raise NotReady(why)

    # ---- snapshots

    async def _snapshot_if_due(self) -> float:
        """Seconds that it kept the loop from its next step: none when the groups for that were not there yet."""
        begun, publisher = anyio.current_time(), self._publisher
        if (failed := publisher.take_failed()) is not None:
            self._due.missed(
                publish=failed.publish and failed.step > publisher.published_step,
                checkpoint=failed.checkpoint and failed.step > publisher.checkpointed_step,
            )
        due = self._due.at(self._step)
        publish, enough = due.publish, self._feed.num_pending >= self._config.learner.groups_per_step
        if enough and self._feed.num_ageing:
            publish = False  # what it would make stale is trained first: after a resume that may be many steps' worth
        if (publish or due.checkpoint) and not publisher.busy:
            publisher.offer(await self._snapshot(publish=publish, checkpoint=due.checkpoint))
            self._due.took(self._step, publish=publish, checkpoint=due.checkpoint)
        return anyio.current_time() - begun if enough else 0.0

    async def _snapshot(self, *, publish: bool, checkpoint: bool) -> Snapshot:
        ends, cursors = tuple(self._book.fresh), self._feed.roster.cursors()
        granted, ended = dict(self._pacing.granted), dict(self._pacing.ended)
        state = await anyio.to_thread.run_sync(self._policy.snapshot)
        return Snapshot(
            step=self._step,
            adapter=state.adapter,
            publish=publish,
            checkpoint=checkpoint,
            optimizer=state.optimizer,
            scheduler=state.scheduler,
            rng=state.rng,
            ends=ends,
            cursors=cursors,
            granted=granted,
            ended=ended,
        )

    async def _publish_first(self) -> None:
        canary = await anyio.to_thread.run_sync(self._policy.canary_files, self._probe_ids)
        with contextlib.suppress(AlreadyExists):  # an earlier epoch wrote it: any canary will do
            await self._bucket.put({f"{keys.CANARY}/{name}": data for name, data in canary.items()}, create=True)
        first = await self._snapshot(publish=True, checkpoint=False)
        await self._publisher.upload(first)
        if not self._resumed:
            self._publisher.origin = replace(first, publish=False, checkpoint=True)
        self._due.took(self._step, publish=True, checkpoint=False)

    def _landed(self, version: Version, snapshot: Snapshot, seconds: float) -> None:
        self._dispatch.landed(version, snapshot)
        self._recorder.writer.add(snapshot.step, {"publish/seconds": seconds, "version": version.version})

    # ---- the end

    async def _end(self, reason: str | None) -> None:
        """Last version, last checkpoint, and unless the process was only asked to stop: final/."""
        step = self._step
        last = await self._snapshot(
            publish=step > self._publisher.published_step, checkpoint=step > self._publisher.checkpointed_step
        )
        if last.publish or last.checkpoint:
            await self._publisher.upload(last)
        try:
            await self._recorder.writer.flush()
        except BucketError as error:  # curves with a gap are no reason to leave the run without its end
            self._log.warning("metrics_not_written", error=str(error))
        if reason is not None:
            await write_final(
                self._bucket,
                run=self._run,
                epoch=self._lease.epoch,
                step=step,
                version=self._versions.newest,
                adapter=last.adapter,
                segments=self._publisher.segments,
                ends=tuple(self._book.fresh),
                reason=reason,
            )
        await self._dispatch.last_word()
        self._log.info(
            "learner_done", step=step, reason=reason or "stopped", trained=self._book.trained, dropped=dict(self._book.dropped)
        )

    async def _wake_on_stop(self) -> None:
        await self._stop.wait()
        self._feed.notice.tell()


def _probe(config: Config, run: Run, policy: Policy) -> list[int]:
    return probe_ids(run.run_id, policy.vocab_size, config.model.max_model_len)


async def _fence(lease: Lease) -> None:
    await lease.beat_now()
    await lease.verify()
