"""What a step says about itself, as metric names and numbers: TRL's names where the meaning is the same. Pure.

A mean over tokens is over the trained tokens of the whole step, whichever micro-batch they were in.
"""

from __future__ import annotations

from collections.abc import Sequence

from grpod.config import LossSection
from grpod.grpo.loss import COUNTS
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


def summary(
    counts: Sequence[Sequence[float]], groups: Sequence[Group], lags: Sequence[int] | None, section: LossSection
) -> dict[str, float]:
    """`counts`: one row a rollout, sums over its trained tokens, of COUNTS and of the entropy."""
    total = _sums(counts)
    tokens = total["tokens"]
    metrics = {
        "batch/trained_tokens_per_step": tokens,
        "ratio": total["ratio"] / tokens,
        "ratio_outside": total["outside"] / tokens,
        "ratio_capped": total["capped"] / tokens,
        "clip_ratio/low_mean": total["clip_low"] / tokens,
        "clip_ratio/high_mean": total["clip_high"] / tokens,
        "clip_ratio/region_mean": (total["clip_low"] + total["clip_high"]) / tokens,
        "entropy": total["entropy"] / tokens,
    }
    if section.kl_beta > 0:
        metrics["kl"] = total["kl"] / tokens
    if lags is not None:
        lag_of = [lag for group, lag in zip(groups, lags, strict=True) for _ in group.rollouts]
        for name, wanted in (("ratio_mismatch", True), ("ratio_lag", False)):
            part = _sums([row for row, lag in zip(counts, lag_of, strict=True) if (lag == 0) is wanted])
            if part["tokens"]:
                metrics[f"{name}/mean"] = part["ratio"] / part["tokens"]
                metrics[f"{name}/outside"] = part["outside"] / part["tokens"]
    return metrics


def _sums(rows: Sequence[Sequence[float]]) -> dict[str, float]:
    return {name: sum(row[i] for row in rows) for i, name in enumerate((*COUNTS, "entropy"))}
