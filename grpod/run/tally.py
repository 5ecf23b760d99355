"""How a run's groups ended, from which ids are known and which rows its ledger has. Pure.

known      <generator>/0 … <generator>/<begun-1> of every generator's state, and every id that stands in an object
ledger     one row an id: trained | dropped for a reason | lost
the rest   pending; when the run has ended: dropped as run_ended
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from grpod.wire.tables import End

LOST, QUARANTINED, RUN_ENDED = "lost", "quarantined", "run_ended"


@dataclass(kw_only=True)
class Known:
    """A set of group ids that stays small for what has been begun in order."""

    begun: Mapping[str, int] = field(default_factory=dict)  # generator -> how many
    others: set[str] = field(default_factory=set)

    def __contains__(self, group_id: str) -> bool:
        generator, _, number = group_id.rpartition("/")
        return group_id in self.others or (number.isdecimal() and int(number) < self.begun.get(generator, 0))

    def __len__(self) -> int:
        return sum(self.begun.values()) + len(self.others)

    def add(self, group_ids: Iterable[str]) -> None:
        self.others.update(group_id for group_id in group_ids if group_id not in self)


@dataclass(frozen=True, kw_only=True)
class Groups:
    generated: int
    trained: int
    dropped: Mapping[str, int]  # by reason
    lost: int  # begun by a generator that then vanished
    pending: int

    def as_json(self) -> dict[str, object]:
        return {**vars(self), "dropped": dict(self.dropped)}


def tally(known: Known, ends: Iterable[End], *, ended: bool) -> Groups:
    by_id = {end.group_id: end for end in ends}
    everything = Known(begun=known.begun, others=set(known.others))
    everything.add(by_id)
    dropped = Counter(end.reason for end in by_id.values() if end.end == "dropped")
    lost = dropped.pop(LOST, 0)
    rest = len(everything) - len(by_id)
    if ended and rest:
        dropped[RUN_ENDED] += rest
    return Groups(
        generated=len(everything),
        trained=sum(end.end == "trained" for end in by_id.values()),
        dropped=dict(dropped.most_common()),
        lost=lost,
        pending=0 if ended else rest,
    )


def faults(known: Known, ends: Iterable[End], *, given_up: Iterable[str] = ()) -> list[str]:
    """What breaks "every group ends once". `given_up`: ids that their generator dropped itself."""
    found: list[str] = []
    seen: dict[str, End] = {}
    own = set(given_up)
    for end in ends:
        if end.group_id in seen:
            found.append(f"group {end.group_id} ended twice: {_words(seen[end.group_id])}, and {_words(end)}")
            continue
        seen[end.group_id] = end
        if end.group_id not in known and end.reason not in (LOST, QUARANTINED):
            found.append(f"group {end.group_id} is in the ledger ({_words(end)}), and nobody has begun it")
        if end.end == "trained" and end.group_id in own:
            found.append(f"group {end.group_id} was {_words(end)}, and its generator had dropped it")
    return found


def _words(end: End) -> str:
    return f"trained at step {end.step}" if end.end == "trained" else f"dropped at step {end.step} as {end.reason}"
