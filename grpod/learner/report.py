"""What a step says about itself, as metric names and numbers: TRL's names where the meaning is the same. Pure.

A mean over tokens is over the trained tokens of the whole step, whichever micro-batch they were in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grpod.config import LossSection
from grpod.wire.rollout import Group


def completions(groups: Sequence[Group]) -> dict[str, float]:
    """Lengths and the share of truncated ones, over all rollouts of `groups`, trained on or not."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return {}
    lengths = [len(rollout.completion_ids) for rollout in rollouts]
    return {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": sum(rollout.truncated for rollout in rollouts) / len(rollouts),
        "batch/groups_per_step": len(groups),
        "batch/samples_per_step": len(rollouts),
    }


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
