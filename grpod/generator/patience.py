"""How long one answer is waited for: ten times the slowest of the last ones, and a minute at least.

A request that a server has lost never fails by itself, and its group would hold a version, and the learner, for ever. Before
the first answer nothing is known of this model on this device: then as long as it may take to start. A group that was not
answered in time is given twice as long when it is asked again: it may be the long one among short ones.
"""

from __future__ import annotations

from collections import deque

FACTOR, LEAST_S, REMEMBERED = 10.0, 60.0, 64


class Patience:
    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._took: deque[float] = deque(maxlen=REMEMBERED)

    def answered(self, seconds: float) -> None:
        self._took.append(seconds)

    def seconds(self, timed_out: int = 0) -> float:
        """`timed_out`: times that this group was not answered in time."""
        usual = FACTOR * max(self._took) if self._took else self._first_s
        return max(LEAST_S, usual) * 2.0**timed_out
