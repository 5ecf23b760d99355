"""Who has how much credit: the running side of `credits.py`. Counts are cumulative per generator and never fall.

A generator's throughput is what it finished in the time in which it had something to do. Counted over all time it would only
show how much credit it had been given: whoever came late, or had once been slow, would stay small for ever.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from grpod.learner import credits

_MEMORY_S = 30.0  # throughput is measured over about this long
_LEAST_S = 0.01


@dataclass(kw_only=True)
class _Pace:
    """Both fade with time. Owned by `Pacing`."""

    ends: float = 0.0
    busy_s: float = 0.0  # with credit outstanding
    at: float

    @property
    def per_s(self) -> float:
        return self.ends / max(self.busy_s, _LEAST_S)


class Pacing:
    def __init__(self, granted: Mapping[str, int] | None = None, ended: Mapping[str, int] | None = None) -> None:
        self.granted = dict(granted or {})
        self.ended = dict(ended or {})
        self._paces: dict[str, _Pace] = {}

    def note_begun(self, generator: str, begun: int) -> None:
        """A learner that resumes may know of less credit than its forerunner had given."""
        self.granted[generator] = max(begun, self.granted.get(generator, 0))

    def note_end(self, generator: str, now: float) -> None:
        self._pace(generator, now).ends += 1.0
        self.ended[generator] = self.ended.get(generator, 0) + 1

    def outstanding(self, generator: str) -> int:
        return max(0, self.granted.get(generator, 0) - self.ended.get(generator, 0))

    def grant(self, live: list[str], room: int, now: float) -> bool:
        """True when somebody got credit."""
        paces = {name: self._pace(name, now).per_s for name in live}
        known = [pace for pace in paces.values() if pace > 0]
        newcomer = sum(known) / len(known) if known else 1.0
        given = credits.share(
            room, {name: self.outstanding(name) for name in live}, {name: pace or newcomer for name, pace in paces.items()}
        )
        for name, count in given.items():
            self.granted[name] = self.granted.get(name, 0) + count
        return bool(given)

    def _pace(self, generator: str, now: float) -> _Pace:
        """Up to now: what it has outstanding changes after this."""
        pace = self._paces.setdefault(generator, _Pace(at=now))
        fading = math.exp(-(now - pace.at) / _MEMORY_S)
        pace.ends *= fading
        pace.busy_s = pace.busy_s * fading + (now - pace.at if self.outstanding(generator) else 0.0)
        pace.at = now
        return pace
