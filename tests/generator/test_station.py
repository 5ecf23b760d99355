"""Which version a replica serves while the newest is refused or long in coming, and a server that forgets."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog

from grpod.bucket.base import ObjectMeta
from grpod.bucket.memory import MemoryBucket
from grpod.config import Config
from grpod.context import Context, Stopping
from grpod.errors import BucketError, NotReady
from grpod.generator import loop as generator
from grpod.generator.engine import Engine, Remote
from grpod.generator.token_file import TokenFile
from grpod.run.base_model import fingerprint
from grpod.wire.keys import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from grpod.wire.rollout import Shipment, decode_shipment
from tests.bench.loop import FakePolicy
from tests.fakes import FakeReplica
from tests.generator.loops import ALTERNATE, GROUP_SIZE, first, liar, loop, write_config
from tests.generator.scripted import ScriptedLearner

pytestmark = pytest.mark.anyio
FILES = {ADAPTER_WEIGHTS: b"weights", ADAPTER_CONFIG: b"{}"}


class Scene:
    def __init__(self, bucket: MemoryBucket, replica: FakeReplica, learner: ScriptedLearner) -> None:
        self.bucket, self.replica, self.learner = bucket, replica, learner

    async def publish(self, version: int) -> None:
        await self.learner.publish(version, FILES, self.learner.base_logprobs)

    async def one_more(self, done: int) -> None:
        await self.learner.allow(1)
        await self.learner.shipped(done)

    def refuses(self, *versions: int) -> None:
        score = self.replica.score

        def off(model: str, token_ids: Sequence[int]) -> list[float]:
            by = 0.5 if any(f"-v{version}-" in model for version in versions) else 0.0
            return [value - by for value in score(model, token_ids)]

        self.replica.score = off

    async def shipments(self) -> list[Shipment]:
        found = [await self.bucket.get(meta.key) async for meta in self.bucket.list("rollouts")]
        return [decode_shipment(stored.data, "") for stored in found if stored is not None]

    async def versions(self) -> list[int]:
        return [group.policy_version for shipment in await self.shipments() for group in shipment.groups]


@asynccontextmanager
async def scene(
    folder: Path, base: Path, replica: FakeReplica, *, bucket: MemoryBucket | None = None, **sections: Any
) -> AsyncIterator[Scene]:
    """A generator in a run whose learner is the test; it stops when the test has done its part."""
    own = MemoryBucket(f"memory://{folder}")
    config = write_config(folder, base, replica.url, prompts=[{"prompt": "1+1="}], reward=ALTERNATE, bucket=own.url, **sections)
    learner = ScriptedLearner(own, config, FakePolicy(0.0), fingerprint(base))  # type: ignore[arg-type]
    await learner.begin()
    stop = Stopping()
    ctx = Context(config=config, folder=folder, bucket=bucket or own, stop=stop, roles=("generator",))
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generator.run, ctx)
            yield Scene(own, replica, learner)
            stop.request("done")


@pytest.mark.parametrize(
    ("max_lag", "patience_s", "version"),
    [(2, 0.02, 0), (2, 1e9, 1), (1, 0.02, 1), (0, 0.02, 1)],
    ids=["after a while", "not at once", "not at the limit", "never with max_lag 0"],
)
async def test_groups_go_on_under_the_version_before_while_the_newest_is_long_in_coming(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch, max_lag: int, patience_s: float, version: int
) -> None:
    monkeypatch.setattr("grpod.generator.station.PATIENCE_S", patience_s)
    async with liar() as replica, scene(tmp_path, tiny_base, replica, run={"max_lag": max_lag}) as run:
        await run.publish(0)
        await run.one_more(1)
        loading = replica.spoil("delay", 3.0, path="/v1/load_lora_adapter")
        await run.publish(1)
        await replica.until(lambda _: loading.matched == 1)
        await run.one_more(2)
        assert await run.versions() == [0, version]


async def test_the_last_good_version_is_served_again_by_a_replica_that_was_restarted(tmp_path: Path, tiny_base: Path) -> None:
    async with liar() as replica, scene(tmp_path, tiny_base, replica) as run:
        run.refuses(1)
        await run.publish(0)
        await run.one_more(1)
        await run.publish(1)
        await run.learner.refused(1)
        replica.adapters.clear()
        await run.one_more(2)
        assert await run.versions() == [0, 0]


async def test_groups_that_outlive_max_lag_are_aborted_while_the_newest_cannot_be_loaded(
    tmp_path: Path, tiny_base: Path
) -> None:
    async with liar() as replica, scene(tmp_path, tiny_base, replica, run={"max_lag": 0}) as run:
        replica.spoil("hang", path="/v1/load_lora_adapter", when=lambda body: "-v1-" in body["lora_name"])
        replica.spoil("hang", when=lambda body: body.get("n") == GROUP_SIZE)
        await run.publish(0)
        await run.learner.allow(1)
        await replica.until(lambda r: any(s.body and s.body.get("n") == GROUP_SIZE for s in r.requests if s.path != "/health"))
        await run.publish(1)
        await run.learner.shipped(1)
        assert [drop.reason for shipment in await run.shipments() for drop in shipment.drops] == ["stale_in_flight"]


async def test_a_server_that_keeps_forgetting_its_adapters_ends_it_with_words(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As several servers behind a plain load balancer do."""
    monkeypatch.setattr("grpod.generator.station._FORGOTTEN_PAUSE_S", 0.001)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with liar() as replica, scene(tmp_path, tiny_base, replica) as run:
            replica.spoil("forget")
            await run.publish(0)
            await anyio.sleep_forever()
    error = first(caught.value)
    assert isinstance(error, NotReady)
    assert "forgot its adapters 10 times" in str(error)
    assert replica.count("/v1/load_lora_adapter") == 10


