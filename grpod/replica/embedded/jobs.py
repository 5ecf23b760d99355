"""What the event loop hands to the engine, and what it finds in it afterwards. No torch here.

Written by the engine's thread; the loop reads a choice's lists at any time (they only grow), the rest once `finished`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpod.replica.embedded.lora import Lora
    from grpod.replica.embedded.sampling import Sampling


@dataclass(kw_only=True, eq=False)
class Produced:
    """One choice."""

    dice: random.Random
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    """stop, length or abort"""


@dataclass(kw_only=True, eq=False)
class Job:
    """One prompt."""

    prompt_ids: Sequence[int]
    choices: list[Produced]
    max_tokens: int
    sampling: Sampling
    end_ids: frozenset[int]
    lora: Lora | None
    """None: the base"""
    score: bool
    """log-probs of the prompt are asked for"""
    notify: Callable[[], None]
    """called on the event loop: at the end, and when `stream` is set after each token"""
    stream: bool = False
    prompt_logprobs: list[float] = field(default_factory=list)
    cancelled: bool = False
    """set by the loop when nobody waits for it any more"""

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def longest(self) -> int:
        """Tokens that one row may come to hold."""
        return len(self.prompt_ids) + self.max_tokens


def seeded(n: int, seed: int | None) -> list[Produced]:
    """The choices of one prompt differ; those of one seed come again."""
    source = random.SystemRandom().getrandbits(64) if seed is None else seed
    return [Produced(dice=random.Random(f"{source}/{index}")) for index in range(n)]
