"""Adapters that are not what their manifest's probe says, in a live run on the embedded replica: refused there, once, with the
distances; no rollout is made under them, and the last good version goes on while it is not too old."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog

from grpod.bucket.memory import MemoryBucket
from grpod.context import Context, Stopping
from grpod.generator import loop as generator
from grpod.run.base_model import fingerprint
from tests.generator.adapters_made import patterned, renamed, step, trained, with_pattern
from tests.generator.loops import ALTERNATE, Outcome, write_config
from tests.generator.scripted import ScriptedLearner

pytestmark = pytest.mark.anyio


async def test_forged_versions_are_refused_and_the_last_good_one_goes_on(tmp_path: Path, tiny_base: Path) -> None:
    bucket = MemoryBucket("memory://forged")
    sections: dict[str, Any] = {"generator": {"engine": "embedded", "remote": {}}, "lora": {"rank": 2, "alpha": 4}}
    config = write_config(
        tmp_path, tiny_base, "", prompts=[{"prompt": "1+1="}], reward=ALTERNATE, bucket=bucket.url, **sections
    )
    learner = ScriptedLearner(bucket, config, trained(config, tiny_base), fingerprint(tiny_base))
    await learner.begin()
    with structlog.testing.capture_logs() as logs:
        async with anyio.create_task_group() as tasks:
            stop = Stopping()
            ctx = Context(config=config, folder=tmp_path, bucket=bucket, stop=stop, roles=("generator",))
            with anyio.fail_after(90):
                tasks.start_soon(generator.run, ctx)
                await script(learner)
                stop.request("done")
    refused = {line["version"]: line["error"] for line in logs if line["event"] == "version_refused"}
    assert sorted(refused) == [3, 4, 5, 6]
    assert len([line for line in logs if line["event"] == "version_refused"]) == 4, "each is told once"
    for version in (4, 5):
        assert "distance to the adapter" in refused[version]
        assert "to the base" in refused[version]
    for version in (3, 6):
        assert "fits no module" in refused[version]
        assert "nats (rms) from the adapter" in refused[version]
    (waits,) = [line for line in logs if line["event"] == "no_version_to_serve"]
    assert (waits["last_good"], waits["lag"]) == (2, 4)

    groups = await Outcome(bucket=bucket, error=None).groups()
    assert Counter(one.policy_version for one in groups) == {0: 1, 1: 1, 2: 2, 7: 1}


async def script(learner: ScriptedLearner) -> None:
    """0 untrained, 1 hardly moved, 2 good | 3 renamed, 4 is 2 by another name, 5 with a field that is dropped, 6 as 3 | 7"""
    policy = learner.policy

    async def one_more(done: int) -> None:
        await learner.allow(1)
        await learner.shipped(done)

    await learner.publish(0, *learner.made())
    await one_more(1)
    step(policy, 1e-8)
    await learner.publish(1, *learner.made())
    await one_more(2)
    step(policy, 1e-2, times=4)
    second, scores = learner.made()
    await learner.publish(2, second, scores)
    await one_more(3)
    step(policy, 1e-2)
    third, scores = learner.made()
    await learner.publish(3, renamed(third), scores)
    await learner.refused(3)
    await one_more(4)  # under version 2, at lag 1
    await learner.publish(4, second, scores)
    await learner.refused(4)
    await learner.publish(5, patterned(third), with_pattern(learner))
    await learner.refused(5)
    await learner.publish(6, renamed(third), scores)
    await learner.refused(6)
    await learner.allow(1)  # version 2 is 4 behind now, run.max_lag is 2: it waits
    await learner.publish(7, third, scores)
    await learner.shipped(5)
