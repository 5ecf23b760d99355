"""One step of the policy: its gradient is the one that is meant, whatever the layout, and no number that it meets breaks it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from grpod.config import LossSection
from grpod.grpo.advantage import advantages
from grpod.grpo.loss import token_weights
from grpod.learner.policy import StepReport
from tests.learner.policies import (
    FOUR,
    PROMPT,
    A,
    B,
    C,
    Policies,
    apart,
    gradient,
    gradient_of,
    group,
    on_policy,
    plain_logprobs,
    rollout,
    weights,
)

KINDS = get_args(LossSection.model_fields["kind"].annotation)
CORRECTIONS = get_args(LossSection.model_fields["correction"].annotation)
LAYOUTS: list[dict[str, Any]] = [
    {"share": True, "token_budget": 8192},  # one micro-batch, prompts shared
    {"share": True, "token_budget": 16},  # several
    {"share": False, "token_budget": 8192},  # a row a rollout, padded
    {"share": False, "token_budget": 16},
]
TWO = (group(*FOUR), group(rollout((20, 21), 0.2), rollout((22,), 0.9), rollout((23, 24, 2), 0.1), prompt=(30, 31, 32, 33, 34)))


@pytest.fixture(scope="module")
def policies(tiny_base: Path) -> Policies:
    return Policies(tiny_base)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_at_ratio_1_the_gradient_is_that_of_reinforce(policies: Policies, kind: str, temperature: float) -> None:
    policy = policies(moved=True, loss={"kind": kind})
    groups = [on_policy(policy, replace(g, sampling=replace(g.sampling, temperature=temperature))) for g in TWO]
    lengths = [len(r.completion_ids) for g in groups for r in g.rollouts]
    weight = iter(token_weights(kind, lengths, length_limit=8))

    def reinforce() -> torch.Tensor:
        total = torch.zeros(())
        for g in groups:
            for r, a in zip(g.rollouts, advantages([r.reward for r in g.rollouts]), strict=True):
                total = total - next(weight) * a * plain_logprobs(policy, g.prompt_ids, r.completion_ids, temperature).sum()
        return total

    expected = gradient_of(policy, reinforce)
    assert max(float(value.abs().max()) for value in expected.values()) > 1e-3
    assert apart(gradient(policy, groups), expected) < 2e-6
    metrics = policy.step(groups).metrics
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert (metrics["ratio_outside"], metrics["ratio_capped"], metrics["clip_ratio/region_mean"]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_splitting_and_packing_leave_the_gradient_and_the_metrics(policies: Policies, kind: str, beta: float) -> None:
    gradients, reports = [], []
    for layout in LAYOUTS:
        policy = policies(moved=True, loss={"kind": kind, "kl_beta": beta}, **layout)
        gradients.append(gradient(policy, TWO))
        reports.append(policy.step(TWO).metrics)
    assert {report["batch/microbatches_per_step"] for report in reports} >= {1.0, 2.0}
    for other in gradients[1:]:
        assert apart(gradients[0], other) < 2e-6
    same = [n for n in reports[0] if n.partition("/")[0] not in ("perf", "batch")]
    for report in reports[1:]:
        assert [report[n] for n in same] == pytest.approx([reports[0][n] for n in same], rel=1e-4, abs=1e-5)


def test_equal_rewards_give_no_gradient_and_masked_tokens_have_none(policies: Policies) -> None:
    policy = policies(moved=True)
    same = group(*(replace(r, reward=0.35) for r in FOUR))
    assert not any(value.any() for value in gradient(policy, [same]).values())
    one = (rollout(A, 1.0, mask=(1, 0, 0)), *FOUR[1:])
    other = (rollout((9, 33, 44), 1.0, mask=(1, 0, 0)), *FOUR[1:])  # other tokens, but under the mask and after the trained one
    assert apart(gradient(policy, [group(*one)]), gradient(policy, [group(*other)])) == 0.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_impossible_log_probs(policies: Policies, kind: str, correction: str, beta: float) -> None:
    tame, wild = (group(rollout(A, 1.0, lp, (1, 0, 1)), *FOUR[1:]) for lp in ((-1.0, -1.0, -1.0), (-1.0, -300.0, -1.0)))
    unmasked = group(rollout(A, 1.0, (-1.0, -120.0, -1.0)), *FOUR[1:])
    for layout in LAYOUTS[1:3]:
        results = []
        for found in (tame, wild, unmasked):
            policy = policies(loss={"kind": kind, "correction": correction, "kl_beta": beta}, **layout)
            report = policy.step([found])
            assert not report.skipped
            assert all(math.isfinite(value) for value in report.metrics.values())
            results.append((weights(policy), report.metrics))
        (tame_weights, tame_metrics), (wild_weights, wild_metrics), (unmasked_weights, metrics) = results
        assert apart(tame_weights, wild_weights) == 0.0
        for name in ("loss", "grad_norm", "ratio", "entropy"):
            assert tame_metrics[name] == wild_metrics[name]
        assert all(torch.isfinite(value).all() for value in unmasked_weights.values())
        assert metrics["ratio_capped"] + metrics["clip_ratio/region_mean"] > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_length_of_a_truncated_completion_changes_nothing(policies: Policies, layout: dict[str, Any]) -> None:
    results = []
    for length in (5, 200):
        policy = policies(**layout)
        metrics = policy.step([group(*FOUR[:3], rollout([21] * length, 0.0, end="length"))]).metrics
        results.append(weights(policy))
        assert metrics["batch/trained_tokens_per_step"] == len(A) + len(B) + len(C)
    assert apart(*results) <= 1e-7
    without = policies(**layout)
    without.step([group(*FOUR[:3])])
    assert apart(results[0], weights(without)) > 1e-5  # its reward does count in the group's mean


def test_groups_without_a_spread_have_no_gradient(policies: Policies) -> None:
    """But their tokens count in the denominators, so the step of the others is smaller."""
    equal = group(*(rollout(A, 1.0) for _ in range(4)))
    policy = policies()
    before = weights(policy)
    report = policy.step([equal])
    assert (report.skipped, report.metrics["grad_norm"], apart(before, weights(policy))) == (False, 0.0, 0.0)
    alone, beside = (policies().step([*TWO, *more]).metrics["grad_norm"] for more in ([], [equal]))
    assert 0 < beside < alone


def test_a_step_of_nothing_but_truncated_completions_is_no_step(policies: Policies) -> None:
    policy = policies()
    before = weights(policy)
    cut = group(*(rollout([21] * 8, float(i % 2), end="length") for i in range(4)))
    report = policy.step([cut])
    assert report == StepReport(metrics=report.metrics, skipped=True, reason="nothing_to_train")
    assert (apart(before, weights(policy)), policy.num_steps) == (0.0, 0)
    assert not policies(loss={"mask_truncated": False}).step([cut]).skipped


def test_a_step_that_is_not_finite_is_not_made(policies: Policies) -> None:
    policy = policies(moved=True)
    policy.step(TWO)
    parameter = next(iter(policy._adapter.values()))
    kept = parameter.detach().clone()
    parameter.data[0, 0] = math.inf
    moments = policy.snapshot().optimizer
    report = policy.step(TWO)
    assert (report.skipped, report.reason, policy.num_steps) == (True, "not_finite", 1)
    assert all(math.isfinite(value) for value in report.metrics.values())
    assert policy.snapshot().optimizer == moments
    parameter.data.copy_(kept)
    assert not policy.step(TWO).skipped


def test_the_ratio_is_taken_apart_at_the_weights_of_the_version(policies: Policies) -> None:
    policy = policies(moved=True, learning_rate=0.05)
    sha = policy.snapshot().sha256
    made = replace(on_policy(policy, group(*FOUR)), adapter_sha256=sha)
    engine = replace(
        made, rollouts=tuple(replace(r, generator_logprobs=tuple(x - 0.2 for x in r.generator_logprobs)) for r in made.rollouts)
    )
    fresh = policy.step([engine] * 32).metrics
    assert fresh["ratio_mismatch/mean"] == pytest.approx(math.exp(0.2), abs=1e-4)
    assert (fresh["ratio_mismatch/outside"], fresh["ratio_lag/outside"]) == (1.0, 0.0)
    before = weights(policy)
    later = policy.step([made] * 32).metrics
    assert (later["ratio_mismatch/mean"], later["ratio_mismatch/outside"]) == (pytest.approx(1.0, abs=1e-5), 0.0)
    assert later["ratio_lag/outside"] > 0
    assert later["ratio_lag/mean"] == pytest.approx(later["ratio"], abs=1e-4)
    assert apart(before, weights(policy)) > 0
    assert not any(name.startswith("ratio_lag") for name in policy.step([replace(made, adapter_sha256="?")] * 32).metrics)


def test_a_bandit_is_learnt(policies: Policies) -> None:
    """The reward of a token is its being even: the policy samples, is told, and comes to prefer even ones."""
    policy = policies(learning_rate=0.03)
    temperature = 0.05  # the random model's logits hardly differ, and its frozen head leaves them little room
    random = torch.Generator().manual_seed(0)
    means = []
    for _ in range(20):
        with torch.no_grad():
            logits = policy._model.causal(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0, -1]
        logprobs = (logits / temperature).log_softmax(-1)
        tokens = torch.multinomial(logprobs.exp(), 32, replacement=True, generator=random).tolist()
        means.append(sum(token % 2 == 0 for token in tokens) / 32)
        found = [rollout([t], float(t % 2 == 0), [float(logprobs[t])]) for t in tokens]
        policy.step([group(*found[i : i + 8], temperature=temperature) for i in range(0, 32, 8)])
    assert means[0] < 0.7
    assert sum(means[-5:]) / 5 > 0.9
