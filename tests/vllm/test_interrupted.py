"""A real vLLM that fails while groups are in flight: the run goes on by itself, and nothing that it half said is trained."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import psutil
import pytest
import structlog
from aiohttp import web

from grpod.bucket.open import open_bucket
from grpod.config import Config
from grpod.context import Context, Stopping
from grpod.generator import crowd, patience, station
from grpod.generator import loop as generator
from grpod.generator.engine import vllm_spec
from grpod.learner import loop as learner
from grpod.replica.client import ReplicaClient
from grpod.replica.supervise import Child, supervised
from grpod.telemetry.log import get_logger
from grpod.wire import keys
from grpod.wire.rollout import Group
from tests.generator.loops import GROUP_SIZE, Outcome, write_config
from tests.integration import runs
from tests.integration.fleet import check_groups
from tests.models import make_tiny_base
from tests.replica.embedded.made import plain_logprobs
from tests.vllm.middle import Asked, Forward, Middle, between, broken
from tests.vllm.real import HIDDEN, MARKS, VLLM

pytestmark = [pytest.mark.anyio, *MARKS, pytest.mark.timeout(600)]
LENGTH, END = 48, 2  # tokens of a whole completion, unless it ends with this one
BROKEN_S = 10.0
REWARD = f"""\
def reward(completion_ids, **_):
    stumps = [ids for ids in completion_ids if len(ids) != {LENGTH} and ids[-1] != {END}]
    if stumps or len(completion_ids) != {GROUP_SIZE}:
        raise ValueError(f"not whole: {{stumps}}")
    return [float(i % 2) for i in range(len(completion_ids))]
