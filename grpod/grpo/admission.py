"""The learner's verdict on a group, values in, a word out: `verdict` asks whether it may be trained on, `trainable` whether
there is anything in it to learn from. None means yes; each other word is a row of the README's table of drop reasons.

    foreign_run      another run's id                        unknown_version  no manifest of its version is to be found
    foreign_base     made with another base model            adapter_hash     the version exists, with other weights
    foreign_epoch    published by a learner that had lost    stale            lag > max_lag
                     its lease, and is not followed
    token_id         an id that the model does not have      too_long         more tokens than the model has positions

    all_truncated    every completion was cut                all_masked       no token is left under the loss masks
    zero_spread      all rewards are equal

That a group has not ended before is asked first, by who knows the ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpod.grpo.advantage import has_spread
from grpod.wire.rollout import Group, Rollout


@dataclass(frozen=True, kw_only=True)
class View:
    """What holds for every group of a run."""

    run_id: str
    base_fingerprint: str
    max_lag: int
    vocab_size: int
    max_positions: int = 0  # prompt and completion tokens together that the model can place; 0: no limit is known


def verdict(
    group: Group, view: View, *, base_fingerprint: str, canonical: bool | None, adapter_sha256: str | None, lag: int
) -> str | None:
    """`base_fingerprint` is that of the object in which the group came; the rest is what the learner knows of the version
    that the group names: does it count, which weights has it, how far is it behind the newest. None: it is not known."""
    if group.run_id != view.run_id:
        return "foreign_run"
    if base_fingerprint != view.base_fingerprint:
        return "foreign_base"
    if canonical is None:
        return "unknown_version"
    if not canonical:
        return "foreign_epoch"
    if adapter_sha256 != group.adapter_sha256:
        return "adapter_hash"
    completions = [rollout.completion_ids for rollout in group.rollouts]
    if any(not 0 <= i < view.vocab_size for ids in (group.prompt_ids, *completions) for i in ids):
        return "token_id"
    if view.max_positions and len(group.prompt_ids) + max(map(len, completions)) > view.max_positions:
        return "too_long"
    if lag > view.max_lag:
        return "stale"
    return None


def trainable(group: Group, *, mask_truncated: bool) -> str | None:
    """Asked of an admitted group. A truncated completion's reward counts in its group's mean even where it is not trained."""
    if mask_truncated and all(rollout.truncated for rollout in group.rollouts):
        return "all_truncated"
    if not any(any(trained_mask(rollout, mask_truncated=mask_truncated)) for rollout in group.rollouts):
        return "all_masked"
    if not has_spread([rollout.reward for rollout in group.rollouts]):
        return "zero_spread"
    return None


def trained_mask(rollout: Rollout, *, mask_truncated: bool) -> tuple[int, ...]:
    """1 for each completion token that the loss sums over and its denominators count."""
    return (0,) * len(rollout.loss_mask) if mask_truncated and rollout.truncated else rollout.loss_mask
