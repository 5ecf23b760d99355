"""rollout objects -> groups ready to be trained, oldest first.

    consumes   rollouts/**, state/generators/**            waits for   bucket.changed
    produces   pending groups (`take`), ends (`book`)      unblocks    the learner's loop, through `notice`

A missing number does not hold up the next ones. What cannot be read goes to quarantine/ once, and is never looked at again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import anyio
import anyio.to_thread

from grpod.bucket.base import Bucket
from grpod.errors import BucketError, NotFound, WireError
from grpod.grpo import admission
from grpod.learner.arrivals import Arrivals
from grpod.learner.book import Book
from grpod.learner.pacing import Pacing
from grpod.learner.roster import Roster
from grpod.learner.source import Source
from grpod.learner.versions import Version, Versions
from grpod.run.notice import Notice
from grpod.telemetry.log import get_logger
from grpod.wire import keys
from grpod.wire.checkpoint import Cursor
from grpod.wire.rollout import Group, Shipment, decode_ids, decode_shipment
from grpod.wire.tables import End

_WHOLE = "reason.json"  # note in quarantine/: the object is of no use
_SOME = "groups.json"  # some of its groups are not


@dataclass(frozen=True, kw_only=True)
class Rules:
    run_id: str
    base_fingerprint: str
    max_lag: int
    vocab_size: int
    max_positions: int  # of the model; 0: no limit
    mask_truncated: bool
    keep_zero_spread: bool = False
    ttl_s: float  # a generator whose state stood still for so long is retired
    list_every_s: float = 5.0  # rollouts/ is listed for what no state tells of: other people's objects
    settle_s: float = 0.0  # they are read once they have not changed for so long: a copy into a folder is seen while it grows


@dataclass(frozen=True, kw_only=True)
class Pending:
    group: Group
    version: Version
    arrival: int


class Feed:
    def __init__(
        self,
        bucket: Bucket,
        *,
        rules: Rules,
        book: Book,
        pacing: Pacing,
        versions: Versions,
        cursors: dict[str, Cursor],
        clock: Callable[[], float] = anyio.current_time,
    ) -> None:
        self._bucket, self._rules, self._book, self._pacing, self._versions = bucket, rules, book, pacing, versions
        self._clock = clock
        self.roster = Roster(bucket, pacing, cursors=cursors, ttl_s=rules.ttl_s, clock=clock)
        self._taken: list[Pending] = []  # in the step that is being made
        self._pending: list[Pending] = []
        self._where: dict[str, tuple[str, int]] = {}  # pending group -> its object
        self._arrivals = 0
        self._listed_at = float("-inf")
        self._failing = False
        self._log = get_logger()
        self.step = 0  # steps done, told by the loop
        self.notice = Notice()
        self.arrivals = Arrivals()
        self.duplicates = 0
        self.quarantined = 0  # objects, over all epochs of the run
        self.idle_run = 0  # groups that gave nothing to learn from since one was fit to be trained
        self._bad_before: set[str] = set()  # objects of which some groups are in quarantine since an earlier epoch
        self._caught_up = False  # all that stood there at the start has been read
        self._recalled = False  # what earlier epochs have put into quarantine

    # ---- what the loop asks

    def take(self, count: int) -> list[Pending] | None:
        """The `count` oldest that are not stale; None while there are fewer. They stay outstanding until `trained`.

        None, too, before all that stood there at the start has been read: a resumed learner that trains on while it still reads
        makes stale what it has not read yet.
        """
        self.prune()
        if len(self._pending) < count or not self._caught_up:
            return None
        self._pending.sort(key=lambda p: (p.version.pos, p.arrival))
        self._taken, self._pending = self._pending[:count], self._pending[count:]
        return self._taken

    def trained(self, taken: Iterable[Pending], step: int) -> None:
        self._taken = []
        for pending in taken:
            self._end(End(group_id=pending.group.group_id, end="trained", step=step))

    def drop(self, taken: Iterable[Pending], reason: str) -> None:
        self._taken = []
        for pending in taken:
            self._drop(pending.group.group_id, reason)

    def prune(self) -> None:
        """Ends what has become stale while it waited."""
        stale = [p for p in self._pending if self._versions.lag(p.version) > self._rules.max_lag]
        if stale:
            self._pending = [p for p in self._pending if self._versions.lag(p.version) <= self._rules.max_lag]
            for pending in stale:
                self._drop(pending.group.group_id, "stale")

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def num_ageing(self) -> int:
        """Pending groups that the next publish would make stale."""
        return sum(self._versions.lag(p.version) >= self._rules.max_lag for p in self._pending)

    def outstanding(self) -> int:
        """Groups credited to somebody who serves, or read from somebody else, that have not ended."""
        serving = set(self.roster.serving())
        unowned = sum(1 for p in (*self._pending, *self._taken) if p.group.generator not in serving)
        return unowned + sum(self._pacing.outstanding(name) for name in serving)

    def hopeless(self) -> str | None:
        """Why nothing will ever be trained in this run, as far as its generators know."""
        return None if self._book.trained else self.roster.hopeless()

    # ---- reading

    async def run(self) -> None:
        while True:
            try:
                await self.poll()
                self._failing = False
            except BucketError as error:  # the bucket is away: nothing is lost, the next look may succeed
                if not self._failing:
                    self._log.warning("bucket_unreadable", error=str(error))
                self._failing = True
            await self._bucket.changed(1.0)

    async def poll(self) -> None:
        if not self._recalled:
            await self._recall_quarantined()
        await self.roster.read_states()
        if self._clock() - self._listed_at >= self._rules.list_every_s:
            await self._list_rollouts()
        settled_at = self._clock() - self._rules.settle_s
        wanted = [key for source in self.roster for key in source.wanted(settled_at)]
        found = await self._bucket.stat(wanted) if wanted else {}
        failures: list[BucketError] = []
        for key in sorted(found):
            try:
                await self._read(key)
            except BucketError as error:  # one object, or its place in quarantine/: the others do not wait for it
                failures.append(error)
        self._caught_up = True
        self.roster.retire_silent()
        for group_id, reason in self.roster.missing():
            self._drop(group_id, reason)
        self.notice.tell()
        if failures:
            raise failures[0]

    async def _recall_quarantined(self) -> None:
        """What an earlier epoch put there is counted, and neither looked at nor told again."""
        notes = [
            meta.key.removeprefix(f"{keys.QUARANTINE}/").rpartition("/") async for meta in self._bucket.list(keys.QUARANTINE)
        ]
        for key, _, note in notes:
            parsed = keys.parse_rollout(key)
            if parsed is None or note == "object":
                continue
            self.quarantined += 1
            source = self.roster.source(parsed[0])
            if note == _SOME:
                self._bad_before.add(key)
            elif source.unread(parsed[1]):
                source.finish(parsed[1])
        self._recalled = True

    async def _list_rollouts(self) -> None:
        self._listed_at = self._clock()
        async for meta in self._bucket.list(keys.ROLLOUTS):
            parsed = keys.parse_rollout(meta.key)
            if parsed:
                self.roster.source(parsed[0]).show(parsed[1], meta.tag, self._listed_at)

    async def _read(self, key: str) -> None:
        parsed = keys.parse_rollout(key)
        assert parsed is not None
        name, seq = parsed
        source = self.roster.source(name)
        try:
            found = await self._bucket.get(key)
        except NotFound:
            return
        assert found is not None
        try:
            shipment = await anyio.to_thread.run_sync(decode_shipment, found.data, key)
        except WireError as error:
            await self._quarantine(key, found.data, error.reason, str(error), note=_WHOLE)
            for group_id in await anyio.to_thread.run_sync(_ids, found.data, key):
                owner = group_id.rpartition("/")[0]
                # of another generator that is known, its own objects tell; a broken copy of one must not end it
                if group_id not in self._where and (owner == name or owner not in self.roster):
                    self._drop(group_id, "quarantined")
            source.finish(seq)
            return
        bad = [b for b in shipment.bad if b.group_id not in self._book]
        if (
            bad and key not in self._bad_before
        ):  # only these groups: the object stays in use for the others, so a restart must read it again
            message = f"{key}: " + ", ".join(f"{b.group_id}: {b.reason}" for b in bad)
            await self._quarantine(key, found.data, bad[0].reason, message, note=_SOME)
        await self._admit(source, seq, key, shipment)

    async def _admit(self, source: Source, seq: int, key: str, shipment: Shipment) -> None:
        named = {(group.policy_version, group.policy_epoch) for group in shipment.groups}
        versions = {name: await self._versions.find(*name) for name in named}  # may fail: nothing is noted before
        ids = {g.group_id for g in shipment.groups} | {d.group_id for d in (*shipment.drops, *shipment.bad)}
        source.seen |= {int(n) for owner, _, n in (i.rpartition("/") for i in ids) if owner == source.name and n.isdecimal()}
        known = {i for i in ids if i in self._book or i in self._where}
        if known:
            self.duplicates += len(known)
            self._log.info("groups_seen_before", key=key, groups=len(known))
        source.reading[seq] = ids - known
        for group_id in source.reading[seq]:
            self._where[group_id] = (source.name, seq)
        for drop in shipment.drops:
            if drop.group_id not in known:
                self.idle_run += drop.reason.startswith("reward_")
                self._drop(drop.group_id, drop.reason)
        for bad in shipment.bad:
            if bad.group_id not in known:
                self._drop(bad.group_id, "quarantined")
        faults: Counter[str] = Counter()
        for group in shipment.groups:
            if group.group_id in known:
                continue
            version = versions[group.policy_version, group.policy_epoch]
            fault = self._verdict(group, version, shipment.base_fingerprint)
            if fault is None:
                assert version is not None
                self._arrive(group, version)
            else:
                faults[fault] += 1
                self._drop(group.group_id, fault)
        if faults:
            self._log.debug("groups_refused", key=key, **faults)
        if not source.reading.get(seq, True):
            source.finish(seq)

    def _verdict(self, group: Group, version: Version | None, base_fingerprint: str) -> str | None:
        rules = self._rules
        view = admission.View(
            run_id=rules.run_id,
            base_fingerprint=rules.base_fingerprint,
            max_lag=rules.max_lag,
            vocab_size=rules.vocab_size,
            max_positions=rules.max_positions,
        )
        return admission.verdict(
            group,
            view,
            base_fingerprint=base_fingerprint,
            canonical=None if version is None else self._versions.lineage.canonical(version.version, version.epoch),
            adapter_sha256=None if version is None else version.sha256,
            lag=0 if version is None else self._versions.lag(version),
        )

    def _arrive(self, group: Group, version: Version) -> None:
        self.arrivals.add(group)
        fault = admission.trainable(group, mask_truncated=self._rules.mask_truncated)
        self.idle_run = 0 if fault is None else self.idle_run + 1
        if fault is None or (fault == "zero_spread" and self._rules.keep_zero_spread):
            self._arrivals += 1
            self._pending.append(Pending(group=group, version=version, arrival=self._arrivals))
        else:
            self._drop(group.group_id, fault)

    # ---- ends

    def _drop(self, group_id: str, reason: str) -> None:
        self._end(End(group_id=group_id, end="dropped", step=self.step, reason=reason))

    def _end(self, end: End) -> None:
        if not self._book.end(end):
            return
        self._pacing.note_end(end.group_id.rpartition("/")[0], self._clock())
        where = self._where.pop(end.group_id, None)
        if where is not None:
            source, seq = self.roster.source(where[0]), where[1]
            remaining = source.reading[seq]
            remaining.discard(end.group_id)
            if not remaining:
                source.finish(seq)

    async def _quarantine(self, key: str, data: bytes, reason: str, message: str, *, note: str) -> None:
        folder = keys.quarantine(key)
        await self._bucket.put({f"{folder}/object": data})
        await self._bucket.put({f"{folder}/{note}": json.dumps({"key": key, "reason": reason, "message": message}).encode()})
        self.quarantined += 1
        self._log.warning("quarantined", key=key, reason=reason, error=message)


def _ids(data: bytes, key: str) -> set[str]:
    """Of the groups that stand in an object of no use, as far as they can be read."""
    try:
        return decode_ids(data, key)[0]
    except WireError:
        return set()
