"""A reward says how good a completion is; its advantage says how much better than the others of its group.

    advantage_i = (reward_i - mean) / std       std over the group (population), all in float64     scale "std"
    advantage_i =  reward_i - mean                                                                  scale "none"

Laws: a shift of all rewards changes nothing; equal rewards give zeros; with scale "std", |advantage| <= sqrt(size - 1),
which no set of numbers exceeds (one rollout differs from all others), so rounding is not allowed to either.

"Equal" is decided on the rewards, never on the std: rewards cross the wire as float32, and 7 x 0.35 normalised by their
own rounding noise would train on it at full strength.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

RELATIVE_SPREAD = 1e-6  # of the largest |reward|, at least of 1: what float32 cannot tell apart is equal


def has_spread(rewards: Sequence[float]) -> bool:
    return max(rewards) - min(rewards) > RELATIVE_SPREAD * max(1.0, *(abs(reward) for reward in rewards))


def advantages(rewards: Sequence[float], *, scale: Literal["std", "none"] = "std") -> list[float]:
    """One value a rollout, in their order; zeros without a spread. Rewards are finite (the wire refuses others)."""
    if not has_spread(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if scale == "none":
        return centred
    largest = max(abs(value) for value in centred)  # squares of what lies far from 1 would over- or underflow
    std = largest * math.sqrt(math.fsum((value / largest) ** 2 for value in centred) / len(centred))
    bound = math.sqrt(len(rewards) - 1)
    return [max(-bound, min(bound, value / std)) for value in centred]
