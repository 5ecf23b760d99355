"""The generators, as their states tell of them: who lives, how far their objects are read, what will never come.

A state that already stood there when the learner came proves nothing: its generator is given credit once it beats again.
One that stood still for a ttl is retired for good: what it had open is lost, what it had shipped is still read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from grpod.bucket.base import Bucket, ObjectMeta
from grpod.errors import NotFound, WireError
from grpod.learner.pacing import Pacing
from grpod.learner.source import Source
from grpod.telemetry.log import get_logger
from grpod.wire import keys
from grpod.wire.checkpoint import Cursor
from grpod.wire.state import GeneratorState, newer


class Roster:
    """Owned by the feed."""

    def __init__(
        self, bucket: Bucket, pacing: Pacing, *, cursors: Mapping[str, Cursor], ttl_s: float, clock: Callable[[], float]
    ) -> None:
        self._bucket, self._pacing, self._ttl_s, self._clock = bucket, pacing, ttl_s, clock
        self._sources = {name: Source.resumed(name, cursor, clock()) for name, cursor in cursors.items()}
        self._tags: dict[str, ObjectMeta] = {}
        self._looked = False  # once: what stood there before is of another time
        self._hopeless = ""
        self._log = get_logger()

    def __iter__(self) -> Iterator[Source]:
        return iter(self._sources.values())

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def source(self, name: str) -> Source:
        """Known from now on, if it was not."""
        if name not in self._sources:
            self._sources[name] = Source(name=name, changed_at=self._clock())
        return self._sources[name]

    def live(self) -> list[str]:
        return [source.name for source in self if source.live]

    def serving(self) -> list[str]:
        """Live, and with a replica that holds a version. What one that is not has been credited holds up nobody else: it may
        be minutes until it goes on, and its groups are as old then as those that were made in their place."""
        return [source.name for source in self if source.live and source.state is not None and source.state.resident]

    def retired(self) -> list[str]:
        return sorted(source.name for source in self if source.retired and source.state is not None)

    def cursors(self) -> dict[str, Cursor]:
        return {source.name: source.cursor for source in self}

    def lows(self) -> dict[str, int]:
        return {source.name: source.low for source in self}

    def refusals(self, version: int, epoch: int) -> tuple[int, int]:
        """(live generators that refused this version, live generators)"""
        states = [source.state for source in self if source.live and source.state]
        return sum(f"{version}-{epoch}" in state.refused for state in states), len(states)

    def hopeless(self) -> str | None:
        """Why no generator can make a group that is worth anything; None while one tries."""
        return None if self.live() else self._hopeless or None

    async def read_states(self) -> None:
        async for meta in self._bucket.list(keys.GENERATOR_STATES):
            name = keys.parse_generator_state(meta.key)
            if name is None or ((known := self._tags.get(name)) is not None and known.tag == meta.tag):
                continue
            try:
                found = await self._bucket.get(meta.key)
                assert found is not None
                state = GeneratorState.decode(found.data, meta.key)
            except NotFound:
                continue
            except WireError as error:
                self._log.warning("state_unreadable", key=meta.key, error=str(error))
                self._tags[name] = meta
                continue
            self._tags[name] = found.meta
            self._note(self.source(name), state)
        self._looked = True

    def _note(self, source: Source, state: GeneratorState) -> None:
        if source.state is None:
            self._log.info("generator_seen", generator=source.name, device=state.device)
        if self._looked and not source.awake:
            source.awake = True
            self._pacing.note_begun(source.name, state.begun)
        if state.hopeless and self._looked:  # what stood there at the start may have been mended since
            self._hopeless = f"generator {source.name} ended: {state.ended}"
        source.state, source.changed_at = newer(source.state, state), self._clock()
        source.settled = False  # a retired one that only stood still tells at its end what it had begun meanwhile

    def retire_silent(self) -> None:
        now = self._clock()
        for source in self:
            if source.retired:
                continue
            patience = max(self._ttl_s, 4 * source.state.period_s if source.state else 0.0)
            ended = source.state is not None and source.state.ended is not None
            if ended or now - source.changed_at > patience:
                source.retire(now)
                if not ended and source.state is not None:
                    self._log.warning("generator_retired", generator=source.name, silent_s=round(now - source.changed_at, 1))

    def missing(self) -> Iterator[tuple[str, str]]:
        """(group id, reason): begun, and in no readable object: quarantined, or lost with its generator. Told once."""
        for source in self:
            if source.state is None or source.settled:
                continue
            all_seen = source.all_seen()
            if not source.retired and (not all_seen or len(source.seen) + len(source.state.open) >= source.state.begun):
                continue
            vanished, unshipped = source.missing_groups()
            overdue = source.retired and self._clock() - source.retired_at > self._ttl_s
            ends = {group_id: "quarantined" for group_id in vanished if all_seen}
            ends |= {group_id: "lost" for group_id in vanished if not all_seen and overdue}
            ends |= {group_id: "lost" for group_id in unshipped if source.retired}
            for group_id, reason in ends.items():
                source.seen.add(int(group_id.rpartition("/")[2]))
                yield group_id, reason
            source.settled = source.retired and (all_seen or overdue)
