"""How long one answer is waited for: ten times the slowest of the last ones, and a minute at least.

A request that a server has lost never fails by itself, and its group would hold a version, and the learner, for ever. Before
the first answer nothing is known of this model on this device: then as long as it may take to start.
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

    @property
    def seconds(self) -> float:
        return max(LEAST_S, FACTOR * max(self._took)) if self._took else max(LEAST_S, self._first_s)
