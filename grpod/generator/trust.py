"""Is it of any use to ask this replica again? A judgement on the ends of its groups alone; `now` comes from outside. Pure.

                         on probation              given up
    unusable_answer      one group at a time       8 in a row, over at least 10 s
    replica_unavailable  one, after a pause as     none in `patience_s`
                         long as it has lasted
    replica_refused      (a 400 is the prompt's)   64 in a row

In a row: without a sound group between. A sound group forgives everything.
"""

from __future__ import annotations

from dataclasses import dataclass, field

UNUSABLE, REFUSED = 8, 64
UNUSABLE_S = 10.0  # a stumble that spoils all that is in flight at once is no habit yet
PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0  # the least and the most, for groups that found the replica away


@dataclass(kw_only=True)
class Trust:
    """Of one replica. Mutable; owned by the generator's loop."""

    patience_s: float
    failures: dict[str, int] = field(default_factory=dict)  # reason -> in a row
    since: float = 0.0  # when the first of them ended
    rest_until: float = 0.0

    def sound(self) -> None:
        self.failures.clear()
        self.rest_until = 0.0

    def failed(self, reason: str, now: float) -> None:
        """Reasons that say nothing of the replica are passed over."""
        if reason not in ("unusable_answer", "replica_unavailable", "replica_refused"):
            return
        if not self.failures:
            self.since = now
        self.failures[reason] = self.failures.get(reason, 0) + 1
        if reason == "replica_unavailable":  # however many groups meet the same moment
            self.rest_until = now + min(LONGEST_PAUSE_S, max(PAUSE_S, now - self.since))

    def room(self, most: int, now: float) -> int:
        """Groups that may be in flight there."""
        if now < self.rest_until:
            return 0
        return 1 if self.failures.keys() & {"unusable_answer", "replica_unavailable"} else most

    def given_up(self, now: float) -> str | None:
        """Why nothing is to be hoped for any more."""
        lasted_s = now - self.since
        if self.failures.get("unusable_answer", 0) >= UNUSABLE and lasted_s >= UNUSABLE_S:
            return f"gives no usable answer: {self._words('unusable_answer')}"
        if self.failures.get("replica_refused", 0) >= REFUSED:
            return f"refuses every prompt: {self._words('replica_refused')}"
        if self.failures.get("replica_unavailable", 0) and lasted_s >= self.patience_s:
            return f"has not answered for {lasted_s:.0f} s: {self._words('replica_unavailable')}"
        return None

    def _words(self, reason: str) -> str:
        return f"{self.failures[reason]} groups in a row were dropped as {reason}"
