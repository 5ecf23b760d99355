"""What a generator or the proxy knows of the learner, from the bucket alone.

    leases/learner/*  ─▶ lineage (which versions count)
    state/learner.json ─▶ version, credits, retired       (ignored below the highest claimed epoch: a zombie's)
    final/manifest.json ─▶ ended

`Follower.run` looks whenever the bucket may have changed, at the latest every `period_s`; readers wait on `notice`.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpod.bucket.base import Bucket, ObjectMeta
from grpod.errors import BucketError, NotFound, WireError
from grpod.run.lease import read_claims
from grpod.run.lineage import Lineage
from grpod.run.notice import Notice
from grpod.telemetry.log import get_logger
from grpod.wire import keys
from grpod.wire.state import LearnerState, newer


@dataclass(frozen=True, kw_only=True)
class View:
    lineage: Lineage
    state: LearnerState | None = None  # of the highest epoch; None until its holder has written one
    ended: bool = False


class Follower:
    def __init__(self, bucket: Bucket, *, period_s: float = 1.0, notice: Notice | None = None) -> None:
        self.bucket = bucket
        self.view = View(lineage=Lineage(()))
        self.notice = notice or Notice()
        self._period_s = period_s
        self._state: LearnerState | None = None
        self._state_meta: ObjectMeta | None = None
        self._failing = False
        self._log = get_logger()

    async def run(self) -> None:
        while not self.view.ended:
            try:
                await self.refresh()
                self._failing = False
            except (BucketError, WireError) as error:  # the bucket is away: what is known stays true, the next look may succeed
                if not self._failing:
                    self._log.warning("bucket_unreadable", error=str(error))
                self._failing = True
            await self.bucket.changed(self._period_s)

    async def refresh(self) -> None:
        before = self.view
        lineage = before.lineage
        probes = [keys.FINAL_MANIFEST, keys.claim(lineage.highest_epoch + 1)]
        found = await self.bucket.stat(probes)
        if keys.claim(lineage.highest_epoch + 1) in found or not self.bucket.atomic_create:
            lineage = Lineage(await read_claims(self.bucket))
        state = await self._read_state()
        if state is not None and state.epoch < lineage.highest_epoch:
            state = None
        self.view = View(lineage=lineage, state=state, ended=keys.FINAL_MANIFEST in found)
        if self.view != before:
            self.notice.tell()

    async def _read_state(self) -> LearnerState | None:
        try:
            found = await self.bucket.get(keys.LEARNER_STATE, if_changed_from=self._state_meta)
        except NotFound:
            return self._state
        if found is not None:
            self._state_meta = found.meta
            self._state = newer(self._state, LearnerState.decode(found.data, keys.LEARNER_STATE))
        return self._state
