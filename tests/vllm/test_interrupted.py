"""A real vLLM that fails while groups are in flight: the run goes on by itself, and nothing that it half said is trained."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
import structlog
from aiohttp import web

from grpod.generator import crowd, patience, station
from grpod.replica.client import ReplicaClient
from grpod.replica.supervise import Child
from tests.models import make_tiny_base
from tests.vllm.middle import Asked, Forward, Middle, broken
from tests.vllm.real import HIDDEN, MARKS
from tests.vllm.stage import Stage, made_config, served

pytestmark = [pytest.mark.anyio, *MARKS, pytest.mark.timeout(600)]
BROKEN_S = 10.0


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_base(tmp_path_factory.mktemp("interrupted") / "base", hidden=HIDDEN)


def engine_core() -> psutil.Process:
    """Of the only vLLM below this process."""
    below = psutil.Process().children(recursive=True)
    (found,) = [process for process in below if "VLLM::EngineCore" in " ".join(process.cmdline())]
    return found


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
        after = len(middle.sound)
        await self._stage.trains(10)
        sound = middle.sound[after:]
        self.figures["groups_per_s_after"] = (len(sound) - 1) / (sound[-1] - sound[0])
        self._stage.stop.request("every fault is over")

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
    config = made_config(tmp_path, base, "", engine="remote", steps=1)
    async with served(config, base) as (child, middle):
        config = made_config(tmp_path, base, middle.url, engine="remote", steps=100_000)  # it is stopped
        stage = Stage(tmp_path, config)
        faults = Faults(stage, child, middle)
        await stage.play(faults.disturb)
    drops = await stage.check(base)
    asked_again = len(middle.asked) - len(set(middle.asked))
    assert asked_again > 0
    figures = {name: round(value, 2) for name, value in faults.figures.items()}
    print(json.dumps({**figures, "asked_again": asked_again, "dropped": drops, "groups": len(set(middle.asked))}))


async def test_an_engine_that_stands_still_is_replaced(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch):
    """Its server says that it is healthy."""
    for module in (crowd, station):
        monkeypatch.setattr(module, "HUNG_S", 6.0)
    stage = Stage(tmp_path, made_config(tmp_path, base, "", engine="vllm", steps=100_000))
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
        await stage.trains()
        stage.stop.request("it is back")

    with structlog.testing.capture_logs() as entries:
        await stage.play(stop)
    assert [entry["reason"] for entry in said("child_restarts")] == ["produced nothing for 6 s"]
    assert not set(psutil.Process().children(recursive=True)) - set(before)
    drops = await stage.check(base)
    print(json.dumps({**figures, "dropped": drops}))
