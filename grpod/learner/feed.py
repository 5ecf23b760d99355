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

from grpod.bucket.base import Bucket, ObjectMeta
from grpod.errors import BucketError, NotFound, WireError
from grpod.grpo import admission
from grpod.learner.arrivals import Arrivals
from grpod.learner.book import Book
from grpod.learner.pacing import Pacing
from grpod.learner.source import Source
from grpod.learner.versions import Version, Versions
from grpod.run.notice import Notice
from grpod.telemetry.log import get_logger
from grpod.wire import keys
from grpod.wire.checkpoint import Cursor
from grpod.wire.rollout import Group, Shipment, decode_ids, decode_shipment
from grpod.wire.state import GeneratorState, newer
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
        self._sources = {name: Source.resumed(name, cursor, clock()) for name, cursor in cursors.items()}
        self._state_tags: dict[str, ObjectMeta] = {}
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
        self._looked = False
        self._hopeless = ""

    # ---- what the loop asks

    def take(self, count: int) -> list[Pending] | None:
        """The `count` oldest that are not stale; None while there are fewer. They stay outstanding until `trained`."""
        self.prune()
        if len(self._pending) < count:
            return None
        self._pending.sort(key=lambda p: (p.version.pos, p.arrival))
        taken, self._pending = self._pending[:count], self._pending[count:]
        return taken

    def give_back(self, taken: Iterable[Pending]) -> None:
        self._pending.extend(taken)

    def trained(self, taken: Iterable[Pending], step: int) -> None:
        for pending in taken:
            self._end(End(group_id=pending.group.group_id, end="trained", step=step))

    def drop(self, taken: Iterable[Pending], reason: str) -> None:
        for pending in taken:
            self._drop(pending.group.group_id, reason)

    def prune(self) -> None:
        """Ends what has become stale while it waited."""
        stale = [p for p in self._pending if self._versions.lag(p.version) > self._rules.max_lag]
        if stale:
            self._pending = [p for p in self._pending if self._versions.lag(p.version) <= self._rules.max_lag]
            self.drop(stale, "stale")

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def num_ageing(self) -> int:
        """Pending groups that the next publish would make stale."""
        return sum(self._versions.lag(p.version) >= self._rules.max_lag for p in self._pending)

    def live(self) -> list[str]:
        return [source.name for source in self._sources.values() if source.live]

    def retired(self) -> list[str]:
        return sorted(source.name for source in self._sources.values() if source.retired and source.state is not None)

    def outstanding(self) -> int:
        """Groups credited to somebody alive, or read from somebody else, that have not ended."""
        live = set(self.live())
        unowned = sum(1 for p in self._pending if p.group.generator not in live)
        return unowned + sum(self._pacing.outstanding(name) for name in live)

    def cursors(self) -> dict[str, Cursor]:
        return {name: source.cursor for name, source in self._sources.items()}

    def lows(self) -> dict[str, int]:
        return {name: source.low for name, source in self._sources.items()}

    def refusals(self, version: int, epoch: int) -> tuple[int, int]:
        """(live generators that refused this version, live generators)"""
        states = [s.state for s in self._sources.values() if s.live and s.state]
        return sum(f"{version}-{epoch}" in state.refused for state in states), len(states)

    def hopeless(self) -> str | None:
        """Why no generator of this run can make a group that is worth anything; None while one tries, or has done so."""
        return None if self._book.trained or self.live() else self._hopeless or None

    # ---- reading

    async def run(self) -> None:
        await self._forget_quarantined()
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
        await self._read_states()
        if self._clock() - self._listed_at >= self._rules.list_every_s:
            await self._list_rollouts()
        settled_at = self._clock() - self._rules.settle_s
        wanted = [key for source in self._sources.values() for key in source.wanted(settled_at)]
        found = await self._bucket.stat(wanted) if wanted else {}
        for key in sorted(found):
            await self._read(key)
        self._looked = True
        self._retire_silent()
        self._account_missing()
        self.notice.tell()

    async def _forget_quarantined(self) -> None:
        """What an earlier epoch put there is counted, and neither looked at nor told again."""
        async for meta in self._bucket.list(keys.QUARANTINE):
            key, _, note = meta.key.removeprefix(f"{keys.QUARANTINE}/").rpartition("/")
            parsed = keys.parse_rollout(key)
            if parsed is None or note == "object":
                continue
            self.quarantined += 1
            source = self._source(parsed[0])
            if note == _SOME:
                self._bad_before.add(key)
            elif source.unread(parsed[1]):
                source.finish(parsed[1])

    async def _read_states(self) -> None:
        async for meta in self._bucket.list(keys.GENERATOR_STATES):
            name = keys.parse_generator_state(meta.key)
            if name is None or ((known := self._state_tags.get(name)) is not None and known.tag == meta.tag):
                continue
            try:
                found = await self._bucket.get(meta.key)
                assert found is not None
                state = GeneratorState.decode(found.data, meta.key)
            except NotFound:
                continue
            except WireError as error:
                self._log.warning("state_unreadable", key=meta.key, error=str(error))
                self._state_tags[name] = meta
                continue
            self._state_tags[name] = found.meta
            source = self._source(name)
            self._pacing.note_begun(name, state.begun)
            if source.state is None:
                self._log.info("generator_seen", generator=name, device=state.device)
            if state.hopeless and self._looked:  # what stood there at the start may have been mended since
                self._hopeless = f"generator {name} ended: {state.ended}"
            source.state, source.changed_at = newer(source.state, state), self._clock()

    async def _list_rollouts(self) -> None:
        self._listed_at = self._clock()
        async for meta in self._bucket.list(keys.ROLLOUTS):
            parsed = keys.parse_rollout(meta.key)
            if parsed:
                self._source(parsed[0]).show(parsed[1], meta.tag, self._listed_at)

    def _source(self, name: str) -> Source:
        if name not in self._sources:
            self._sources[name] = Source(name=name, changed_at=self._clock())
        return self._sources[name]

    async def _read(self, key: str) -> None:
        parsed = keys.parse_rollout(key)
        assert parsed is not None
        name, seq = parsed
        source = self._sources[name]
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
                if group_id not in self._where:
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
            version = await self._versions.find(group.policy_version, group.policy_epoch)
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
        if fault is None:
            self.idle_run = 0
            self._arrivals += 1
            self._pending.append(Pending(group=group, version=version, arrival=self._arrivals))
        else:
            self.idle_run += 1
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
            source, seq = self._sources[where[0]], where[1]
            remaining = source.reading[seq]
            remaining.discard(end.group_id)
            if not remaining:
                source.finish(seq)

    async def _quarantine(self, key: str, data: bytes, reason: str, message: str, *, note: str) -> None:
        self.quarantined += 1
        self._log.warning("quarantined", key=key, reason=reason, error=message)
        folder = keys.quarantine(key)
        await self._bucket.put({f"{folder}/object": data})
        await self._bucket.put({f"{folder}/{note}": json.dumps({"key": key, "reason": reason, "message": message}).encode()})

    def _retire_silent(self) -> None:
        now = self._clock()
        for source in self._sources.values():
            if source.retired:
                continue
            patience = max(self._rules.ttl_s, 4 * source.state.period_s if source.state else 0.0)
            ended = source.state is not None and source.state.ended is not None
            if ended or now - source.changed_at > patience:
                source.retire(now)
                if not ended and source.state is not None:
                    self._log.warning("generator_retired", generator=source.name, silent_s=round(now - source.changed_at, 1))

    def _account_missing(self) -> None:
        """A group that was begun and stands in no readable object ends too: as quarantined, or as lost with its generator."""
        for source in self._sources.values():
            if source.state is None or source.settled:
                continue
            all_seen = source.all_seen()
            if not source.retired and (not all_seen or len(source.seen) + len(source.state.open) >= source.state.begun):
                continue
            vanished, unshipped = source.missing_groups()
            overdue = source.retired and self._clock() - source.retired_at > self._rules.ttl_s
            ends = {group_id: "quarantined" for group_id in vanished if all_seen}
            ends |= {group_id: "lost" for group_id in vanished if not all_seen and overdue}
            ends |= {group_id: "lost" for group_id in unshipped if source.retired}
            for group_id, reason in ends.items():
                source.seen.add(int(group_id.rpartition("/")[2]))
                self._drop(group_id, reason)
            source.settled = source.retired and (all_seen or overdue)


def _ids(data: bytes, key: str) -> set[str]:
    """Of the groups that stand in an object of no use, as far as they can be read."""
    try:
        return decode_ids(data, key)[0]
    except WireError:
        return set()
