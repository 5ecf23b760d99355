"""What goes out in which object, and what a bucket that fails makes of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
import structlog

from grpod.bucket.memory import MemoryBucket
from grpod.config import Config
from grpod.errors import BucketError
from grpod.generator.ship import Outbox
from grpod.run.notice import Notice
from grpod.wire import keys
from grpod.wire.rollout import Drop, Group, Shipment, decode_shipment
from grpod.wire.state import GeneratorState
from tests.learner.policies import FOUR, group

pytestmark = pytest.mark.anyio


class Flaky(MemoryBucket):
    """Puts of keys that start with `failing` fail, `after_all`: though they were done. Remembers what was put, in order."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.failing: dict[str, int] = {}
        self.after_all = False
        self.order: list[str] = []

    async def put(self, items: Mapping[str, bytes | Path], *, create: bool = False) -> None:
        (key,) = items
        for start in self.failing:
            if key.startswith(start) and self.failing[start] > 0:
                self.failing[start] -= 1
                if self.after_all:
                    await super().put(items, create=create)
                raise BucketError("away")
        await super().put(items, create=create)
        self.order.append(key.partition("/")[0])

    async def shipments(self) -> list[Shipment]:
        found = [await self.get(meta.key) async for meta in self.list(keys.ROLLOUTS)]
        return [decode_shipment(stored.data, "") for stored in found if stored is not None]


class Scene:
    def __init__(self, url: str, period_s: float) -> None:
        self.bucket = Flaky(url)
        self.awaited = 0
        self.epoch = 1
        self.notice = Notice()
        config = Config.model_validate(
            {"run": {"bucket": url}, "model": {"base": "b"}, "generator": {"ship_every_s": period_s, "state_every_s": 1000.0}}
        )
        self.outbox = Outbox(
            self.bucket,
            config,
            name="g",
            base_fingerprint="f",
            device="",
            notice=self.notice,
            awaited=lambda: self.awaited,
            describe=lambda: ([], []),
            epoch=lambda: self.epoch,
        )

    def done(self, *group_ids: str) -> None:
        for group_id in group_ids:
            self.outbox.done(replace(made(), group_id=group_id))

    async def shipped(self, count: int) -> list[list[str]]:
        """Group ids by object, once so many objects are there."""
        while len(found := await self.bucket.shipments()) < count:
            await self.bucket.changed(1.0)
        return [[one.group_id for one in (*shipment.groups, *shipment.drops)] for shipment in found]


def made() -> Group:
    return group(*FOUR)


@asynccontextmanager
async def scene(folder: Path, *, period_s: float = 1000.0) -> AsyncIterator[Scene]:
    run = Scene(f"memory://{folder}", period_s)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.outbox.run)
            yield run
            run.outbox.close("done")


async def test_what_gathered_while_the_bucket_was_away_goes_out_in_objects_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpod.generator.ship._AGAIN_S", 0.01)
    size = 9 * sum(len(r.completion_ids) + len(made().prompt_ids) for r in made().rollouts)
    monkeypatch.setattr("grpod.generator.ship._MAX_BYTES", 2 * size)
    async with scene(tmp_path) as run:
        run.bucket.failing = {"rollouts": 3}
        ids = [run.outbox.begin() for _ in range(5)]
        run.done(*ids)
        assert await run.shipped(2) == [ids[:2], ids[2:4]], "the fifth is not due"
    assert await run.shipped(3) == [ids[:2], ids[2:4], ids[4:]]


async def test_an_object_whose_answer_was_lost_is_not_put_again_with_more_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpod.generator.ship._AGAIN_S", 0.05)
    async with scene(tmp_path, period_s=0.001) as run:
        run.bucket.failing, run.bucket.after_all = {"rollouts": 1}, True
        ids = [run.outbox.begin() for _ in range(2)]
        run.done(ids[0])
        await run.shipped(1)
        run.done(ids[1])
        assert await run.shipped(2) == [ids[:1], ids[1:]]


async def test_a_learner_that_waits_gets_companions_in_one_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpod.generator.ship._COMPANIONS_S", 1000.0)
    async with scene(tmp_path) as run:
        run.awaited = 2
        ids = [run.outbox.begin() for _ in range(4)]
        run.done(ids[0])
        await anyio.wait_all_tasks_blocked()
        assert await run.bucket.shipments() == []
        run.done(ids[1])  # as many as are waited for
        assert await run.shipped(1) == [ids[:2]]
        run.done(ids[2], ids[3])  # nothing else is in flight
        assert await run.shipped(2) == [ids[:2], ids[2:]]
        last = run.outbox.begin(), run.outbox.begin()
        monkeypatch.setattr("grpod.generator.ship._COMPANIONS_S", 0.01)
        run.done(last[0])
        assert (await run.shipped(3))[2] == [last[0]]


async def test_at_most_two_objects_go_out_before_the_state_that_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpod.generator.ship._MAX_BYTES", 1)
    async with scene(tmp_path) as run:
        run.done(*[run.outbox.begin() for _ in range(5)])
        await run.shipped(5)
        await run.bucket.changed(1.0)
    order = "".join(folder[0] for folder in run.bucket.order)
    assert order.startswith("rrsrrsrs"), "r: an object, s: the state"


async def test_a_bucket_that_is_away_at_the_end_costs_the_last_state_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpod.generator.ship._AGAIN_S", 0.0)
    with structlog.testing.capture_logs() as logs:
        async with scene(tmp_path) as run:
            await anyio.wait_all_tasks_blocked()
            run.bucket.failing = {"state": 1000}
    assert [line["event"] for line in logs] == ["last_state_not_written"]


async def test_groups_that_were_not_shipped_in_time_are_told_aloud(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs, anyio.CancelScope() as time_left:
        async with scene(tmp_path) as run:
            run.bucket.failing = {"rollouts": 1000}
            run.done(run.outbox.begin())
            run.outbox.done(Drop(group_id=run.outbox.begin(), reason="interrupted"))
            run.outbox.close("stopped")
            await anyio.wait_all_tasks_blocked()
            time_left.cancel()
    (said,) = [line for line in logs if line["event"] == "groups_not_shipped"]
    assert (said["groups"], said["log_level"]) == (2, "error")


async def test_a_learner_that_comes_anew_is_told_at_once_who_lives(tmp_path: Path) -> None:
    async with scene(tmp_path) as run:

        async def counter() -> int:
            found = await run.bucket.get(keys.generator_state("g"))
            assert found is not None
            return GeneratorState.decode(found.data, "").counter

        while keys.generator_state("g") not in await run.bucket.stat([keys.generator_state("g")]):
            await run.bucket.changed(1.0)
        assert await counter() == 1
        run.epoch = 2
        run.notice.tell()
        while await counter() == 1:
            await run.bucket.changed(1.0)
        assert await counter() == 2
