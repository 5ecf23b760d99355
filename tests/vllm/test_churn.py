"""Three hundred versions through one vLLM that is never without requests: its slots hold, its files stay, each answer is by the
version that it says, and its memory does not grow."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import anyio
import psutil
import pytest
import torch

from grpod.bucket.memory import MemoryBucket
from grpod.context import Context, Stopping
from grpod.generator import loop as generator
from grpod.learner.policy import Policy
from grpod.replica.client import ReplicaClient
from grpod.replica.vllm import slots
from grpod.run.base_model import fingerprint
from grpod.wire.keys import ADAPTER_WEIGHTS, adapter
from grpod.wire.rollout import Group, decode_shipment
from tests.generator.adapters_made import trained
from tests.generator.loops import ALTERNATE, write_config
from tests.generator.scripted import ScriptedLearner
from tests.models import make_tiny_base

VLLM = os.environ.get("VLLM_EXECUTABLE", "")
VERSIONS, WARM = 300, 30
CHECKED = 3  # groups of each version: all of them would take as long as to make them
RANK = 32  # 0.7 MB each: all of them would be 200 MB
GROWTH = 0.05  # of 3 GB
ENDS = range(2, 512, 20)  # many end tokens: completions of all lengths, so that old versions end late
EXACT, OTHER = 1e-3, 0.05  # nats, at the worst token: of the same version, and of the one before at least

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not VLLM, reason="VLLM_EXECUTABLE names no vllm"),
]


async def test_versions_come_and_go_while_requests_are_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    base = make_tiny_base(tmp_path / "base", hidden=128, eos_ids=ENDS)
    bucket = MemoryBucket("memory://churn")
    config = write_config(
        tmp_path,
        base,
        "",
        prompts=[{"prompt": f"{i}+{i}="} for i in range(64)],
        reward=ALTERNATE,
        bucket=bucket.url,
        run={"startup_timeout_s": 200.0},
        lora={"rank": RANK, "alpha": RANK},
        generator={
            "engine": "vllm",
            "vllm": {"executable": VLLM},
            "devices": ["cpu"],
            "remote": {},
            "group_size": 2,
            "max_in_flight": 4,
            "sampling": {"max_new_tokens": 64},
        },
    )
    learner = ScriptedLearner(bucket, config, trained(config, base), fingerprint(base))
    await learner.begin()
    ctx = Context(config=config, folder=tmp_path, bucket=bucket, stop=Stopping(), roles=("generator",))
    looks = Looks(tmp_path / "scratch", most=slots(config.run.max_lag))
    with anyio.fail_after(880):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generator.run, ctx)
            groups, memory = await churn(learner, looks, tasks.start_soon)
            looks.over = True
            ctx.stop.request("done")
    weights = {v: (await bucket.get(adapter(v, 1, ADAPTER_WEIGHTS))).data for v in range(VERSIONS)}  # type: ignore[union-attr]
    worst, nearest = check(learner.policy, groups, tmp_path, weights)
    told = {
        "test": "churn",
        "versions": VERSIONS,
        "groups": len(groups),
        "looks": looks.count,
        "looks_while_busy": looks.busy,
        "most_registered": looks.registered,
        "worst_logprob_error": worst,
        "nearest_other_version": nearest,
        "rss_mb": {version: round(rss / 2**20, 1) for version, rss in memory.items()},
    }
    print(json.dumps(told))
    assert {group.policy_version for group in groups} == set(range(VERSIONS)), "each was used"
    assert looks.busy > 0.5 * looks.count > VERSIONS / 2
    assert worst <= EXACT
    assert nearest > OTHER, "else the line above would prove nothing"
    assert memory[VERSIONS - 1] < (1 + GROWTH) * memory[WARM], memory


async def churn(learner: ScriptedLearner, looks: Looks, start: Callable[..., object]) -> tuple[list[Group], dict[int, int]]:
    """Each version is published as soon as a group of the one before has been shipped: others of it are still in flight."""
    groups, memory, last = list[Group](), dict[int, int](), None
    for version in range(VERSIONS):
        draw(learner.policy, version)
        await learner.publish(version, *await anyio.to_thread.run_sync(learner.made))
        if version == 0:
            await learner.allow(1_000_000)
        while not any(group.policy_version == version for group in groups):
            fresh = [meta.key async for meta in learner.bucket.list("rollouts", after=last)]
            for last in fresh:
                found = await learner.bucket.get(last)
                assert found is not None
                groups += decode_shipment(found.data, last).groups
            if not fresh:
                await learner.bucket.changed(0.2)
        if version == 0:
            start(looks.run)
        if version % WARM == 0 or version == VERSIONS - 1:
            memory[version] = sum(process.memory_info().rss for process in engine())
    return groups, memory


def draw(policy: Policy, version: int) -> None:
    """Weights of its own, so strong that no two versions say the same."""
    random = torch.Generator().manual_seed(version)
    for name, parameter in policy._adapter.items():
        drawn = torch.randn(parameter.shape, generator=random)
        parameter.data.copy_(drawn if ".lora_B." in name else drawn / parameter.shape[-1] ** 0.5)


def engine() -> list[psutil.Process]:
    """All processes of this test's vLLM: one process group."""
    (server,) = [process for process in psutil.Process().children(recursive=True) if process.cmdline()[1:3] == [VLLM, "serve"]]
    mine = os.getpgid(server.pid)
    return [server, *(process for process in server.children(recursive=True) if os.getpgid(process.pid) == mine)]


