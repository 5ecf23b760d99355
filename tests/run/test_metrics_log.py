"""A role's numbers reach the bucket once each, whatever the bucket does meanwhile."""

from __future__ import annotations

import itertools

import anyio
import pytest
import structlog

from grpod.bucket.memory import MemoryBucket
from grpod.errors import BucketError
from grpod.run.metrics_log import MetricWriter
from grpod.wire import keys
from grpod.wire.tables import decode_metrics
from tests.buckets import FaultyBucket

_numbers = itertools.count()


@pytest.fixture
def bucket() -> FaultyBucket:
    return FaultyBucket(MemoryBucket(f"memory://metrics-{next(_numbers)}"))


async def rows(bucket: FaultyBucket) -> list[tuple[int, int, str, float]]:
    found = []
    async for meta in bucket.list(keys.METRICS):
        who, seq = keys.parse_metrics(meta.key)
        assert who == "learner-e1"
        found += [(seq, r.step, r.name, r.value) for r in decode_metrics((await bucket.get(meta.key)).data, meta.key)]
    return found


@pytest.mark.anyio
async def test_what_was_added_stands_in_one_segment_at_a_flush(bucket):
    writer = MetricWriter(bucket, "learner-e1", wall=lambda: 12.5)
    await writer.flush()
    assert await rows(bucket) == []
    writer.add(1, {"reward": 0.5, "rewards/math": 1})
    writer.add(2, {"reward": 0.75})
    await writer.flush()
    writer.add(3, {"lag/max": 4})
    await writer.flush()
    await writer.flush()
    assert await rows(bucket) == [
        (0, 1, "reward", 0.5),
        (0, 1, "rewards/math", 1.0),
        (0, 2, "reward", 0.75),
        (1, 3, "lag/max", 4.0),
    ]
    data = (await bucket.get("metrics/learner-e1/0000000000.parquet")).data
    assert decode_metrics(data, "")[0].time == 12.5


@pytest.mark.anyio
async def test_a_name_that_the_table_lacks_is_refused_and_no_number_is_left_out(bucket):
    writer = MetricWriter(bucket, "learner-e1")
    with pytest.raises(KeyError, match="telemetry/metrics"):
        writer.add(1, {"rewardd": 1.0})
    writer.add(1, {"reward": float("nan"), "reward_std": float("inf"), "ratio": 1.0})
    await writer.flush()
    assert await rows(bucket) == [(0, 1, "ratio", 1.0)]


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.anyio
async def test_a_failed_put_loses_nothing_and_repeats_nothing(bucket, applied):
    writer = MetricWriter(bucket, "learner-e1")
    bucket.spoil("put", times=2, applied=applied, error=lambda found: BucketError("away", keys=found))
    writer.add(1, {"reward": 1.0})
    with pytest.raises(BucketError):
        await writer.flush()
    writer.add(2, {"reward": 2.0})
    if not applied:
        with pytest.raises(BucketError):
            await writer.flush()
    bucket.spoilings.clear()
    writer.add(3, {"reward": 3.0})
    await writer.flush()
    assert await rows(bucket) == [(0, 1, "reward", 1.0), (1, 2, "reward", 2.0), (1, 3, "reward", 3.0)]


@pytest.mark.anyio
async def test_it_writes_by_itself_and_says_once_that_the_bucket_is_away(bucket):
    writer = MetricWriter(bucket, "learner-e1", period_s=0.01)
    spoiling = bucket.spoil("put", times=3)
    with structlog.testing.capture_logs() as logs, anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(writer.run)
            writer.add(1, {"reward": 1.0})
            while not await rows(bucket):
                await bucket.changed(10)
            writer.add(2, {"reward": 2.0})
            while len(await rows(bucket)) < 2:
                await bucket.changed(10)
            tasks.cancel_scope.cancel()
    assert spoiling.times == 0
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == ["metrics_not_written"]
    assert await rows(bucket) == [(0, 1, "reward", 1.0), (1, 2, "reward", 2.0)]


@pytest.mark.anyio
async def test_a_put_that_is_cancelled_is_made_up_for_at_the_last_flush(bucket):
    started = anyio.Event()

    class Slow(FaultyBucket):
        async def put(self, items, *, create=False):
            if not started.is_set():
                started.set()
                await anyio.sleep_forever()
            await super().put(items, create=create)

    writer = MetricWriter(Slow(bucket), "learner-e1")
    writer.add(1, {"reward": 1.0})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(writer.flush)
        await started.wait()
        tasks.cancel_scope.cancel()
    await writer.flush()
    assert await rows(bucket) == [(0, 1, "reward", 1.0)]
