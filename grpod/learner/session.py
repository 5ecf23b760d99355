"""One holder's time at the run: everything that the loop's tasks share, and the order in which they act."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import anyio
import anyio.to_thread
from anyio.abc import TaskStatus

from grpod.bucket.base import LOCAL
from grpod.config import Config
from grpod.context import Context
from grpod.errors import AlreadyExists, GrpodError, NotReady
from grpod.learner import credits
from grpod.learner.announce import Announcer
from grpod.learner.book import Book
from grpod.learner.checkpoint import Resume
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
from grpod.wire.state import LearnerState

LoadPolicy = Callable[[Config, Path, int], Policy]
_SKIPPED = 10  # steps in a row of which none could be made
_REPUBLISH = 3  # times that weights are offered again under a new number when every generator refuses them


@dataclass(kw_only=True)
class Progress:
    """Mutable; owned by the session."""

    step: int = 0
    landed_step: int = 0  # the step reached when the newest manifest was written
    strides: tuple[int, int] = (1, 1)  # steps between the last publishes
    republished: int = 0
    waiting_for: int = 0
    skipped: int = 0  # steps that could not be made, in a row


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
        self._progress = Progress(step=trainer.step if trainer else 0)
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
                ttl_s=config.run.lease_ttl_s,
                list_every_s=1.0 if bucket.url.startswith(LOCAL) else 5.0,
            ),
            book=self._book,
            pacing=self._pacing,
            versions=self._versions,
            cursors=dict(trainer.cursors) if trainer else {},
        )
        self._feed.step = self._progress.step
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
            on_landed=self._landed,
        )
        self._due = Due(config.learner, step=self._progress.step, resumable_bytes=policy.resumable_bytes)
        self._announcer = Announcer(bucket, self._compose)
        self._recorder = Recorder(
            MetricWriter(bucket, f"learner-e{lease.epoch}"),
            self._log,
            feed=self._feed,
            book=self._book,
            versions=self._versions,
            step=self._progress.step,
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
        session._log.info("policy_loaded", step=session._progress.step, resumed=resume is not None, **policy.describe())
        return session

    # ---- the turn

    async def train(self, task_status: TaskStatus[None]) -> None:
        async with anyio.create_task_group() as tasks:
            await self._publish_first()
            tasks.start_soon(self._publisher.run)
            tasks.start_soon(self._announcer.run)
            tasks.start_soon(self._feed.run)
            tasks.start_soon(self._recorder.writer.run)
            tasks.start_soon(self._pace)
            tasks.start_soon(self._wake_on_stop)
            task_status.started()
            try:
                with self._recorder:
                    reason = await self._steps()
            except NotReady:  # how the groups ended is kept all the same
                await self._end(None)
                raise
            await self._end(reason)
            tasks.cancel_scope.cancel()

    async def _steps(self) -> str | None:
        """Why the run has ended; None: the process was asked to stop."""
        goal, progress = self._config.learner, self._progress
        while progress.step < goal.steps:
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
            progress.step += 1
            progress.skipped = 0
            self._feed.step = progress.step
            self._feed.trained(taken, progress.step)
            blocked_s = await self._snapshot_if_due()
            self._recorder.step(
                progress.step,
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
        progress = self._progress
        progress.skipped += 1
        self._log.error("step_not_finite", step=progress.step + 1, **report.metrics)
        self._feed.drop(taken, "not_finite")
        if progress.skipped == _SKIPPED:
            raise GrpodError(f"loss or gradient of {_SKIPPED} steps in a row were not finite: the training has diverged")

    async def _next_groups(self, count: int) -> list[Pending] | None:
        feed, progress = self._feed, self._progress
        while not self._stop.requested:
            taken = feed.take(count)
            lacking = 0 if taken else count - feed.num_pending
            if lacking != progress.waiting_for and (lacking == 0) != (progress.waiting_for == 0):
                self._announcer.touch()
            progress.waiting_for = lacking
            if taken:
                return taken
            self._give_up_if_hopeless()
            self._recorder.waiting(progress.step + 1)
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
        if (failed := publisher.failed) is not None:
            self._due.missed(
                publish=failed.publish and failed.step > publisher.published_step,
                checkpoint=failed.checkpoint and failed.step > publisher.checkpointed_step,
            )
        due = self._due.at(self._progress.step)
        if (due.publish or due.checkpoint) and not publisher.busy:
            publisher.offer(await self._snapshot(publish=due.publish, checkpoint=due.checkpoint))
            self._due.took(self._progress.step, publish=due.publish, checkpoint=due.checkpoint)
        held_up = self._feed.num_pending >= self._config.learner.groups_per_step
        return anyio.current_time() - begun if held_up else 0.0

    async def _snapshot(self, *, publish: bool, checkpoint: bool) -> Snapshot:
        ends, cursors = tuple(self._book.fresh), self._feed.cursors()
        granted, ended = dict(self._pacing.granted), dict(self._pacing.ended)
        state, logprobs = await anyio.to_thread.run_sync(
            lambda: (self._policy.snapshot(), self._policy.score(self._probe_ids, adapter=True))
        )
        return Snapshot(
            step=self._progress.step,
            adapter=state.adapter,
            logprobs=logprobs,
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
        await self._publisher.upload(await self._snapshot(publish=True, checkpoint=False))
        self._due.took(self._progress.step, publish=True, checkpoint=False)

    def _landed(self, version: Version, snapshot: Snapshot, seconds: float) -> None:
        progress = self._progress
        stride = max(self._config.learner.publish_every, progress.step - progress.landed_step)
        progress.strides = (progress.strides[1], stride)
        progress.landed_step = progress.step
        if not snapshot.republished:
            progress.republished = 0
        self._feed.prune()
        self._announcer.touch()
        self._feed.notice.tell()
        self._recorder.writer.add(snapshot.step, {"publish/seconds": seconds, "version": version.version})

    # ---- beside the turn

    async def _pace(self) -> None:
        """Turns ends and publishes into credit; republishes what every generator has refused."""
        learner, progress = self._config.learner, self._progress
        while True:
            end = credits.window_end(
                published_step=self._publisher.published_step,
                landed_step=progress.landed_step,
                stride=max(learner.publish_every, min(progress.strides)),
                publish_every=learner.publish_every,
                max_lag=self._config.run.max_lag,
            )
            free = credits.room(
                window_end=end,
                step=progress.step,
                steps=learner.steps,
                groups_per_step=learner.groups_per_step,
                outstanding=self._feed.outstanding(),
            )
            if self._pacing.grant(self._feed.live(), free, anyio.current_time()):
                self._announcer.touch()
            self._republish_if_refused()
            await self._feed.notice.wait()

    def _republish_if_refused(self) -> None:
        newest, latest = self._versions.newest, self._publisher.latest
        assert newest is not None
        assert latest is not None
        refused, live = self._feed.refusals(newest.version, newest.epoch)
        if not live or refused < live or self._publisher.busy:
            return
        if self._progress.republished == _REPUBLISH:
            raise NotReady(f"every generator refused the weights of step {latest.step} under {_REPUBLISH + 1} version numbers")
        self._progress.republished += 1
        self._log.warning("version_refused_everywhere", version=newest.version, again=self._progress.republished)
        self._publisher.offer(replace(latest, republished=True, publish=True, checkpoint=False, ends=()))

    async def _wake_on_stop(self) -> None:
        await self._stop.wait()
        self._feed.notice.tell()

    def _compose(self, counter: int) -> LearnerState:
        newest = self._versions.newest
        live = set(self._feed.live())
        return LearnerState(
            epoch=self._lease.epoch,
            counter=counter,
            step=self._progress.step,
            version=newest.version if newest else None,
            pos=newest.pos if newest else None,
            credits={name: count for name, count in self._pacing.granted.items() if name in live},
            low=self._feed.lows(),
            retired=self._feed.retired(),
            waiting_for=self._progress.waiting_for,
            steps=self._config.learner.steps,
            updated_at=time.time(),
        )

    # ---- the end

    async def _end(self, reason: str | None) -> None:
        """Drain, last checkpoint, and unless the process was only asked to stop: final/."""
        await self._publisher.drain()
        step = self._progress.step
        last = await self._snapshot(
            publish=step > self._publisher.published_step, checkpoint=step > self._publisher.checkpointed_step
        )
        if last.publish or last.checkpoint:
            await self._publisher.upload(last)
        await self._recorder.writer.flush()
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
        await self._announcer.write()
        self._log.info(
            "learner_done", step=step, reason=reason or "stopped", trained=self._book.trained, dropped=dict(self._book.dropped)
        )


def _probe(config: Config, run: Run, policy: Policy) -> list[int]:
    return probe_ids(run.run_id, policy.vocab_size, config.model.max_model_len)