class Looks:
    """What is registered, and whether its files are there, again and again."""

    def __init__(self, scratch: Path, *, most: int) -> None:
        self._scratch, self._most = scratch, most
        self.count = self.registered = self.busy = 0
        self.over = False

    async def run(self) -> None:
        arguments = engine()[0].cmdline()
        async with ReplicaClient(f"http://127.0.0.1:{arguments[arguments.index('--port') + 1]}") as client:
            while not self.over:
                before = await client.models()
                there = {path.parent.name for path in self._scratch.glob(f"*/*/v*/{ADAPTER_WEIGHTS}")}
                after, load = await client.models(), await client.load()
                adapters = [name for name in after if "-v" in name]
                assert len(adapters) <= self._most, f"more than slots: {after}"
                assert len(after) <= self._most + 1, after
                kept = {name.partition("scripted-")[2] for name in adapters if name in before}
                assert kept <= there, f"registered without files: {kept - there}"
                assert load is not None
                self.count += 1
                self.busy += load.running > 0
                self.registered = max(self.registered, len(adapters))
                await anyio.sleep(0.05)  # a look that never ends would be a load of its own


def check(policy: Policy, groups: list[Group], folder: Path, weights: dict[int, bytes]) -> tuple[float, float]:
    """How far the log-probs are from those of their own version, at the worst token of all; and from those of the version
    before, at the worst token of the group that is nearest."""
    worst, nearest = 0.0, float("inf")
    for version, data in weights.items():
        (folder / "one.safetensors").write_bytes(data)
        policy.load_adapter(folder / "one.safetensors")
        for group in [group for group in groups if group.policy_version == version][:CHECKED]:
            worst = max(worst, distance(policy, group))
        other = next((group for group in groups if group.policy_version == version + 1), None)
        if other is not None:
            nearest = min(nearest, distance(policy, other))
    return worst, nearest


def distance(policy: Policy, group: Group) -> float:
    found = 0.0
    for rollout in group.rollouts:
        scores = policy.score([*group.prompt_ids, *rollout.completion_ids], adapter=True)[len(group.prompt_ids) - 1 :]
        found = max(found, *(abs(a - b) for a, b in zip(scores, rollout.generator_logprobs, strict=True)))
    return found
