from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from grpod.grpo.admission import View, trainable, trained_mask, verdict
from grpod.wire.rollout import Group, Rollout, Sampling

VIEW = View(run_id="run1", base_fingerprint="base", max_lag=2, vocab_size=100, max_positions=8)
KNOWN: dict[str, Any] = {"base_fingerprint": "base", "canonical": True, "adapter_sha256": "sha", "lag": 2}


def rollout(reward: float, *, ids: tuple[int, ...] = (9, 2), mask: tuple[int, ...] | None = None, end: str = "stop") -> Rollout:
    return Rollout(
        completion_ids=ids,
        generator_logprobs=(-1.0,) * len(ids),
        loss_mask=mask or (1,) * len(ids),
        reward=reward,
        finish_reason=end,
        seed=0,
    )


def group(*rollouts: Rollout) -> Group:
    return Group(
        run_id="run1",
        group_id="g/0",
        group_size=len(rollouts),
        prompt_id="p",
        data_epoch=0,
        prompt_row=0,
        prompt_ids=(5, 6, 7),
        policy_version=3,
        policy_epoch=1,
        adapter_sha256="sha",
        sampling=Sampling(temperature=1.0),
        generator="g",
        created_at=0.0,
        rollouts=rollouts,
    )


GOOD = group(rollout(1.0), rollout(0.0))


def test_a_group_of_the_oldest_lag_allowed_is_admitted() -> None:
    assert verdict(GOOD, VIEW, **KNOWN) is None


@pytest.mark.parametrize(
    ("found", "known", "reason"),
    [
        (replace(GOOD, run_id="run2"), {}, "foreign_run"),
        (GOOD, {"base_fingerprint": "another"}, "foreign_base"),
        (GOOD, {"canonical": None, "adapter_sha256": None}, "unknown_version"),
        (GOOD, {"canonical": False}, "foreign_epoch"),
        (GOOD, {"adapter_sha256": "another"}, "adapter_hash"),
        (GOOD, {"lag": 3}, "stale"),
        (replace(GOOD, prompt_ids=(5, 100)), {}, "token_id"),
        (group(rollout(1.0), rollout(0.0, ids=(9, 100))), {}, "token_id"),
        (group(rollout(1.0), rollout(0.0, ids=(9, -1))), {}, "token_id"),
        (group(rollout(1.0), rollout(0.0, ids=(9,) * 6)), {}, "too_long"),
    ],
)
def test_each_fault_has_its_word(found: Group, known: dict[str, Any], reason: str) -> None:
    assert verdict(found, VIEW, **{**KNOWN, **known}) == reason


def test_a_model_without_a_known_limit_takes_any_length() -> None:
    assert verdict(group(rollout(1.0, ids=(9,) * 500)), replace(VIEW, max_positions=0), **KNOWN) is None


def test_equal_rewards_are_replaced() -> None:
    assert trainable(group(*[rollout(0.35)] * 7), mask_truncated=True) == "zero_spread"


def test_a_truncated_completion_counts_in_the_spread_though_it_is_not_trained() -> None:
    found = group(rollout(1.0), rollout(1.0), rollout(0.0, end="length"))
    assert trainable(found, mask_truncated=True) is None
    assert [sum(trained_mask(r, mask_truncated=True)) for r in found.rollouts] == [2, 2, 0]
    assert [sum(trained_mask(r, mask_truncated=False)) for r in found.rollouts] == [2, 2, 2]


def test_a_group_of_truncated_completions_only_is_dropped_while_they_are_masked() -> None:
    found = group(rollout(1.0, end="length"), rollout(0.0, end="length"))
    assert trainable(found, mask_truncated=True) == "all_truncated"
    assert trainable(found, mask_truncated=False) is None


def test_a_group_with_no_token_under_its_masks_is_dropped() -> None:
    found = group(rollout(1.0, mask=(0, 0)), rollout(0.0, mask=(0, 0)), rollout(0.0, end="length"))
    assert trainable(found, mask_truncated=True) == "all_masked"
    assert trainable(found, mask_truncated=False) is None
