from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from grpod.bucket.memory import MemoryBucket
from grpod.config import Config
from grpod.errors import BucketError, ConfigError, NotReady, WireError
from grpod.run.join import join, read_run
from grpod.wire import keys

pytestmark = pytest.mark.anyio
CONFIG = {
    "model": {"base": "./base"},
    "data": {"source": "prompts.jsonl"},
    "rewards": [{"function": "length"}],
    "learner": {"steps": 10, "loss": {"clip_low": 0.1}},
}


def config(**sections: Any) -> Config:
    return Config.model_validate({**CONFIG, **sections})


@pytest.fixture
def bucket(request: pytest.FixtureRequest) -> MemoryBucket:
    return MemoryBucket(f"memory://{request.node.nodeid}")


async def test_the_first_writes_down_what_is_agreed(bucket: MemoryBucket) -> None:
    joined = await join(bucket, config(), "f" * 64, may_create=True, timeout_s=5, inputs={"prompts.jsonl": "abc"})
    assert joined.created
    assert joined.changes == {}
    run = await read_run(bucket)
    assert run == joined.run
    assert run is not None
    assert len(run.run_id) == 12
    assert int(run.run_id, 16) >= 0
    assert run.base_fingerprint == "f" * 64
    assert run.inputs == {"prompts.jsonl": "abc"}
    assert run.config["learner"]["steps"] == 10
    assert "bucket" not in run.config["run"]  # local


async def test_who_comes_later_joins(bucket: MemoryBucket) -> None:
    first = await join(bucket, config(), "f", may_create=True, timeout_s=5)
    for may_create in (True, False):
        joined = await join(bucket, config(), "f", may_create=may_create, timeout_s=5)
        assert (joined.run, joined.created) == (first.run, False)
    assert (await join(bucket, config(), None, may_create=False, timeout_s=5)).run == first.run


async def test_every_agreed_key_that_differs_is_named_with_both_values(bucket: MemoryBucket) -> None:
    await join(bucket, config(), "f" * 64, may_create=True, timeout_s=5)
    other = config(run={"max_lag": 9}, generator={"group_size": 2}, rewards=[{"function": "format"}])
    with pytest.raises(ConfigError) as caught:
        await join(bucket, other, "e" * 64, may_create=False, timeout_s=5)
    message = str(caught.value)
    for words in (
        "run.max_lag is 4 in the run and 9 here",
        "generator.group_size is 8",
        "rewards",
        "ffffffffffff",
        "eeeeeeeeeeee",
    ):
        assert words in message
    assert bucket.url in message


async def test_changes_of_the_learners_own_keys_are_no_fault(bucket: MemoryBucket) -> None:
    await join(bucket, config(), "f", may_create=True, timeout_s=5)
    other = config(learner={"steps": 20, "learning_rate": 1e-4, "loss": {"clip_low": 0.2}})
    joined = await join(bucket, other, "f", may_create=True, timeout_s=5)
    assert joined.changes == {"learner.steps": 20, "learner.loss.clip_low": 0.2}


async def test_local_keys_may_differ(bucket: MemoryBucket) -> None:
    await join(bucket, config(), "f", may_create=True, timeout_s=5)
    other = config(run={"name": "x", "grace_s": 3}, model={"base": "/elsewhere"}, proxy={"listen": "127.0.0.1:0"})
    await join(bucket, other, "f", may_create=False, timeout_s=5)


@pytest.mark.parametrize("may_create", [True, False])
async def test_the_learners_key_that_generators_read_too_must_not_differ(bucket: MemoryBucket, may_create: bool) -> None:
    await join(bucket, config(), "f", may_create=True, timeout_s=5)
    other = config(learner={"steps": 10, "loss": {"clip_low": 0.1, "mask_truncated": False}})
    with pytest.raises(ConfigError, match=r"learner\.loss\.mask_truncated is True in the run and False here"):
        await join(bucket, other, "f", may_create=may_create, timeout_s=5)


async def test_who_may_not_create_waits_for_the_learner(bucket: MemoryBucket) -> None:
    joined = []

    async def generator() -> None:
        joined.append(await join(bucket, config(), "f", may_create=False, timeout_s=30))

    with capture_logs() as logs:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generator)
            await anyio.wait_all_tasks_blocked()
            assert not joined
            learner = await join(bucket, config(), "f", may_create=True, timeout_s=5)
    assert joined[0].run == learner.run
    assert [log["reason"] for log in logs if log["event"] == "waiting_for_run"] == ["no learner has begun it"]


async def test_nobody_begins_it(bucket: MemoryBucket) -> None:
    with pytest.raises(NotReady, match=f"no run at {bucket.url} after 0.2 s: no learner has begun it"):
        await join(bucket, config(), "f", may_create=False, timeout_s=0.2)


async def test_of_many_that_come_first_one_creates_it(bucket: MemoryBucket) -> None:
    joined = []

    async def learner() -> None:
        joined.append(await join(bucket, config(), "f", may_create=True, timeout_s=5))

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(learner)
    assert len({j.run.run_id for j in joined}) == 1
    assert sum(j.created for j in joined) == 1


class Faulty(MemoryBucket):
    """The first `lost` puts are applied and not acknowledged; the first `away` gets fail."""

    lost = 0
    away = 0

    async def put(self, items: Mapping[str, bytes | Path], *, create: bool = False) -> None:
        await super().put(items, create=create)
        if self.lost:
            self.lost -= 1
            raise BucketError("time-out")

    async def get(self, key: str, **more: Any) -> Any:
        if self.away:
            self.away -= 1
            raise BucketError("connection refused")
        return await super().get(key, **more)

    async def changed(self, timeout_s: float) -> None:
        await anyio.lowlevel.checkpoint()


async def test_a_lost_reply_to_its_creation_is_settled_by_reading_it(request: pytest.FixtureRequest) -> None:
    bucket = Faulty(f"memory://{request.node.nodeid}")
    bucket.lost = 1
    joined = await join(bucket, config(), "f", may_create=True, timeout_s=5)
    assert joined.created
    assert joined.run == await read_run(bucket)


async def test_a_bucket_that_is_away_is_waited_for_and_named(request: pytest.FixtureRequest) -> None:
    bucket = Faulty(f"memory://{request.node.nodeid}")
    bucket.away = 3
    assert (await join(bucket, config(), "f", may_create=True, timeout_s=5)).created
    bucket.away = 10**9
    with pytest.raises(NotReady, match="connection refused"):
        await join(bucket, config(), "f", may_create=True, timeout_s=0.2)


async def test_a_run_json_of_somebody_else_is_not_joined(bucket: MemoryBucket) -> None:
    await bucket.put({keys.RUN: b'{"format": "99.0"}'})
    with pytest.raises(WireError, match=r"run\.json: format '99\.0'"):
        await join(bucket, config(), "f", may_create=True, timeout_s=5)


class NotAtomic(MemoryBucket):
    atomic_create = False

    async def put(self, items: Mapping[str, bytes | Path], *, create: bool = False) -> None:
        await super().put(items)  # the rival has not seen it either


async def test_without_atomic_creates_all_take_what_stands_after_the_settle_time(request: pytest.FixtureRequest) -> None:
    bucket = NotAtomic(f"memory://{request.node.nodeid}")
    joined = []

    async def learner() -> None:
        joined.append(await join(bucket, config(), "f", may_create=True, timeout_s=5, settle_s=0.2))

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(learner)
    stands = await read_run(bucket)
    assert [j.run for j in joined] == [stands] * 3
