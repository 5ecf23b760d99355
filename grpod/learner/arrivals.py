"""What reached the learner since its last step, as numbers: over all sound groups, trained or not.

A policy that is always right, or always cut, has no group to be trained: a mean over the trained ones would hide it.
"""

from __future__ import annotations

from statistics import fmean, pstdev

from grpod.wire.rollout import Group


class Arrivals:
    """Mutable; filled by the feed, emptied by the recorder."""

    def __init__(self) -> None:
        self._rewards: list[float] = []
        self._parts: dict[str, list[float]] = {}  # by reward function, where it applied
        self._lengths: list[int] = []
        self._truncated = 0

    def __len__(self) -> int:
        """Rollouts."""
        return len(self._rewards)

    def add(self, group: Group) -> None:
        for rollout in group.rollouts:
            self._rewards.append(rollout.reward)
            self._lengths.append(len(rollout.completion_ids))
            self._truncated += rollout.truncated
            for name, value in rollout.rewards.items():
                if value is not None:
                    self._parts.setdefault(name, []).append(value)

    def metrics(self) -> dict[str, float]:
        """Empty when nothing came."""
        if not self._rewards:
            return {}
        return {
            "reward": fmean(self._rewards),
            "reward_std": pstdev(self._rewards),
            **{f"rewards/{name}": fmean(values) for name, values in self._parts.items()},
            "completions/mean_length": fmean(self._lengths),
            "completions/min_length": min(self._lengths),
            "completions/max_length": max(self._lengths),
            "completions/clipped_ratio": self._truncated / len(self._lengths),
        }

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]
