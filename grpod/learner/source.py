"""One generator as the feed sees it: which of its objects are read to the end, which of its groups have been seen."""

from __future__ import annotations

from dataclasses import dataclass, field

from grpod.wire import keys
from grpod.wire.checkpoint import Cursor
from grpod.wire.state import GeneratorState

LOOK_AHEAD = 2  # numbers beyond next_seq: an object is visible before the state that counts it


@dataclass(kw_only=True)
class Source:
    """Mutable; owned by the feed."""

    name: str
    low: int = 0
    done: set[int] = field(default_factory=set)  # numbers > low that are read to the end
    reading: dict[int, set[str]] = field(default_factory=dict)  # number -> its groups that have not ended
    listed: dict[int, tuple[str, float]] = field(default_factory=dict)  # number -> its tag in a listing, and since when
    seen: set[int] = field(default_factory=set)  # its own groups that stand in a readable object
    state: GeneratorState | None = None
    changed_at: float = 0.0  # own monotonic clock: first seen, or the state last changed
    awake: bool = False  # it has written its state since this learner came
    retired: bool = False
    retired_at: float = 0.0
    settled: bool = False  # retired, and everything it ever said is accounted for

    @classmethod
    def resumed(cls, name: str, cursor: Cursor, now: float) -> Source:
        return cls(name=name, low=cursor.low, done=set(cursor.done), changed_at=now)

    @property
    def cursor(self) -> Cursor:
        return Cursor(low=self.low, done=sorted(self.done))

    @property
    def live(self) -> bool:
        return self.awake and not self.retired and self.state is not None and self.state.ended is None

    def show(self, seq: int, tag: str, now: float) -> None:
        """A listing has shown it."""
        if self.unread(seq) and self.listed.get(seq, ("", 0.0))[0] != tag:
            self.listed[seq] = (tag, now)

    def wanted(self, settled_at: float) -> list[str]:
        """Keys that may hold something new: what its state tells of, and what a listing has shown unchanged since then."""
        if self.settled and not self.listed:
            return []
        next_seq = self.state.next_seq if self.state else 0
        ahead = range(self.low, next_seq + LOOK_AHEAD) if self.state else ()
        settled = [seq for seq, (_, since) in self.listed.items() if since <= settled_at]
        return [keys.rollout(self.name, seq) for seq in sorted({*ahead, *settled}) if self.unread(seq)]

    def unread(self, seq: int) -> bool:
        return seq >= self.low and seq not in self.done and seq not in self.reading

    def retire(self, now: float) -> None:
        self.retired, self.retired_at = True, now

    def all_seen(self) -> bool:
        """Every object that it says to have shipped has been read, or given up."""
        return self.state is not None and not any(self.unread(seq) for seq in range(self.low, self.state.next_seq))

    def finish(self, seq: int) -> None:
        """Every group of object `seq` has ended."""
        self.reading.pop(seq, None)
        self.listed.pop(seq, None)
        self.done.add(seq)
        while self.low in self.done:
            self.done.discard(self.low)
            self.low += 1

    def missing_groups(self) -> tuple[list[str], list[str]]:
        """(groups that were shipped but stand in no readable object, groups that will never be shipped).

        The first may be told once `all_seen`, the second once it is retired.
        """
        assert self.state is not None
        still_open = set(self.state.open)
        gone = [f"{self.name}/{n}" for n in range(self.state.begun) if n not in self.seen]
        return [g for g in gone if g not in still_open], [g for g in gone if g in still_open]
