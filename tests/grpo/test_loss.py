"""The loss on bare numbers; tests/learner has it on a model."""

from __future__ import annotations

import itertools
import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpod.config import LossSection
from grpod.grpo.correction import correction
from grpod.grpo.loss import COUNTS, Loss, policy_loss, token_weights

KINDS = get_args(LossSection.model_fields["kind"].annotation)
CORRECTIONS = get_args(LossSection.model_fields["correction"].annotation)
EVERY = [(kind, fix, beta) for kind in KINDS for fix in CORRECTIONS for beta in (0.0, 0.1)]
LENGTHS, REWARDED = (3, 5, 1), (1.5, -0.5, -1.0)


def batch(lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor]:
    """(log-probs that ask for a gradient, mask)"""
    mask_BT = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    logprobs_BT = -torch.rand(mask_BT.shape, generator=torch.Generator().manual_seed(1)) * 3
    return logprobs_BT.requires_grad_(), mask_BT


def run(
    learner_BT: Tensor,
    generator_BT: Tensor,
    mask_BT: Tensor,
    kind: str = "dapo",
    fix: str = "none",
    beta: float = 0.0,
    *,
    advantages: tuple[float, ...] = REWARDED,
    weights: list[float] | None = None,
    **section: Any,
) -> tuple[Loss, Tensor]:
    """And the gradient by the learner's log-probs."""
    weights = weights or token_weights(kind, mask_BT.sum(1).tolist(), length_limit=8)
    learner_BT.grad = None
    loss = policy_loss(
        learner_logprobs_BT=learner_BT,
        generator_logprobs_BT=generator_BT,
        mask_BT=mask_BT,
        advantages_B=torch.tensor(advantages),
        token_weights_B=torch.tensor(weights),
        section=LossSection(kind=kind, correction=fix, kl_beta=beta, **section),  # type: ignore[arg-type]
        base_logprobs_BT=learner_BT.detach() - 0.1 if beta else None,
    )
    loss.loss.backward()
    assert learner_BT.grad is not None
    return loss, learner_BT.grad.clone()


def count(loss: Loss, name: str) -> float:
    return float(loss.counts_K[COUNTS.index(name)])


@pytest.mark.parametrize(("kind", "fix"), [(kind, fix) for kind in KINDS for fix in CORRECTIONS])
def test_at_ratio_1_the_gradient_is_that_of_reinforce(kind: str, fix: str) -> None:
    learner_BT, mask_BT = batch()
    loss, grad_BT = run(learner_BT, learner_BT.detach().clone(), mask_BT, kind, fix)
    by_token = {"dapo": [1 / 9] * 3, "cispo": [1 / 9] * 3, "dr_grpo": [1 / 24] * 3}
    weight = by_token.get(kind, [1 / 9, 1 / 15, 1 / 3])  # 1 / (rollouts * tokens)
    expected_BT = -torch.tensor(weight)[:, None] * torch.tensor(REWARDED)[:, None] * mask_BT
    torch.testing.assert_close(grad_BT, expected_BT)
    assert float(loss.loss.detach()) == pytest.approx(float(expected_BT.sum()), abs=1e-6)
    assert (count(loss, "ratio"), count(loss, "outside"), count(loss, "capped"), count(loss, "clip_low")) == (9, 0, 0, 0)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo"])