async def test_a_replica_that_is_away_for_a_while_is_complained_of_once(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpod.generator.station._AGAIN_S", 0.01)
    with structlog.testing.capture_logs() as logs:
        async with liar() as replica, scene(tmp_path, tiny_base, replica) as run:
            replica.spoil("status", (503, "not now"), times=5)
            await run.publish(0)
            await run.one_more(1)
    said = Counter(line["log_level"] for line in logs if line["event"] == "sync_failed")
    assert said == {"warning": 1, "debug": 4}


class Stumbling(MemoryBucket):
    """`stat` fails the first times: the first thing that a follower asks."""

    fails = 2

    async def stat(self, keys: Any) -> dict[str, ObjectMeta]:
        self.fails -= 1
        if self.fails >= 0:
            raise BucketError("away")
        return await super().stat(keys)


async def test_a_bucket_that_stumbles_at_the_start_ends_nothing(tmp_path: Path, tiny_base: Path) -> None:
    bucket = Stumbling(f"memory://{tmp_path}")
    async with liar() as replica, scene(tmp_path, tiny_base, replica, bucket=bucket) as run:
        await run.publish(0)
        await run.one_more(1)
    assert bucket.fails < 0


async def test_versions_whose_probe_does_not_tell_are_counted(tmp_path: Path, tiny_base: Path) -> None:
    async with liar() as replica:
        # With no lag the second step needs the second version; else the run may end before the generator has met it.
        outcome = await loop(tmp_path, tiny_base, replica, learner={"steps": 2}, run={"max_lag": 0})
    assert outcome.error is None
    assert (await outcome.metrics())["versions/unproven_total"] >= 2


async def test_a_request_that_the_replica_has_lost_is_asked_for_again(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpod.generator.patience.LEAST_S", 0.2)
    async with liar() as replica:
        hung = replica.spoil("hang", when=lambda body: body.get("n") == GROUP_SIZE, first=2, times=1)
        with structlog.testing.capture_logs() as logs:
            outcome = await loop(tmp_path, tiny_base, replica, learner={"steps": 3}, run={"max_lag": 0})
        assert hung.matched == 4
        bodies = [seen.body for seen in replica.requests if seen.path == "/v1/completions" and seen.body["n"] == GROUP_SIZE]
    assert outcome.error is None
    assert bodies[1] == bodies[2], "the same version, prompt and seed"
    assert Counter(end.end for end in await outcome.ends()) == {"trained": 3}
    assert await outcome.drops() == {}
    (said,) = [line for line in logs if line["event"] == "replica_unavailable"]
    assert "was not answered in time" in said["error"]


async def test_a_replica_that_has_stopped_is_told_to_its_engine_and_the_group_is_trained(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Healthy by its own word, with sequences that make no token: a child is ended and started again."""
    monkeypatch.setattr("grpod.generator.crowd.EVERY_S", 0.02)
    monkeypatch.setattr("grpod.generator.crowd.HUNG_S", 0.2)
    told: list[tuple[int, str]] = []
    async with liar() as replica:

        def restart(self: Remote, incarnation: int, reason: str) -> None:
            told.append((incarnation, reason))
            for spoiling in replica.spoilings:
                spoiling.times = 0

        monkeypatch.setattr(Remote, "restart", restart)
        monkeypatch.setattr("grpod.generator.patience.LEAST_S", 2.0)
        page = "vllm:num_requests_running 4\nvllm:num_requests_waiting 0\nvllm:generation_tokens_total 7\n"
        replica.spoil("status", (200, page), path="/metrics")
        replica.spoil("hang", when=lambda body: body.get("n") == GROUP_SIZE)
        outcome = await loop(tmp_path, tiny_base, replica, learner={"steps": 1}, run={"startup_timeout_s": 2.0})
    assert outcome.error is None
    ((incarnation, reason),) = told
    assert (incarnation, reason.partition(" for ")[0]) == (1, "produced nothing")


async def test_groups_go_to_the_replica_with_the_most_room(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One replica for each of generator.devices."""
    async with liar() as a, liar() as b:
        urls = {"cuda:0": a.url, "cuda:1": b.url}

        @asynccontextmanager
        async def open_engine(config: Config, base: Path, *, device: str, token: TokenFile, **_: Any) -> AsyncIterator[Engine]:
            yield Remote(urls[device], config.run.startup_timeout_s, token)

        monkeypatch.setattr(generator, "open_engine", open_engine)

        def a_group(body: Any) -> bool:
            return isinstance(body, dict) and body.get("n") == GROUP_SIZE

        several = {"devices": list(urls), "max_in_flight": 4}
        async with scene(tmp_path, tiny_base, a, generator=several, run={"grace_s": 0.5}) as run:
            await run.publish(0)
            done = 0
            while not all(any(a_group(seen.body) for seen in replica.requests) for replica in (a, b)):
                await run.learner.allow(2)  # until both serve: of two at once the second goes to the other one
                await run.learner.shipped(done := done + 2)
            held = {replica.url: replica.spoil("hang", when=a_group) for replica in (a, b)}
            await run.learner.allow(6)
            for replica in (a, b):
                await replica.until(lambda r: held[r.url].matched == 3, timeout_s=10)


async def test_a_server_that_loads_no_adapter_is_told_what_it_needs(tmp_path: Path, tiny_base: Path) -> None:
    """As vLLM does without VLLM_ALLOW_RUNTIME_LORA_UPDATING, and one on another host with another path."""
    async with liar() as replica:
        replica.spoil("status", (404, '{"detail": "Not Found"}'), path="/v1/load_lora_adapter")
        outcome = await loop(tmp_path, tiny_base, replica)
    assert isinstance(outcome.error, NotReady)
    for words in ("/canary: ", "404: Not Found", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1", "generator.remote.adapter_root"):
        assert words in str(outcome.error)
