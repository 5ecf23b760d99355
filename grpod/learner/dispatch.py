"""What the learner tells its fleet: the newest version, and how much may be begun under it.

ends, publishes ─▶ pace ─▶ credit ─┐
every generator refused ─▶ again   ├─▶ state/learner.json (announce.py)
the next step lacks groups ────────┘
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import anyio

from grpod.bucket.base import Bucket
from grpod.config import Config
from grpod.errors import NotReady
from grpod.learner import credits
from grpod.learner.announce import Announcer
from grpod.learner.feed import Feed
from grpod.learner.pacing import Pacing
from grpod.learner.publish import Publisher, Snapshot
from grpod.learner.versions import Version, Versions
from grpod.telemetry.log import get_logger
from grpod.wire.state import LearnerState

_REPUBLISH = 3  # times that weights are offered again under a new number when every generator refuses them


class Dispatch:
    def __init__(
        self,
        bucket: Bucket,
        config: Config,
        *,
        epoch: int,
        step: Callable[[], int],
        feed: Feed,
        pacing: Pacing,
        versions: Versions,
    ) -> None:
        """`step`: how many steps are done."""
        self._config, self._epoch, self._step = config, epoch, step
        self._feed, self._pacing, self._versions = feed, pacing, versions
        self._landed_step = step()  # the step reached when the newest manifest was written
        self._strides = (1, 1)  # steps between the last publishes
        self._republished = 0
        self._waiting_for = 0
        self._announcer = Announcer(bucket, self._state)
        self._log = get_logger(epoch=epoch)

    async def run(self, publisher: Publisher) -> None:
        """Until it is cancelled. Raises NotReady when no generator takes these weights under any number."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._announcer.run)
            while True:
                self._grant(publisher)
                self._republish_if_refused(publisher)
                await self._feed.notice.wait()

    def landed(self, version: Version, snapshot: Snapshot) -> None:
        """A manifest is written: from now on it is the newest version."""
        step = self._step()
        self._strides = (self._strides[1], max(self._config.learner.publish_every, step - self._landed_step))
        self._landed_step = step
        if not snapshot.republished:
            self._republished = 0
        self._feed.prune()
        self._announcer.touch()
        self._feed.notice.tell()

    def waiting_for(self, groups: int) -> None:
        """The next step lacks so many: generators ship at once while it does."""
        if (groups == 0) != (self._waiting_for == 0):
            self._announcer.touch()
        self._waiting_for = groups

    async def last_word(self) -> None:
        await self._announcer.write()

    def _grant(self, publisher: Publisher) -> None:
        learner = self._config.learner
        end = credits.window_end(
            published_step=publisher.published_step,
            landed_step=self._landed_step,
            stride=max(learner.publish_every, min(self._strides)),
            publish_every=learner.publish_every,
            max_lag=self._config.run.max_lag,
        )
        free = credits.room(
            window_end=end,
            step=self._step(),
            steps=learner.steps,
            groups_per_step=learner.groups_per_step,
            outstanding=self._feed.outstanding(),
        )
        if self._pacing.grant(self._feed.roster.serving(), free, anyio.current_time()):
            self._announcer.touch()

    def _republish_if_refused(self, publisher: Publisher) -> None:
        newest, latest = self._versions.newest, publisher.latest
        assert newest is not None
        assert latest is not None
        refused, live = self._feed.roster.refusals(newest.version, newest.epoch)
        if not live or refused < live or publisher.busy:
            return
        if self._republished == _REPUBLISH:
            raise NotReady(f"every generator refused the weights of step {latest.step} under {_REPUBLISH + 1} version numbers")
        self._republished += 1
        self._log.warning("version_refused_everywhere", version=newest.version, again=self._republished)
        publisher.offer(replace(latest, republished=True, publish=True, checkpoint=False, ends=()))

    def _state(self, counter: int) -> LearnerState:
        newest = self._versions.newest
        live = set(self._feed.roster.live())
        return LearnerState(
            epoch=self._epoch,
            counter=counter,
            step=self._step(),
            version=newest.version if newest else None,
            pos=newest.pos if newest else None,
            credits={name: count for name, count in self._pacing.granted.items() if name in live},
            low=self._feed.roster.lows(),
            retired=self._feed.roster.retired(),
            waiting_for=self._waiting_for,
            steps=self._config.learner.steps,
            updated_at=time.time(),
        )