"""
# what a generator may say of a group that a fault has met
MET = {"replica_unavailable", "unusable_answer", "stale_in_flight"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_base(tmp_path_factory.mktemp("interrupted") / "base", hidden=HIDDEN)


def made_config(folder: Path, base: Path, url: str, *, engine: str, steps: int) -> Config:
    return write_config(
        folder,
        base,
        url,
        prompts=[{"prompt": f"{i}+{i}="} for i in range(32)],
        reward=REWARD,
        bucket=f"file://{folder}/run",
        run={"startup_timeout_s": 300.0, "grace_s": 20.0},
        generator={
            "engine": engine,
            "vllm": {"executable": VLLM},
            "state_every_s": 0.5,
            "sampling": {"max_new_tokens": LENGTH},
        },
        lora={"rank": 4, "alpha": 8},
        learner={"steps": steps, "groups_per_step": 2, "learning_rate": 1e-3, "loss": {"mask_truncated": False}},
    )


class Stage:
    """One run, in this process, with the real learner."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.folder, self.run, self.config = folder, folder / "run", config
        self.outcome = Outcome(bucket=open_bucket(config.run.bucket), error=None)

    async def play(self, disturb: Callable[[], Any]) -> None:
        """Until the run has ended by itself, disturbed on the way."""
        ctx = Context(
            config=self.config, folder=self.folder, bucket=self.outcome.bucket, stop=Stopping(), roles=("learner", "generator")
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


def engine_core() -> psutil.Process:
    """Of the only vLLM below this process."""
    below = psutil.Process().children(recursive=True)
    (found,) = [process for process in below if "VLLM::EngineCore" in " ".join(process.cmdline())]
    return found


@asynccontextmanager
async def served(config: Config, base: Path) -> AsyncIterator[tuple[Child, Middle]]:
    spec = vllm_spec(config, base, "cpu", "vllm", learner_here=False)
    async with supervised(spec, log=get_logger()) as child, between(lambda: child.url) as middle:
        await child.ready()
        yield child, middle


class Faults:
    """One after the other, each once the run goes on after the one before."""

    def __init__(self, stage: Stage, child: Child, middle: Middle) -> None:
        self._stage, self._child, self._middle = stage, child, middle
        self.figures: dict[str, float] = {}

    async def disturb(self) -> None:
        middle = self._middle
        await self._stage.trains(6)
        first = middle.sound[0]
        self.figures["groups_per_s_before"] = len(middle.sound[1:]) / (anyio.current_time() - first)
        for name, fault in (("500", self._broken), ("hung", self._hung), ("abort", self._abort), ("died", self._died)):
            over = await fault()
            sound = len(middle.sound)
            await middle.until(lambda sound=sound: len(middle.sound) > sound)
            self.figures[f"{name}_recovered_s"] = middle.sound[sound] - over
            await self._stage.trains()
        self._went_on = anyio.current_time()

    def ended(self) -> None:
        after = [at for at in self._middle.sound if at > self._went_on]
        assert len(after) > 1
        self.figures["groups_per_s_after"] = (len(after) - 1) / (after[-1] - after[0])

    async def _broken(self) -> float:
        self._middle.hook = broken
        await anyio.sleep(BROKEN_S)
        self._middle.hook = None
        return anyio.current_time()

    async def _hung(self) -> float:
        """Groups are asked for, and the server never says a word, until one of them is asked for again."""
        hung: set[int] = set()
        over = anyio.Event()

        async def hang(asked: Asked, forward: Forward) -> web.StreamResponse:
            if asked.group and not over.is_set() and asked.body["seed"] not in hung:
                hung.add(asked.body["seed"])
                await anyio.sleep_forever()
            if asked.group and asked.body["seed"] in hung:
                over.set()
            return await forward()

        began = anyio.current_time()
        self._middle.hook = hang
        await over.wait()
        self.figures["hung_given_up_s"] = anyio.current_time() - began
        assert hung
        self._middle.hook = None
        return anyio.current_time()

    async def _abort(self) -> float:
        middle, before = self._middle, self._middle.aborted
        async with ReplicaClient(self._child.url) as client:
            for _ in range(20):  # a group may be over before it can be cut
                await middle.until(lambda: middle.in_flight > 0)
                await client.pause("abort")
                await client.resume()
                with anyio.move_on_after(2.0):
                    await middle.until(lambda: middle.aborted > before)
                    break
        assert middle.aborted > before
        return anyio.current_time()

    async def _died(self) -> float:
        incarnation, core = self._child.incarnation, engine_core()
        await self._middle.until(lambda: self._middle.in_flight > 0)
        core.kill()
        over = anyio.current_time()
        await self._child.lost(incarnation)
        await self._child.ready()
        self.figures["died_restarted_s"] = anyio.current_time() - over
        return over


async def test_what_a_failing_vllm_says_is_never_trained(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(patience, "LEAST_S", 3.0)
    config = made_config(tmp_path, base, "", engine="remote", steps=50)
    async with served(config, base) as (child, middle):
        config = made_config(tmp_path, base, middle.url, engine="remote", steps=50)
        stage = Stage(tmp_path, config)
        faults = Faults(stage, child, middle)
        await stage.play(faults.disturb)
    faults.ended()
    drops = await stage.check(base)
    asked_again = len(middle.asked) - len(set(middle.asked))
    assert asked_again > 0
    figures = {name: round(value, 2) for name, value in faults.figures.items()}
    print(json.dumps({**figures, "asked_again": asked_again, "dropped": drops, "groups": len(set(middle.asked))}))


async def test_an_engine_that_stands_still_is_replaced(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch):
    """Its server says that it is healthy."""
    for module in (crowd, station):
        monkeypatch.setattr(module, "HUNG_S", 6.0)
    stage = Stage(tmp_path, made_config(tmp_path, base, "", engine="vllm", steps=16))
    before = psutil.Process().children(recursive=True)
    figures: dict[str, float] = {}

    def said(name: str) -> Sequence[Any]:
        return [entry for entry in entries if entry["event"] == name]

    async def stop() -> None:
        await stage.trains(3)
        stopped = engine_core()
        stopped.send_signal(signal.SIGSTOP)
        at = anyio.current_time()
        for name in ("replica_hung", "child_ready", "replica_back"):
            already = len(said("child_ready")) if name == "child_ready" else 0
            while len(said(name)) <= already:  # noqa: ASYNC110  # a log tells nobody
                await anyio.sleep(0.05)
            figures[f"{name}_s"] = round(anyio.current_time() - at, 1)
        assert not stopped.is_running()

    with structlog.testing.capture_logs() as entries:
        await stage.play(stop)
    assert [entry["reason"] for entry in said("child_restarts")] == ["produced nothing for 6 s"]
    assert not set(psutil.Process().children(recursive=True)) - set(before)
    drops = await stage.check(base)
    print(json.dumps({**figures, "dropped": drops}))
