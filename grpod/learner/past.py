"""Why is the importance ratio not 1? Two causes, told apart by asking the learner twice about the same tokens:

    learner(now) / generator  =  learner(now) / learner(version)   x   learner(version) / generator
         `ratio`                       `ratio_lag`                          `ratio_mismatch`
                                 training went on meanwhile           the engine computes otherwise

So the learner keeps the adapters that it has handed out, as the bytes that the publisher holds anyway, by their hash: that
is how a rollout names its weights. A mean of 1.00 can hide both: the share of tokens outside [0.9, 1.1] stands beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from grpod.grpo.correction import MAX_LOG_RATIO
from grpod.grpo.loss import BAND

MAX_BYTES = 1 << 30  # of all kept adapters; the newest always stays


class Past:
    """The newest `limit` adapters."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: dict[str, bytes] = {}

    def note(self, sha256: str, weights: bytes) -> None:
        self._kept.pop(sha256, None)
        self._kept[sha256] = weights
        while len(self._kept) > 1 and (len(self._kept) > self._limit or sum(map(len, self._kept.values())) > MAX_BYTES):
            del self._kept[next(iter(self._kept))]

    def find(self, sha256: str) -> bytes | None:
        return self._kept.get(sha256)


def ratio_parts(now_N: Sequence[Tensor], then_N: Sequence[Tensor], generator_N: Sequence[Tensor]) -> dict[str, float]:
    """Log-probs of the same trained tokens, by micro-batch: of the present weights, of the version's, and as sampled."""
    metrics = {}
    for mean, outside, above, below in (
        ("ratio_lag/mean", "ratio_lag/outside", now_N, then_N),
        ("ratio_mismatch/mean", "ratio_mismatch/outside", then_N, generator_N),
    ):
        pairs = zip(above, below, strict=True)
        ratios = [r for a, b in pairs for r in (a - b).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().tolist()]
        metrics[mean] = sum(ratios) / len(ratios)
        metrics[outside] = sum(not BAND[0] <= r <= BAND[1] for r in ratios) / len(ratios)
    return metrics
