"""One objective for every kind: each trained token adds  - token_weight · coefficient · advantage · learner_logprob.

The coefficient carries no gradient. It is the importance ratio r, corrected (`correction.py`) and clipped, so at r = 1 it
is 1 and the gradient is REINFORCE's, whatever the kind. Kinds differ in three places:

    kind      token weight             ratio                clip: coefficient 0 when the ratio has left [1-low, 1+high]
    grpo      1 / (rollouts · n_i)     of the token         ... in the direction of the advantage  (DeepSeekMath 2024)
    dr_grpo   1 / (rollouts · limit)   of the token         the same                               (Liu et al. 2025)
    dapo      1 / tokens               of the token         the same, high > low                   (Yu et al. 2025)
    gspo      1 / (rollouts · n_i)     exp(mean log r)      the same, whole completions            (Zheng et al. 2025)
    cispo     1 / tokens               of the token         none is dropped: min(r, 1+high)        (MiniMax-M1 2025)

    rollouts, tokens: of the whole step, trained ones only;  n_i: trained tokens of rollout i;  limit: max_new_tokens

For r inside the clip range this is the gradient of PPO's min(r·A, clip(r)·A) against the generator's log-probs, exactly:
d(r·A) = r·A·d(logprob). A detached coefficient leaves nothing that could overflow on the way back.

Denominators are passed in as weights computed over the step: how it is cut into micro-batches changes nothing.
Shapes: B rollouts of a micro-batch, T positions of its longest completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpod.config import LossSection
from grpod.grpo.correction import MAX_LOG_RATIO, correction

BAND = (0.9, 1.1)  # tokens outside are counted: a mean ratio of 1.00 hides them


@dataclass(frozen=True, kw_only=True)
class Loss:
    loss: Tensor  # scalar: this micro-batch's part of the step's loss
    counts_K: Tensor  # sums over the trained tokens of what COUNTS names; no gradient


COUNTS = ("tokens", "ratio", "outside", "clip_low", "clip_high", "capped", "kl")


def token_weights(kind: str, num_trained: Sequence[int], *, length_limit: int) -> list[float]:
    """What each trained token of rollout i weighs; `num_trained` are those of every rollout of the step."""
    num_rollouts = sum(1 for n in num_trained if n)
    num_tokens = sum(num_trained)
    if kind in ("dapo", "cispo"):
        return [1.0 / num_tokens if n else 0.0 for n in num_trained]
    if kind == "dr_grpo":
        return [1.0 / (num_rollouts * length_limit) if n else 0.0 for n in num_trained]
    return [1.0 / (num_rollouts * n) if n else 0.0 for n in num_trained]


def policy_loss(
    *,
    learner_logprobs_BT: Tensor,
    generator_logprobs_BT: Tensor,
    mask_BT: Tensor,
    advantages_B: Tensor,
    token_weights_B: Tensor,
    section: LossSection,
    base_logprobs_BT: Tensor | None = None,
) -> Loss:
    """All float32 but the mask (bool). Values under the mask may be anything, NaN too: they are replaced before any use.

    `base_logprobs_BT` turns on the KL term, kl_beta · k3 (Schulman 2020): exp(d) - d - 1 with d = base - learner.
    """
    zero = learner_logprobs_BT.new_zeros(())
    learner_BT = torch.where(mask_BT, learner_logprobs_BT, zero)
    apart_BT = learner_BT.detach() - torch.where(mask_BT, generator_logprobs_BT, zero)
    log_ratio_BT = apart_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_BT = log_ratio_BT.exp()
    num_B = mask_BT.sum(1)
    used_BT = ratio_BT
    if section.kind == "gspo":
        mean_B1 = apart_BT.sum(1, keepdim=True) / num_B.clamp(min=1)[:, None]
        used_BT = mean_B1.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().expand_as(ratio_BT)

    fix = correction(section.correction, section.ratio_cap)
    low, high = 1.0 - section.clip_low, 1.0 + section.clip_high
    advantages_B1 = advantages_B[:, None]
    coefficient_BT = used_BT.clamp(max=fix.ceiling)
    capped_BT = (used_BT > fix.ceiling) | (used_BT < fix.floor) | (used_BT > fix.limit) | (apart_BT != log_ratio_BT)
    coefficient_BT = torch.where((used_BT < fix.floor) | (used_BT > fix.limit), zero, coefficient_BT)
    if section.kind == "cispo":
        low_BT, high_BT = torch.zeros_like(mask_BT), used_BT > high
        value_BT = coefficient_BT = coefficient_BT.clamp(max=high)
    else:
        low_BT, high_BT = (used_BT < low) & (advantages_B1 < 0), (used_BT > high) & (advantages_B1 > 0)
        value_BT = torch.where(low_BT | high_BT, used_BT.clamp(low, high), coefficient_BT)
        coefficient_BT = torch.where(low_BT | high_BT, zero, coefficient_BT)

    # its value is the surrogate's, its gradient the coefficient's: learner - learner.detach() is 0 with a slope of 1
    objective_BT = advantages_B1 * (value_BT + coefficient_BT * (learner_BT - learner_BT.detach()))
    loss_BT = -objective_BT
    kl_BT = torch.zeros_like(loss_BT)
    if base_logprobs_BT is not None:
        base_BT = torch.where(mask_BT, base_logprobs_BT, zero)
        apart_from_base_BT = (base_BT - learner_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        kl_BT = apart_from_base_BT.exp() - apart_from_base_BT - 1.0
        loss_BT = loss_BT + section.kl_beta * kl_BT
    trained_BT = mask_BT.to(loss_BT.dtype)
    outside_BT = (ratio_BT < BAND[0]) | (ratio_BT > BAND[1])
    columns = (trained_BT, ratio_BT, outside_BT, low_BT, high_BT, capped_BT, kl_BT.detach())
    counts_K = torch.stack([(column.to(loss_BT.dtype) * trained_BT).sum() for column in columns])
    return Loss(loss=(token_weights_B * (loss_BT * trained_BT).sum(1)).sum(), counts_K=counts_K)
