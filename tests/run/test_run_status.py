from __future__ import annotations

import json
import time

import pytest

from grpod.bucket.memory import MemoryBucket
from grpod.errors import ConfigError
from grpod.run.status import render, status
from grpod.wire import keys
from grpod.wire.lease import Beat
from tests.run.made import MadeRun, dropped, trained

pytestmark = pytest.mark.anyio


@pytest.fixture
async def run(request: pytest.FixtureRequest) -> MadeRun:
    return await MadeRun(MemoryBucket(f"memory://{request.node.nodeid}")).begin()


async def test_where_there_is_no_run(request: pytest.FixtureRequest) -> None:
    with pytest.raises(ConfigError, match=r"no run at memory:.*run\.json"):
        await status(MemoryBucket(f"memory://{request.node.nodeid}"))


async def test_a_run_that_nobody_has_begun(run: MadeRun) -> None:
    found = await status(run.bucket)
    assert found.as_json() == {
        "url": run.bucket.url,
        "run_id": "0123456789ab",
        "state": "waiting",
        "ended": False,
        "reason": None,
        "version": None,
        "step": 0,
        "steps": None,
        "epoch": 0,
        "holder": None,
        "updated_s": None,
        "waiting_for": 0,
        "reward": {"first": None, "last": None},
        "lag": None,
        "backlog": None,
        "groups": {"generated": 0, "trained": 0, "dropped": {}, "lost": 0, "pending": 0},
        "generators": [],
    }
    assert "no learner yet" in render(found)


async def test_a_run_that_goes_on(run: MadeRun) -> None:
    await run.claim(1)
    await run.learner(1, 7, 6, waiting_for=3, updated_at=time.time() - 100)
    await run.generator("g1", 12, open=["g1/11"], resident=["5-1", "6-1"], device="cuda:0", started_at=1.0)
    await run.generator("g0", 4, ended="SIGTERM", refused=["6-1"], started_at=2.0, updated_at=time.time() - 500)
    await run.rollouts("old", 0, "old/0", drops={"old/1": "reward_timeout"})  # its state is gone
    segment = await run.ledger(5, [*trained("g1/0", "g1/1"), *dropped("zero_spread", "g1/2"), *dropped("lost", "g0/3")])
    await run.checkpoint(5, [segment], version=4)
    for seq, step in enumerate(range(1, 8)):
        await run.metrics(1, seq, "reward", {step: step / 10})
    await run.metrics(1, 7, "lag/mean", {6: 0.5, 7: 1.5})
    await run.metrics(1, 8, "sample/rollout_queue_size", {7: 4.0})
    found = (await status(run.bucket)).as_json()
    assert json.loads(json.dumps(found)) == found
    assert (found["version"], found["step"], found["steps"], found["epoch"]) == (6, 7, 80, 1)
    assert (found["ended"], found["holder"], found["waiting_for"]) == (False, "pid 7 on elsewhere", 3)
    assert found["reward"] == {"first": pytest.approx(0.3), "last": pytest.approx(0.5)}
    assert (found["lag"], found["backlog"]) == (1.5, 4)
    assert found["updated_s"] >= 100
    assert found["groups"] == {"generated": 18, "trained": 2, "dropped": {"zero_spread": 1}, "lost": 1, "pending": 14}
    first, second = found["generators"]
    assert first.items() >= {"name": "g1", "begun": 12, "open": 1, "resident": ["5-1", "6-1"], "device": "cuda:0"}.items()
    assert (second["name"], second["ended"], second["refused"]) == ("g0", "SIGTERM", ["6-1"])
    assert second["age_s"] >= 500
    text = render(await status(run.bucket))
    for words in ("0.300 → 0.500", "7 of 80", "18 generated: 2 trained", "g1", "cuda:0", "8 min ago", "ended: SIGTERM"):
        assert words in text


async def test_it_says_whether_anybody_learns(run: MadeRun) -> None:
    await run.claim(1)
    await run.learner(1, 7, 6, waiting_for=3)
    found = await status(run.bucket)
    assert found.state == "running"
    assert "waits for 3 groups" in render(found)
    await run.learner(1, 7, 6, waiting_for=3, updated_at=time.time() - 45, counter=2)
    found = await status(run.bucket)
    assert found.state == "silent"
    assert "no learner" in render(found)
    await run.put(keys.beat(1), Beat(nonce="n1", epoch=1, counter=9, released=True).encode())
    found = await status(run.bucket)
    assert found.state == "stopped"
    assert "stopped at step 7" in render(found)
    assert "waits for" not in render(found)


async def test_after_the_end_nothing_is_pending(run: MadeRun) -> None:
    await run.claim(1)
    await run.learner(1, 79, 78)
    await run.generator("g1", 5, open=["g1/4"])
    await run.final(80, [await run.ledger(80, trained("g1/0", "g1/1"))], version=79)
    found = (await status(run.bucket)).as_json()
    assert found["groups"] == {"generated": 5, "trained": 2, "dropped": {"run_ended": 3}, "lost": 0, "pending": 0}
    assert (found["ended"], found["reason"], found["step"], found["version"]) == (True, "steps", 80, 79)
    assert "ended (steps)" in render(await status(run.bucket))


async def test_the_state_of_a_holder_that_was_replaced_is_ignored(run: MadeRun) -> None:
    await run.claim(1)
    await run.learner(1, 50, 49)
    await run.claim(2, 50, (40, 39, 1, 39))
    await run.checkpoint(40, version=39)
    await run.adapter(49)
    await run.adapter(51)  # a zombie's
    found = await status(run.bucket)
    assert (found.step, found.version, found.updated_s, found.epoch) == (40, 49, None, 2)


async def test_rewards_of_steps_that_were_taken_back_do_not_count(run: MadeRun) -> None:
    await run.claim(1)
    await run.claim(2, 9, (6, 6, 1, 6))
    await run.metrics(1, 0, "reward", dict.fromkeys(range(1, 11), 0.0))  # 7 to 10 are undone
    await run.metrics(2, 0, "reward", {7: 1.0})
    found = await status(run.bucket)
    assert found.reward_first == 0.0
    assert found.reward_last == pytest.approx(1 / 5)


async def test_the_greatest_epoch_wins_on_overlap_and_what_is_torn_leaves_a_gap(run: MadeRun) -> None:
    await run.claim(1)
    await run.claim(2, 9, (6, 6, 1, 6))
    await run.metrics(1, 0, "reward", {6: 0.0})
    await run.metrics(2, 0, "reward", {6: 1.0})
    await run.put(keys.metrics("learner-e1", 1), b"PAR1")
    await run.put(keys.metrics("g1", 1), b"nobody reads a generator's")
    await run.put(keys.metrics("learner-ex", 1), b"nor this")
    assert (await status(run.bucket)).reward_last == 1.0


async def test_of_a_long_run_only_the_ends_are_read(run: MadeRun) -> None:
    await run.claim(1)
    for step in range(1, 201):
        await run.metrics(1, step, "reward", {step: float(step)})
    read = []
    real = run.bucket.fetch

    async def fetch(items: object) -> None:
        read.extend(items)  # type: ignore[call-overload]
        await real(items)  # type: ignore[arg-type]

    run.bucket.fetch = fetch  # type: ignore[method-assign]
    found = await status(run.bucket)
    assert (found.reward_first, found.reward_last) == (3.0, 198.0)
    assert len(read) == 128
