"""What a reward function returned, made plain: one finite float or None a completion, or a `Fault` that names what is wrong.

    accepted   list, tuple, array of one dimension; in it numbers, booleans, their numpy and torch scalars, None
    reward_type        anything else, a text or a nested list included
    reward_length      not one value a completion
    reward_not_finite  NaN, infinite, or too large for the float32 that rollouts keep
Pure, and imports neither numpy nor torch: it runs in the reward worker.
"""

from __future__ import annotations

import decimal
import math
import numbers
import struct
from typing import Any


class Fault(Exception):
    """A group's rewards are refused: `reason` is the word under which the group is dropped."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def plain_rewards(returned: Any, wanted: int) -> list[float | None]:
    values = returned.tolist() if hasattr(returned, "tolist") else returned  # an array; one of no dimension gives a scalar
    if not isinstance(values, list | tuple):
        raise Fault("reward_type", f"got {_words(returned)}, wanted a list of {wanted} numbers")
    if len(values) != wanted:
        raise Fault("reward_length", f"got {len(values)} value{'' if len(values) == 1 else 's'}, wanted {wanted}")
    return [_plain(value, index) for index, value in enumerate(values)]


def _plain(value: Any, index: int) -> float | None:
    number = value.tolist() if hasattr(value, "tolist") else value  # numpy and torch scalars
    if number is None:
        return None
    if not isinstance(number, numbers.Real | decimal.Decimal):  # a bool is a number here, as in Python
        raise Fault("reward_type", f"got {_words(value)} for completion {index}, wanted a number or None")
    try:
        reward = float(number)
    except (OverflowError, ValueError):  # 10**400; a signalling NaN
        raise Fault("reward_not_finite", f"got {_words(value)} for completion {index}, wanted a finite number") from None
    if not fits(reward):
        raise Fault("reward_not_finite", f"got {reward!r} for completion {index}, wanted a finite number (float32)")
    return reward


def fits(reward: float) -> bool:
    """Finite, and still so as float32."""
    try:
        struct.pack("<f", reward)
    except OverflowError:
        return False
    return math.isfinite(reward)


def _words(value: Any) -> str:
    """`1.0 (float)`, short enough for a log line."""
    try:
        text = repr(value)
    except Exception:  # an integer of 5000 digits refuses, and a user's class may do anything
        text = "..."
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
