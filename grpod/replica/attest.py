"""Does this replica answer with the weights that the name stands for? Pure judgements on log-probs of the probe.

    learner    base_logprobs, logprobs          written in the version's manifest, temperature 1
    engine     base, adapter                    asked of the replica, the same tokens

The engine's difference (adapter - base) is regressed on the learner's, so that what its arithmetic does to both alike cancels:

    slope = sum(dl * de) / sum(dl * dl)         1 for the right weights, 0 for none, anything for others

A slope that is wrong beyond its standard error refuses the version; so does a distance to the learner's log-probs far above
the noise that the base alone shows. Where the adapter has too little effect to tell, the version is *unproven*: accepted on
the word of the canary, an adapter whose effect cannot be overlooked. What an engine's arithmetic cannot resolve it swallows
without a trace, the same for every token: so a residual is never taken for less than half of the base's noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SLOPE_TOLERANCE = 0.1
SIGNIFICANT = 5.0  # standard errors
TELLING = 0.1  # standard error of the slope above which a wrong slope could not be told from a right one
NOISE_FACTOR = 4.0  # how far beyond the base's noise the adapter may be
FLOOR, FLOOR_SHARE = 2e-5, 2e-3  # nats rms, and share of the adapter's effect: where the bases agree to the last bit
RESOLVED = 0.5  # of the noise; smaller moves may be rounded away
OTHER_BASE = 0.5  # nats rms: no arithmetic of the same weights is so far off (bf16: 0.05)
OTHER_BASE_SHARE = 0.5  # nor by so much of how the log-probs differ from token to token: two models that know nothing are near
OTHER_BASE_LEAST = 0.01  # nats rms; where they hardly differ at all
CANARY_LEAST = 3e-3  # nats rms that the canary must move, also without any noise; the learner made it move 0.01 at least
CANARY_FACTOR = 2.5  # and beyond the noise: two scores of one model are sqrt(2) of it apart when nothing repeats exactly
CANARY_MOST = 0.3  # and no more than this; on a model that can be moved at all the learner made it move 1


@dataclass(frozen=True, kw_only=True)
class Verdict:
    kind: Literal["proven", "unproven", "refused"]
    slope: float
    slope_error: float
    to_adapter: float  # rms distance of the engine's adapter log-probs to the learner's
    to_base: float  # and to the learner's base
    noise: float  # rms distance of the two bases

    def describe(self) -> dict[str, float]:
        return {name: round(float(value), 6) for name, value in vars(self).items() if name != "kind"}

    def __str__(self) -> str:
        return (
            f"distance to the adapter {self.to_adapter:.3g}, to the base {self.to_base:.3g} nats (rms) at a noise of "
            f"{self.noise:.3g}; slope {self.slope:.3f} ± {self.slope_error:.3f}, 1 is right"
        )


def judge(
    *, base_logprobs: Sequence[float], logprobs: Sequence[float], engine_base: Sequence[float], engine: Sequence[float]
) -> Verdict:
    """All four of the same length."""
    learner_moves = [a - b for a, b in zip(logprobs, base_logprobs, strict=True)]
    engine_moves = [a - b for a, b in zip(engine, engine_base, strict=True)]
    power, noise = math.fsum(d * d for d in learner_moves), rms(base_logprobs, engine_base)
    slope, error = math.nan, math.inf
    if power > 0:
        slope = math.fsum(a * b for a, b in zip(learner_moves, engine_moves, strict=True)) / power
        rest = math.fsum((b - slope * a) ** 2 for a, b in zip(learner_moves, engine_moves, strict=True))
        spread = max(math.sqrt(rest / max(1, len(learner_moves) - 1)), RESOLVED * noise, FLOOR)
        error = spread / math.sqrt(power)
    to_adapter, to_base = rms(logprobs, engine), rms(base_logprobs, engine)
    wrong = power > 0 and abs(slope - 1) > SLOPE_TOLERANCE + SIGNIFICANT * error
    far = to_adapter > NOISE_FACTOR * noise + FLOOR + FLOOR_SHARE * rms(logprobs, base_logprobs)
    telling = error <= TELLING
    return Verdict(
        kind="refused" if wrong or far else "proven" if telling else "unproven",
        slope=slope,
        slope_error=error,
        to_adapter=to_adapter,
        to_base=to_base,
        noise=noise,
    )


def same_base(base_logprobs: Sequence[float], engine_base: Sequence[float]) -> bool:
    mean = math.fsum(base_logprobs) / len(base_logprobs)
    spread = rms(base_logprobs, [mean] * len(base_logprobs))
    return rms(base_logprobs, engine_base) <= min(OTHER_BASE, max(OTHER_BASE_LEAST, OTHER_BASE_SHARE * spread))


def canary_wanted(base_logprobs: Sequence[float], engine_base: Sequence[float]) -> float:
    """Nats rms by which the canary must move the engine's log-probs: if less, it answers to an adapter's name without it."""
    return min(CANARY_MOST, max(CANARY_LEAST, CANARY_FACTOR * rms(base_logprobs, engine_base)))


def rms(a: Sequence[float], b: Sequence[float]) -> float:
    return math.sqrt(math.fsum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / len(a))
