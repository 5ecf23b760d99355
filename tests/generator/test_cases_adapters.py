"""Adapters that are not what their manifest's probe says, in a live run on the embedded replica: refused there, once, with the
distances; no rollout is made under them, and the last good version goes on while it is not too old."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
import safetensors.numpy
import structlog

from grpod.bucket.memory import MemoryBucket
from grpod.config import Config
from grpod.context import Context, Stopping
from grpod.generator import loop as generator
from grpod.learner.policy import Policy
from grpod.run.base_model import fingerprint
from grpod.wire.keys import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from grpod.wire.rollout import decode_shipment
from tests.generator.loops import ALTERNATE, write_config
from tests.generator.scripted import ScriptedLearner
from tests.learner.policies import FOUR, group

pytestmark = pytest.mark.anyio


def renamed(files: Mapping[str, bytes]) -> dict[str, bytes]:
    tensors = safetensors.numpy.load(files[ADAPTER_WEIGHTS])
    moved = {name.replace("base_model.model.", "base_model.model.language_model."): data for name, data in tensors.items()}
    assert moved.keys() != tensors.keys()
    return {**files, ADAPTER_WEIGHTS: safetensors.numpy.save(moved)}


def patterned(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """A field that engines drop: they serve other weights than were trained, and answer 200."""
    config = {**json.loads(files[ADAPTER_CONFIG]), "alpha_pattern": {"layers.0.self_attn.q_proj": 64}}
    return {**files, ADAPTER_CONFIG: json.dumps(config).encode()}


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

    found: list[bytes] = []
    async for meta in bucket.list("rollouts"):
        stored = await bucket.get(meta.key)
        assert stored is not None
        found.append(stored.data)
    groups = [one for data in found for one in decode_shipment(data, "").groups]
    assert Counter(one.policy_version for one in groups) == {0: 1, 1: 1, 2: 2, 7: 1}


def trained(config: Config, base: Path) -> Policy:
    return Policy.load(Config.model_validate({**config.model_dump(by_alias=True), "learner": {"learning_rate": 1e-2}}), base, 0)


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
    learner_scores = with_pattern(learner)
    await learner.publish(5, patterned(third), learner_scores)
    await learner.refused(5)
    await learner.publish(6, renamed(third), scores)
    await learner.refused(6)
    await learner.allow(1)  # version 2 is 4 behind now, run.max_lag is 2: it waits
    await learner.publish(7, third, scores)
    await learner.shipped(5)


def step(policy: Policy, rate: float, *, times: int = 1) -> None:
    object.__setattr__(policy.config.learner, "learning_rate", rate)
    for _ in range(times):
        assert not policy.step([group(*FOUR)]).skipped


def with_pattern(learner: ScriptedLearner) -> list[float]:
    """How a learner that honours the pattern would score: q_proj of layer 0 at 64 / 4 of its scale."""
    name = next(n for n in learner.policy._adapter if "layers.0.self_attn.q_proj.lora_B" in n)
    parameter = learner.policy._adapter[name]
    kept = parameter.detach().clone()
    parameter.data.mul_(16)
    scores = learner.policy.score(learner.probe_ids, adapter=True)
    parameter.data.copy_(kept)
    return scores
