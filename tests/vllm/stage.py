"""A run in this process, with the real learner, a man in the middle and a real vLLM; and what must hold of it afterwards."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from grpod.bucket.open import open_bucket
from grpod.config import Config
from grpod.context import Context, Stopping
from grpod.generator import loop as generator
from grpod.generator.engine import vllm_spec
from grpod.learner import loop as learner
from grpod.replica.supervise import Child, supervised
from grpod.telemetry.log import get_logger
from grpod.wire import keys
from grpod.wire.rollout import Group
from tests.generator.loops import GROUP_SIZE, Outcome, write_config
from tests.integration import runs
from tests.integration.fleet import check_groups
from tests.replica.embedded.made import plain_logprobs
from tests.vllm.middle import Middle, between
from tests.vllm.real import VLLM

LENGTH, END = 48, 2  # tokens of a whole completion, unless it ends with this one
REWARD = f"""\
def reward(completion_ids, **_):
    stumps = [ids for ids in completion_ids if len(ids) != {LENGTH} and ids[-1] != {END}]
    if stumps or len(completion_ids) != {GROUP_SIZE}:
        raise ValueError(f"not whole: {{stumps}}")
    return [float(i % 2) for i in range(len(completion_ids))]
"""
# what a generator may say of a group that a fault has met
MET = {"replica_unavailable", "unusable_answer", "stale_in_flight"}


def made_config(folder: Path, base: Path, url: str, *, engine: str, steps: int, **more: Mapping[str, Any]) -> Config:
    sections: dict[str, Any] = {
        "run": {"startup_timeout_s": 300.0, "grace_s": 20.0},
        "generator": {
            "engine": engine,
            "vllm": {"executable": VLLM},
            "state_every_s": 0.5,
            "sampling": {"max_new_tokens": LENGTH},
        },
        "lora": {"rank": 4, "alpha": 8},
        "learner": {"steps": steps, "groups_per_step": 2, "learning_rate": 1e-3, "loss": {"mask_truncated": False}},
    }
    return write_config(
        folder,
        base,
        url,
        prompts=[{"prompt": f"{i}+{i}="} for i in range(32)],
        reward=REWARD,
        bucket=f"file://{folder}/run",
        **{name: {**section, **more.get(name, {})} for name, section in sections.items()},
    )


class Stage:
    """One run, in this process, with the real learner."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.folder, self.run, self.config = folder, folder / "run", config
        self.outcome = Outcome(bucket=open_bucket(config.run.bucket), error=None)
        self.stop = Stopping()

    async def play(self, disturb: Callable[[], Any] = anyio.lowlevel.checkpoint) -> None:
        """Until the run has ended, by itself or by `stop`, disturbed on the way; or somebody in it fails."""
        ctx = Context(
            config=self.config, folder=self.folder, bucket=self.outcome.bucket, stop=self.stop, roles=("learner", "generator")
        )
        with anyio.fail_after(480):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(learner.run, ctx)
                tasks.start_soon(generator.run, ctx)
                tasks.start_soon(disturb)

    def step(self) -> int:
        path = self.run / keys.LEARNER_STATE
        return int(json.loads(path.read_text())["step"]) if path.exists() else -1

    async def trains(self, more: int = 2) -> None:
        wanted = self.step() + more
        while self.step() < wanted:
            await self.outcome.bucket.changed(0.1)

    async def check(self, base: Path) -> dict[str, int]:
        """Every group is accounted for, none was half or under other weights. Returns why groups were dropped."""
        found = await anyio.to_thread.run_sync(check_groups, self.run)
        audit = await anyio.to_thread.run_sync(
            lambda: runs.grpod_json("audit", "--json", "--deep", self.config.run.bucket or "")
        )
        assert audit["violations"] == []
        drops = await self.outcome.drops()
        if self.stop.requested:
            del drops["interrupted"]
        assert drops.keys() <= MET, drops
        groups = await self.outcome.groups()
        assert groups
        ids = {group.group_id for group in groups}
        begun = {f"{state.generator}/{n}" for state in await self.outcome.states() for n in range(state.begun)}
        assert begun <= found.keys() | ids, "a group has vanished"
        for group in groups:
            assert [rollout.reward for rollout in group.rollouts] == [float(i % 2) for i in range(GROUP_SIZE)]
            for rollout in group.rollouts:
                assert len(rollout.completion_ids) == LENGTH or rollout.completion_ids[-1] == END
        for group in random.Random(0).sample(groups, min(len(groups), 8)):
            await anyio.to_thread.run_sync(self._check_logprobs, base, group)
        return dict(drops)

    def _check_logprobs(self, base: Path, group: Group) -> None:
        """The weights that the group says it was made under give the log-probs that it bears."""
        folder = (self.run / keys.adapter(group.policy_version, group.policy_epoch, keys.MANIFEST)).parent
        rollout = group.rollouts[random.Random(group.group_id).randrange(GROUP_SIZE)]
        ids = [*group.prompt_ids, *rollout.completion_ids]
        plain, at = plain_logprobs(base, folder, ids), len(group.prompt_ids) - 1
        wanted = [float(plain[at + i, token]) for i, token in enumerate(rollout.completion_ids)]
        assert list(rollout.generator_logprobs) == pytest.approx(wanted, abs=1e-3), group.group_id


@asynccontextmanager
async def served(config: Config, base: Path) -> AsyncIterator[tuple[Child, Middle]]:
    spec = vllm_spec(config, base, "cpu", "vllm", learner_here=False)
    async with supervised(spec, log=get_logger()) as child, between(lambda: child.url) as middle:
        await child.ready()
        yield child, middle
