"""Loads, unloads, pause and resume over several replicas: a quorum has it, or nobody; who was away catches up."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.fakes import FakeReplica
from tests.proxy.running import Proxy, adapter, running, until

pytestmark = pytest.mark.anyio
LOAD = "/v1/load_lora_adapter"
NOT_THERE = (404, '{"error": {"message": "Loading lora v1 failed: No adapter found for /nowhere"}}')


@pytest.fixture
async def three() -> AsyncIterator[tuple[list[FakeReplica], Proxy]]:
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(FakeReplica()) for _ in range(3)]
        proxy = await stack.enter_async_context(running(replicas))
        yield replicas, proxy


def asked(replica: FakeReplica, path: str = "/v1/completions") -> list[Any]:
    return [seen.body for seen in replica.requests if seen.path == path]


async def test_a_load_reaches_every_replica_and_the_base_is_listed_first(
    three: tuple[list[FakeReplica], Proxy], tmp_path: Path
) -> None:
    replicas, proxy = three
    path = adapter(tmp_path / "v1")
    code, text = await proxy.load("v1", path)
    assert code == 200
    assert "v1" in text
    await until(lambda: all(replica.adapters == {"v1": str(path)} for replica in replicas))
    _, models = await proxy.get("/v1/models")
    assert [card["id"] for card in models["data"]] == ["base", "v1"]
    assert models["data"][1]["parent"] == "base"
    assert (await proxy.complete("v1"))[0] == 200


async def test_a_load_that_the_quorum_refuses_is_rolled_back(three: tuple[list[FakeReplica], Proxy]) -> None:
    replicas, proxy = three
    for replica in replicas[1:]:
        replica.spoil("status", (400, '{"error": {"message": "rank 16 is too high"}}'), path=LOAD)
    code, error = await proxy.load("v1")
    assert code == 400
    assert "rank 16 is too high" in error["error"]["message"]
    assert replicas[0].count(LOAD) == 1
    assert replicas[0].adapters == {}
    assert (await proxy.complete("v1"))[0] == 404
    assert (await proxy.status())["counters"]["broadcasts/load/failed"] == 1


async def test_a_quorum_is_enough_and_who_refuses_serves_everything_but_that_version(
    three: tuple[list[FakeReplica], Proxy],
) -> None:
    replicas, proxy = three
    replicas[0].spoil("status", (400, "bad disk"), path=LOAD)
    assert (await proxy.load("v1"))[0] == 200
    for _ in range(6):
        assert (await proxy.complete("v1"))[0] == 200
    assert not asked(replicas[0])
    state = {r["url"]: r for r in (await proxy.status())["replicas"]}[replicas[0].url]
    assert state["state"] == "catching_up"
    assert "bad disk" in state["refused"]["v1"]


async def test_quorum_all_waits_for_all() -> None:
    async with FakeReplica() as one, FakeReplica() as two, running([one, two], quorum="all") as proxy:
        two.spoil("status", (400, "no"), path=LOAD)
        assert (await proxy.load("v1"))[0] == 400
        assert one.adapters == {}


async def test_a_late_mount_is_waited_for(three: tuple[list[FakeReplica], Proxy]) -> None:
    replicas, proxy = three
    for replica in replicas:
        replica.spoil("status", NOT_THERE, path=LOAD, times=5)
    assert (await proxy.load("v1"))[0] == 200
    await until(lambda: all(replica.count(LOAD) == 6 for replica in replicas))


async def test_a_mount_that_never_comes_is_504_and_not_404() -> None:
    async with FakeReplica() as one, FakeReplica() as two, running([one, two], timing={"broadcast_s": 0.3}) as proxy:
        two.spoil("status", NOT_THERE, path=LOAD)
        code, error = await proxy.load("v1")
        assert code == 504
        assert "No adapter found" in error["error"]["message"]
        assert one.count(LOAD) == 1
        assert one.adapters == {}


async def test_an_outage_during_a_load_is_absorbed(three: tuple[list[FakeReplica], Proxy]) -> None:
    replicas, proxy = three
    for replica in replicas:
        replica.spoil("status", (500, "engine busy"), path=LOAD, times=3)
        replica.spoil("lose", path=LOAD, first=4, times=1)
    assert (await proxy.load("v1"))[0] == 200


async def test_a_dead_replica_does_not_hold_up_a_load_and_catches_up() -> None:
    async with FakeReplica() as one, FakeReplica() as two, running([one, two]) as proxy:
        assert (await proxy.load("v1"))[0] == 200
        await two.die()
        assert (await proxy.load("v2"))[0] == 200
        assert set(one.adapters) == {"v1", "v2"}
        await two.start()
        await proxy.all_up(2)
        assert set(two.adapters) == {"v1", "v2"}


async def test_completions_during_a_restart_all_succeed_and_none_comes_before_its_adapter(tmp_path: Path) -> None:
    async with FakeReplica() as one, FakeReplica() as two, running([one, two]) as proxy:
        for name in ("v1", "v2", "v3"):
            assert (await proxy.load(name, adapter(tmp_path / name, name.encode())))[0] == 200
        await until(lambda: len(two.adapters) == 3)
        await two.die()
        await two.start()
        codes = []

        async def ask() -> None:
            codes.append((await proxy.complete("v3"))[0])

        async with anyio.create_task_group() as tasks:
            for _ in range(200):
                tasks.start_soon(ask)
        assert codes == [200] * 200
        await until(lambda: set(two.adapters) == {"v1", "v2", "v3"})


@pytest.mark.parametrize("number", [1, 2])
async def test_a_404_for_a_live_adapter_is_repaired_and_not_passed_on(number: int, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(FakeReplica()) for _ in range(number)]
        proxy = await stack.enter_async_context(running(replicas, timing={"poll_s": 60.0}))
        assert (await proxy.load("v3", adapter(tmp_path / "v3")))[0] == 200
        await until(lambda: all(replica.adapters for replica in replicas))
        for replica in replicas:
            replica.adapters.clear()
        assert (await proxy.complete("v3"))[0] == 200
        await until(lambda: any(replica.adapters for replica in replicas))


async def test_the_same_content_is_no_second_load_and_other_content_takes_over_under_a_fresh_name(tmp_path: Path) -> None:
    async with FakeReplica() as one, running([one]) as proxy:
        path = adapter(tmp_path / "v3", b"old")
        for _ in range(2):
            assert (await proxy.load("v3", path))[0] == 200
        assert one.count(LOAD) == 1
        adapter(path, b"new")
        assert (await proxy.load("v3", path))[0] == 200
        await until(lambda: len(one.adapters) == 1)
        (fresh,) = one.adapters
        assert fresh != "v3"
        code, answer = await proxy.complete("v3")
        assert code == 200
        assert answer["model"] == "v3"
        assert asked(one)[-1]["model"] == fresh
        sent = [seen for seen in one.requests if seen.path == "/v1/completions"][-1]
        assert int(sent.headers["content-length"]) == len(json.dumps(sent.body))
        code, text = await proxy.complete("v3", stream=True)
        assert code == 200
        assert '"model": "v3"' in text
        assert fresh not in text
        _, models = await proxy.get("/v1/models")
        assert [card["id"] for card in models["data"]] == ["base", "v3"]


async def test_other_content_waits_for_requests_that_run_under_the_old_one(tmp_path: Path) -> None:
    async with FakeReplica() as one, running([one]) as proxy, anyio.create_task_group() as tasks:
        path = adapter(tmp_path / "v3", b"old")
        await proxy.load("v3", path)
        one.spoil("hang", times=1)
        leaving = anyio.CancelScope()

        async def ask() -> None:
            with leaving:
                await proxy.complete("v3")

        tasks.start_soon(ask)
        await until(lambda: asked(one))
        adapter(path, b"new")
        assert (await proxy.load("v3", path))[0] == 200
        assert len(one.adapters) == 2
        leaving.cancel()
        await until(lambda: len(one.adapters) == 1)
        assert "v3" not in one.adapters


async def test_an_adapter_that_the_proxy_did_not_load_is_never_taken_for_ours(tmp_path: Path) -> None:
    async with FakeReplica(adapters={"v1": "/of/a/run/before"}) as one, running([one]) as proxy:
        assert (await proxy.complete("v1"))[0] == 200
        assert (await proxy.load("v1", adapter(tmp_path / "v1")))[0] == 200
        assert (await proxy.complete("v1"))[0] == 200
        assert asked(one)[-1]["model"] != "v1"
        await until(lambda: "v1" not in one.adapters)


async def test_unload_is_at_once_when_idle_and_a_second_one_is_no_5xx(three: tuple[list[FakeReplica], Proxy]) -> None:
    replicas, proxy = three
    await proxy.load("v1")
    assert (await proxy.unload("v1"))[0] == 200
    assert not any(replica.adapters for replica in replicas)
    assert (await proxy.complete("v1"))[0] == 404
    assert (await proxy.unload("v1"))[0] == 404


async def test_unload_in_use_lets_the_running_request_finish(three: tuple[list[FakeReplica], Proxy]) -> None:
    replicas, proxy = three
    await proxy.load("v1")
    await until(lambda: all(replica.adapters for replica in replicas))
    for replica in replicas:
        replica.spoil("delay", 0.2)
    answers = []
    async with anyio.create_task_group() as tasks:

        async def ask() -> None:
            answers.append(await proxy.complete("v1"))

        tasks.start_soon(ask)
        await until(lambda: any(asked(replica) for replica in replicas))
        (busy,) = [replica for replica in replicas if asked(replica)]
        assert (await proxy.unload("v1"))[0] == 200
        assert "v1" in busy.adapters
    assert answers[0][0] == 200
    await until(lambda: not any(replica.adapters for replica in replicas))


async def test_a_third_replica_serves_a_version_only_after_its_load() -> None:
    async with FakeReplica() as one, FakeReplica() as late, running([one]) as proxy:
        await proxy.load("v4")
        late.spoil("status", NOT_THERE, path=LOAD)
        assert (await proxy.post("/grpod/v1/replicas", {"url": late.url, "owner": "proxy"}))[0] == 200
        await until(lambda: late.count(LOAD) > 2)
        for _ in range(4):
            assert (await proxy.complete("v4"))[0] == 200
        assert not asked(late)
        late.spoilings.clear()
        await until(lambda: "v4" in late.adapters)


async def test_a_generators_replica_gets_completions_and_nothing_else() -> None:
    async with FakeReplica() as ours, FakeReplica(adapters={"grpod-r-v1-e1": "/x"}) as theirs, running([ours]) as proxy:
        assert (await proxy.post("/grpod/v1/replicas", {"url": theirs.url, "owner": "generator"}))[0] == 200
        await proxy.all_up(2)
        await proxy.load("v1")
        await proxy.post("/pause?mode=keep")
        await proxy.post("/resume")
        assert (await proxy.unload("grpod-r-v1-e1"))[0] == 404
        assert (await proxy.complete("grpod-r-v1-e1"))[0] == 200
        assert {seen.method for seen in theirs.requests if seen.path != "/v1/completions"} == {"GET"}
        assert set(theirs.adapters) == {"grpod-r-v1-e1"}
        assert not asked(ours)


async def test_without_a_replica_of_its_own_the_proxy_cannot_load() -> None:
    async with FakeReplica() as theirs, running() as proxy:
        await proxy.post("/grpod/v1/replicas", {"url": theirs.url, "owner": "generator"})
        await proxy.all_up(1)
        code, error = await proxy.load("v1")
        assert code == 503
        assert "owns" in error["error"]["message"]


async def test_pause_and_resume_reach_all_and_a_latecomer_follows(three: tuple[list[FakeReplica], Proxy]) -> None:
    replicas, proxy = three
    assert await proxy.post("/pause?mode=keep") == (200, {"status": "paused"})
    await until(lambda: all(replica.paused for replica in replicas))
    assert {seen.query for replica in replicas for seen in replica.requests if seen.path == "/pause"} == {"mode=keep"}
    assert await proxy.get("/is_paused") == (200, {"is_paused": True})
    await replicas[0].die()
    await proxy.until(lambda status: "down" in [r["state"] for r in status["replicas"]])
    replicas[0].paused = False
    await replicas[0].start()
    await until(lambda: replicas[0].paused)
    assert (await proxy.post("/resume"))[0] == 200
    await until(lambda: not any(replica.paused for replica in replicas))
    assert (await proxy.post("/pause?mode=nap"))[0] == 400


async def test_a_pause_without_a_quorum_is_rolled_back() -> None:
    async with FakeReplica() as one, FakeReplica() as two, running([one, two], timing={"broadcast_s": 0.3}) as proxy:
        two.spoil("status", (500, "busy"), path="/pause")
        assert (await proxy.post("/pause?mode=keep"))[0] == 504
        await until(lambda: not one.paused)
        assert (await proxy.get("/is_paused"))[1] == {"is_paused": False}


async def test_an_outage_during_a_pause_is_absorbed(three: tuple[list[FakeReplica], Proxy]) -> None:
    replicas, proxy = three
    for replica in replicas:
        replica.spoil("status", (500, "busy"), path="/pause|/resume", times=4)
    assert (await proxy.post("/pause?mode=keep"))[0] == 200
    assert (await proxy.post("/resume"))[0] == 200


async def test_a_failed_load_does_not_leave_the_replicas_paused(three: tuple[list[FakeReplica], Proxy]) -> None:
    replicas, proxy = three
    await proxy.post("/pause?mode=keep")
    for replica in replicas:
        replica.spoil("status", (400, "no"), path=LOAD)
    assert (await proxy.load("v1"))[0] == 400
    await until(lambda: not any(replica.paused for replica in replicas))


async def test_a_pause_is_not_for_ever() -> None:
    async with FakeReplica() as one, running([one], timing={"pause_s": 0.1}) as proxy:
        assert (await proxy.post("/pause?mode=keep"))[0] == 200
        await until(lambda: one.count("/resume") == 1)
        assert (await proxy.get("/is_paused"))[1] == {"is_paused": False}


async def test_a_client_that_leaves_during_a_load_has_not_loaded(three: tuple[list[FakeReplica], Proxy]) -> None:
    replicas, proxy = three
    for replica in replicas[1:]:
        replica.spoil("status", NOT_THERE, path=LOAD)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(proxy.load, "v1")
            await until(lambda: replicas[0].adapters)
            scope.cancel()
    await until(lambda: not replicas[0].adapters)
    for replica in replicas[1:]:
        replica.spoilings.clear()
    assert (await proxy.load("v2"))[0] == 200
    await until(lambda: all(set(replica.adapters) == {"v2"} for replica in replicas))


@pytest.mark.parametrize(
    ("name", "path", "code"),
    [
        ("v1", "/mnt/run/v1", 200),
        ("v1", "/mnt/run", 403),
        ("v1", "/mnt/runner/v1", 403),
        ("v1", "/mnt/run/../secret", 403),
        ("v1", "relative/v1", 403),
        ("base", "/mnt/run/v1", 400),
        ('v"1', "/mnt/run/v1", 400),
        ("", "/mnt/run/v1", 400),
        (5, "/mnt/run/v1", 400),
    ],
)
async def test_names_and_paths_that_may_not_be_loaded(name: Any, path: str, code: int) -> None:
    async with FakeReplica() as one, running([one], mount="/mnt/run/") as proxy:
        assert (await proxy.load(name, path))[0] == code
        assert one.count(LOAD) == (code == 200)
