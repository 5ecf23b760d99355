"""How much an off-policy token may weigh. A rollout was sampled by an engine with other kernels, under an older version; its
importance ratio r = exp(learner_logprob - generator_logprob) makes the gradient that of the policy in training again, and
has no bound. Three ways to live with that:

    none   weight r         exact, and of unbounded variance; only MAX_LOG_RATIO holds it
    tis    min(r, cap)      truncated importance sampling: Ionides 2008; for the engine mismatch of LLM training
                            Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy training"
    mask   r in [1/cap, cap], else 0     IcePop (Ling team 2025): a token on which the two disagree so far is noise

A grpod step is the only one on its batch, so the proximal policy of PPO *is* the policy in training (its ratio is 1), and
the whole of r, engine mismatch and lag alike, is corrected here. Values only, no tensors: `loss.py` applies them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

MAX_LOG_RATIO = 20.0  # |log r| beyond it is cut, and counted: exp(20) = 5e8 is finite in every dtype that sums are kept in


@dataclass(frozen=True, kw_only=True)
class Correction:
    floor: float  # below it a token weighs nothing
    limit: float  # above it a token weighs nothing
    ceiling: float  # no token weighs more

    def weight(self, ratio: float) -> float:
        return min(ratio, self.ceiling) if self.floor <= ratio <= self.limit else 0.0


def correction(kind: Literal["none", "tis", "mask"], ratio_cap: float) -> Correction:
    if kind == "tis":
        return Correction(floor=0.0, limit=math.inf, ceiling=ratio_cap)
    if kind == "mask":
        return Correction(floor=1.0 / ratio_cap, limit=ratio_cap, ceiling=math.inf)
    return Correction(floor=0.0, limit=math.inf, ceiling=math.inf)
