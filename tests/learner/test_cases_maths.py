"""Rollout objects in, one step, an adapter out: the whole learner, from the bucket to the bucket. What is masked, cut or equal
changes nothing; what is wild is held; what is not a number is kept out."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

from grpod.bucket.memory import MemoryBucket
from grpod.errors import NotReady
from grpod.learner import record
from grpod.run.metrics_log import MetricWriter
from grpod.wire.rollout import Rollout
from grpod.wire.tables import Metric
from tests.learner.alone import ROLLOUTS, A, B, C, Learning, learning, rollout

pytestmark = pytest.mark.anyio
Weights = dict[str, NDArray[Any]]


def memory() -> MemoryBucket:
    return MemoryBucket(f"memory://{secrets.token_hex(4)}")


async def train(base: Path, rollouts: Sequence[Rollout], **section: Any) -> tuple[Weights, dict[str, float]]:
    """One step on one group: version 1, and the metrics."""
    async with learning(memory(), base, **section) as run:
        await run.ship("found", 0, [await run.group("found/0", rollouts)])
        assert await run.end() is None
        assert [end.end for end in (await run.ends()).values()] == ["trained"]
        return await run.weights(1), last(await run.metrics())


def last(rows: Sequence[Metric]) -> dict[str, float]:
    assert all(math.isfinite(row.value) for row in rows)
    return {row.name: row.value for row in sorted(rows, key=lambda row: row.time)}


def apart(one: Weights, other: Weights) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def first_is(logprobs: Sequence[float], mask: Sequence[int] = (1, 1, 1)) -> tuple[Rollout, ...]:
    return (rollout(A, 1.0, generator_logprobs=tuple(logprobs), loss_mask=tuple(mask)), *ROLLOUTS[1:])


LOSSES = [  # each kind and each correction once; all pairs of them are for tests/learner/test_policy_step.py
    {"kind": "dapo", "correction": "tis", "kl_beta": 0.1},
    {"kind": "gspo", "correction": "none"},
    {"kind": "cispo", "correction": "mask"},
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: "-".join(map(str, loss.values())))
async def test_what_stands_under_the_mask_changes_nothing_and_what_is_wild_is_held(
    tiny_base: Path, loss: dict[str, Any]
) -> None:
    tame, said = await train(tiny_base, first_is((-1, -1, -1), (1, 0, 1)), loss=loss)
    wild, same = await train(tiny_base, first_is((-1, -300, -1), (1, 0, 1)), loss=loss)
    assert apart(tame, wild) == 0.0
    assert (said["loss"], said["grad_norm"]) == (same["loss"], same["grad_norm"])
    held, counted = await train(tiny_base, first_is((-1, -120, -1)), loss=loss)
    assert all(np.isfinite(values).all() for values in held.values())
    assert counted["ratio_capped"] > 0 or counted["clip_ratio/high_mean"] > 0


@pytest.mark.parametrize("value", [-math.inf, math.nan])
@pytest.mark.parametrize("mask", [(1, 1, 1), (1, 0, 1)])
async def test_a_logprob_that_is_no_number_is_quarantined_masked_or_not(tiny_base: Path, value: float, mask: Any) -> None:
    async with learning(memory(), tiny_base) as run:
        bad = await run.group("found/0", first_is((-1, value, -1), mask))
        await run.ship("found", 0, [bad, await run.group("found/1")])
        assert await run.end() is None
        ends = await run.ends()
        assert (ends["found/0"].reason, ends["found/1"].end) == ("quarantined", "trained")
        assert list((await run.quarantine()).values()) == ["logprobs_not_finite"]


async def test_a_cut_completion_is_trained_on_by_no_token_and_its_reward_counts(tiny_base: Path) -> None:
    def with_cut(length: int, reward: float) -> tuple[Rollout, ...]:
        return rollout(A, 1.0), rollout(B, 0.0), rollout(C, 1.0), rollout([21] * length, reward, finish_reason="length")

    short, said = await train(tiny_base, with_cut(5, 0.0))
    long, also = await train(tiny_base, with_cut(200, 0.0))
    assert apart(short, long) <= 1e-7
    assert said["completions/clipped_ratio"] == also["completions/clipped_ratio"] == 0.25
    assert said["loss"] == pytest.approx(also["loss"], abs=1e-7)
    other, _ = await train(tiny_base, with_cut(5, 3.0))
    assert apart(short, other) > 1e-4, "the mean of the group has moved"


async def test_groups_that_are_all_cut_make_no_step_and_hold_nobody_back(
    tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "_SAY_EVERY_S", 0.1)
    monkeypatch.setitem(MetricWriter.__init__.__kwdefaults__, "period_s", 0.1)
    cut = tuple(rollout([21] * 8, float(i % 2), finish_reason="length") for i in range(4))
    async with learning(memory(), tiny_base, steps=2) as run:
        await run.ship("found", 0, [await run.group(f"found/{n}", cut) for n in range(20)])
        await until(run, "completions/clipped_ratio", 1.0)
        assert await run.listed("adapters/v00000001-e000001") == [], "nothing was learnt, so there is no version"
        await run.ship("found", 1, [await run.group(f"found/{n}") for n in (20, 21)])
        assert await run.end() is None
        ends = await run.ends()
        assert {ends[f"found/{n}"].reason for n in range(20)} == {"all_truncated"}
        assert [ends[f"found/{n}"].end for n in (20, 21)] == ["trained", "trained"]


async def until(run: Learning, name: str, value: float) -> None:
    while not any(row.name == name and row.value == value for row in await run.metrics()):
        await run.bucket.changed(0.2)


EQUAL = {
    "six tenths": [0.1] * 6,
    "seven": [0.35] * 7,
    "sums": [0.1 + 0.2] * 4 + [0.3] * 4,
    "large": [1000.1] * 6,
    "one ulp": [1.0] * 7 + [float(np.nextafter(np.float32(1), np.float32(2)))],
}


async def test_rewards_that_are_equal_in_decimal_are_replaced_and_change_nothing(tiny_base: Path) -> None:
    real = tuple(rollout((30 + i, 2), reward) for i, reward in enumerate((0.30, 0.31, 0.30, 0.30)))
    alone, _ = await train(tiny_base, real)
    async with learning(memory(), tiny_base) as run:
        for n, rewards in enumerate(EQUAL.values()):
            group = await run.group(f"found/{n}", [rollout((30 + i, 2), reward) for i, reward in enumerate(rewards)])
            await run.ship("found", n, [group])
        await run.ship("found", 9, [await run.group("found/9", real)])
        assert await run.end() is None
        ends = await run.ends()
        assert {ends[f"found/{n}"].reason for n in range(5)} == {"zero_spread"}
        assert apart(alone, await run.weights(1)) == 0.0


async def test_a_shift_of_all_rewards_trains_the_same(tiny_base: Path) -> None:
    here, _ = await train(tiny_base, ROLLOUTS)
    there, _ = await train(tiny_base, [rollout(r.completion_ids, r.reward + 1000) for r in ROLLOUTS])
    assert apart(here, there) <= 1e-5


async def test_two_hundred_equal_groups_first_do_not_stop_the_run(tiny_base: Path) -> None:
    equal = tuple(rollout((30 + i, 2), 1.0) for i in range(4))
    async with learning(memory(), tiny_base, run={"max_lag": 1}) as run:
        await run.ship("found", 0, [await run.group(f"found/{n}", equal) for n in range(200)])
        await run.ship("found", 1, [await run.group("found/200")])
        assert await run.end() is None
        assert sum(end.reason == "zero_spread" for end in (await run.ends()).values()) == 200


async def test_never_any_spread_ends_with_75_and_how_the_groups_ended_is_kept(tiny_base: Path) -> None:
    equal = tuple(rollout((30 + i, 2), 1.0) for i in range(4))
    async with learning(memory(), tiny_base, give_up_after=30) as run:
        await run.ship("found", 0, [await run.group(f"found/{n}", equal) for n in range(40)])
        error = await run.end()
        assert isinstance(error, NotReady)
        assert "40 groups in a row gave nothing to learn from" in str(error)
        assert "zero_spread" in str(error)
        segments = await run.listed("ledger")
        assert {end.reason for end in (await run.ends(segments)).values()} == {"zero_spread"}
        assert "final/manifest.json" not in await run.listed("final")


async def test_a_run_without_groups_waits_and_is_stopped_in_order(tiny_base: Path) -> None:
    async with learning(memory(), tiny_base) as run:
        await run.manifest()
        run.stop.request("enough")
        with anyio.fail_after(10):
            assert await run.end() is None
