"""What a step says about itself, as metric names and numbers: TRL's names where the meaning is the same. Pure.

A mean over tokens is over the trained tokens of the whole step, whichever micro-batch they were in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grpod.config import LossSection
from grpod.wire.rollout import Group


def step_size(groups: Sequence[Group]) -> dict[str, float]:
    """What went into the step. Lengths and rewards are told of all groups that came, not of these alone (arrivals.py)."""
    return {"batch/groups_per_step": len(groups), "batch/samples_per_step": sum(len(group.rollouts) for group in groups)}


def summary(counts: Mapping[str, float], section: LossSection) -> dict[str, float]:
    """`counts`: sums over all trained tokens of the step, of COUNTS and of the entropy."""
    tokens = counts["tokens"]
    metrics = {
        "batch/trained_tokens_per_step": tokens,
        "ratio": counts["ratio"] / tokens,
        "ratio_outside": counts["outside"] / tokens,
        "ratio_capped": counts["capped"] / tokens,
        "clip_ratio/low_mean": counts["clip_low"] / tokens,
        "clip_ratio/high_mean": counts["clip_high"] / tokens,
        "clip_ratio/region_mean": (counts["clip_low"] + counts["clip_high"]) / tokens,
        "entropy": counts["entropy"] / tokens,
    }
    if section.kl_beta > 0:
        metrics["kl"] = counts["kl"] / tokens
    return metrics