def test_the_gradient_is_that_of_the_clipped_surrogate_of_ppo(kind: str) -> None:
    learner_BT, mask_BT = batch()
    generator_BT = learner_BT.detach() + torch.tensor([-0.5, 0.5, -0.1, 0.1, 0.0])  # each side of the clip range, and inside
    loss, grad_BT = run(learner_BT, generator_BT, mask_BT, kind, clip_low=0.2, clip_high=0.3)
    learner_BT.grad = None
    advantages_B1 = torch.tensor(REWARDED)[:, None]
    ratio_BT = (learner_BT - generator_BT).exp()
    surrogate_BT = torch.minimum(ratio_BT * advantages_B1, ratio_BT.clamp(0.8, 1.3) * advantages_B1)
    weights = torch.tensor(token_weights(kind, mask_BT.sum(1).tolist(), length_limit=8))[:, None]
    expected = -(surrogate_BT * weights)[mask_BT].sum()
    expected.backward()
    torch.testing.assert_close(loss.loss, expected)
    torch.testing.assert_close(grad_BT, learner_BT.grad)
    high_BT = (ratio_BT > 1.3) & (advantages_B1 > 0) & mask_BT
    low_BT = (ratio_BT < 0.8) & (advantages_B1 < 0) & mask_BT
    assert high_BT.any()
    assert low_BT.any()
    assert (count(loss, "clip_high"), count(loss, "clip_low")) == (high_BT.sum(), low_BT.sum())


def test_gspo_has_one_ratio_for_a_completion() -> None:
    learner_BT, mask_BT = batch((2, 2))
    generator_BT = learner_BT.detach() - torch.tensor([[0.3, -0.1], [2.0, 2.0]])
    loss, grad_BT = run(learner_BT, generator_BT, mask_BT, "gspo", advantages=(1.0, 1.0))
    assert grad_BT[0].tolist() == pytest.approx([-math.exp(0.1) / 4] * 2)
    assert grad_BT[1].tolist() == [0.0, 0.0]  # beyond 1 + clip_high as a whole
    assert count(loss, "clip_high") == 2


def test_cispo_keeps_the_gradient_of_what_it_clips() -> None:
    learner_BT, mask_BT = batch((2, 2))
    loss, grad_BT = run(learner_BT, learner_BT.detach() - 2.0, mask_BT, "cispo", advantages=(1.0, -1.0), clip_high=0.28)
    assert grad_BT.tolist() == [pytest.approx([-1.28 / 4] * 2), pytest.approx([1.28 / 4] * 2)]
    assert count(loss, "clip_high") == 4


@pytest.mark.parametrize(("fix", "weight"), [("none", math.e**2), ("tis", 1.5), ("mask", 0.0)])
def test_a_correction_bounds_what_a_token_weighs(fix: str, weight: float) -> None:
    learner_BT, mask_BT = batch((1,))
    loss, grad_BT = run(learner_BT, learner_BT.detach() - 2.0, mask_BT, "dapo", fix, advantages=(-1.0,), ratio_cap=1.5)
    assert float(grad_BT) == pytest.approx(weight)
    assert correction(fix, 1.5).weight(math.e**2) == pytest.approx(weight)  # type: ignore[arg-type]
    assert count(loss, "capped") == (fix != "none")


@given(st.floats(0.01, 100), st.sampled_from(CORRECTIONS), st.floats(1.01, 10))
def test_tis_and_mask_never_weigh_more_than_the_cap(ratio: float, fix: str, cap: float) -> None:
    weight = correction(fix, cap).weight(ratio)  # type: ignore[arg-type]
    assert weight in (ratio, 0.0) if fix != "tis" else weight == min(ratio, cap)
    assert fix == "none" or weight <= cap


@pytest.mark.parametrize(("kind", "fix", "beta"), EVERY)
def test_what_stands_under_the_mask_changes_nothing(kind: str, fix: str, beta: float) -> None:
    learner_BT, mask_BT = batch()
    generator_BT = learner_BT.detach() - 0.1
    mask_BT[0, 1] = False
    tame, tame_grad = run(learner_BT, generator_BT, mask_BT, kind, fix, beta)
    for impossible in (-300.0, -math.inf, math.inf, math.nan):
        wild, wild_grad = run(learner_BT, generator_BT.masked_fill(~mask_BT, impossible), mask_BT, kind, fix, beta)
        assert torch.equal(wild.loss, tame.loss)
        assert torch.equal(wild.counts_K, tame.counts_K)
        assert torch.equal(wild_grad, tame_grad)
    assert not tame_grad[~mask_BT].any()


