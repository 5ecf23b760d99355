"""Who has how much credit: the running side of `credits.py`. Counts are cumulative per generator and never fall."""

from __future__ import annotations

import math
from collections.abc import Mapping

from grpod.learner import credits

_MEMORY_S = 30.0  # throughput is measured over about this long


class Pacing:
    def __init__(self, granted: Mapping[str, int] | None = None, ended: Mapping[str, int] | None = None) -> None:
        self.granted = dict(granted or {})
        self.ended = dict(ended or {})
        self._pace: dict[str, tuple[float, float]] = {}  # generator -> (decayed count of ends, when)

    def note_begun(self, generator: str, begun: int) -> None:
        """A learner that resumes may know of less credit than its forerunner had given."""
        self.granted[generator] = max(begun, self.granted.get(generator, 0))

    def note_end(self, generator: str, now: float) -> None:
        self.ended[generator] = self.ended.get(generator, 0) + 1
        self._pace[generator] = (self._decayed(generator, now) + 1.0, now)

    def outstanding(self, generator: str) -> int:
        return max(0, self.granted.get(generator, 0) - self.ended.get(generator, 0))

    def grant(self, live: list[str], room: int, now: float) -> bool:
        """True when somebody got credit."""
        paces = {name: self._decayed(name, now) for name in live}
        known = [pace for pace in paces.values() if pace > 0]
        newcomer = sum(known) / len(known) if known else 1.0
        given = credits.share(
            room,
            {name: self.outstanding(name) for name in live},
            {name: pace if name in self._pace else newcomer for name, pace in paces.items()},
        )
        for name, count in given.items():
            self.granted[name] = self.granted.get(name, 0) + count
        return bool(given)

    def _decayed(self, generator: str, now: float) -> float:
        count, when = self._pace.get(generator, (0.0, now))
        return count * math.exp(-(now - when) / _MEMORY_S)