@pytest.mark.parametrize(("kind", "fix", "beta"), EVERY)
def test_an_impossible_log_prob_is_finite_and_counted(kind: str, fix: str, beta: float) -> None:
    learner_BT, mask_BT = batch()
    for logprob, sign in itertools.product((-120.0, -1e30, 200.0), (1.0, -1.0)):
        generator_BT = learner_BT.detach().clone()
        generator_BT[0, 1] = logprob
        loss, grad_BT = run(learner_BT, generator_BT, mask_BT, kind, fix, beta, advantages=(sign, -sign, -sign))
        assert torch.isfinite(grad_BT).all()
        assert torch.isfinite(loss.counts_K).all()
        assert torch.isfinite(loss.loss)
        assert count(loss, "capped") + count(loss, "clip_low") + count(loss, "clip_high") >= 1
        assert count(loss, "outside") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_equal_rewards_give_no_gradient(kind: str) -> None:
    learner_BT, mask_BT = batch()
    _, grad_BT = run(learner_BT, learner_BT.detach() - 0.5, mask_BT, kind, "tis", advantages=(0.0, 0.0, 0.0))
    assert not grad_BT.any()


@settings(max_examples=25)
@given(st.sampled_from(EVERY), st.sets(st.integers(1, 2)))
def test_splitting_into_micro_batches_leaves_the_gradient(every: tuple[str, str, float], cuts: set[int]) -> None:
    kind, fix, beta = every
    learner_BT, mask_BT = batch()
    generator_BT = learner_BT.detach() + 0.4
    weights = token_weights(kind, mask_BT.sum(1).tolist(), length_limit=8)
    whole, whole_grad = run(learner_BT, generator_BT, mask_BT, kind, fix, beta)
    edges = [0, *sorted(cuts), 3]
    grads, losses, counts = [], [], []
    for a, b in itertools.pairwise(edges):
        part_BT = learner_BT.detach()[a:b].clone().requires_grad_()
        part, grad = run(
            part_BT, generator_BT[a:b], mask_BT[a:b], kind, fix, beta, advantages=REWARDED[a:b], weights=weights[a:b]
        )
        grads.append(grad)
        losses.append(part.loss)
        counts.append(part.counts_K)
    torch.testing.assert_close(torch.cat(grads), whole_grad)
    torch.testing.assert_close(torch.stack(losses).sum(), whole.loss)
    torch.testing.assert_close(torch.stack(counts).sum(0), whole.counts_K)


def test_a_truncated_completion_counts_in_no_denominator() -> None:
    # 30 tokens, 5 of them cut, a loss of 1 for each that is left: 1.0, not 25/30
    learner_BT, mask_BT = batch((10, 15, 5))
    mask_BT[2] = False
    for kind in ("dapo", "grpo", "cispo", "gspo"):
        loss, _ = run(learner_BT, learner_BT.detach().clone(), mask_BT, kind, advantages=(-1.0, -1.0, -1.0))
        assert float(loss.loss.detach()) == pytest.approx(1.0)
    assert token_weights("dr_grpo", [10, 15, 0], length_limit=15) == [1 / 30, 1 / 30, 0.0]


def test_the_kl_pulls_towards_the_base() -> None:
    learner_BT, mask_BT = batch()
    loss, grad_BT = run(learner_BT, learner_BT.detach().clone(), mask_BT, beta=0.5, advantages=(0.0, 0.0, 0.0))
    # base = learner - 0.1: k3 = exp(-0.1) - (-0.1) - 1, its slope by the learner's log-prob 1 - exp(-0.1)
    assert count(loss, "kl") == pytest.approx(9 * (math.exp(-0.1) + 0.1 - 1), rel=1e-4)
    torch.testing.assert_close(grad_BT, 0.5 / 9 * (1 - math.exp(-0.1)) * mask_BT)
