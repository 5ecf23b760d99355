"""Uploads that fail: what is durable stays as it is, what is not goes out again under new numbers."""

from __future__ import annotations

import secrets

import anyio
import pytest

from grpod.bucket.memory import MemoryBucket
from grpod.learner.book import Book
from grpod.learner.publish import Identity, Publisher, Snapshot
from grpod.learner.versions import Versions
from grpod.wire import keys
from grpod.wire.adapter import Lora
from grpod.wire.checkpoint import Checkpoint
from grpod.wire.tables import End, decode_ledger
from tests.buckets import FaultyBucket
from tests.learner.helpers import BASE, RUN, lineage

pytestmark = pytest.mark.anyio


class World:
    def __init__(self) -> None:
        self.bucket = FaultyBucket(MemoryBucket(f"memory://{secrets.token_hex(4)}"))
        self.book = Book()
        self.fenced = 0
        self.publisher = Publisher(
            self.bucket,
            Identity(
                run_id=RUN,
                epoch=1,
                base_fingerprint=BASE,
                lora=Lora(r=1, alpha=1, targets=["q_proj"]),
                probe_ids=[1, 2],
                base_logprobs=[-1.0],
                keep_checkpoints=2,
            ),
            book=self.book,
            versions=Versions(self.bucket, lineage()),
            next_version=0,
            next_pos=0,
            segments=[],
            kept=[],
            score=lambda *_: [-1.0],
            on_landed=lambda *_: None,
            fence=self.fence,
        )

    async def fence(self) -> None:
        self.fenced += 1

    def end(self, group_id: str, step: int) -> None:
        self.book.end(End(group_id=group_id, end="trained", step=step))

    def snapshot(self, step: int, *, publish: bool = True, checkpoint: bool = True) -> Snapshot:
        return Snapshot(
            step=step,
            adapter={keys.ADAPTER_WEIGHTS: b"w%d" % step, keys.ADAPTER_CONFIG: b"{}"},
            publish=publish,
            checkpoint=checkpoint,
            optimizer=b"o",
            ends=tuple(self.book.fresh),
        )

    async def ledger(self, step: int) -> list[str]:
        """Group ids of the segments that the checkpoint of this step lists, in order."""
        found = await self.bucket.get(keys.checkpoint(step, 1, keys.MANIFEST))
        assert found is not None
        ids = []
        for segment in Checkpoint.decode(found.data, "manifest").ledger:
            data = await self.bucket.get(segment)
            assert data is not None
            ids += [end.group_id for end in decode_ledger(data.data, segment)]
        return ids

    async def checkpoints(self) -> list[str]:
        return sorted({meta.key.split("/")[1] async for meta in self.bucket.list(keys.CHECKPOINTS)})


async def test_a_durable_segment_is_never_written_again() -> None:
    world = World()
    await world.publisher.upload(world.snapshot(0))
    world.end("g/0", 1)
    await world.publisher.upload(world.snapshot(1))
    world.end("g/1", 1)
    await world.publisher.upload(world.snapshot(1))
    assert await world.ledger(1) == ["g/0"], "the second end of this step waits for the next checkpoint"
    world.end("g/2", 2)
    await world.publisher.upload(world.snapshot(2))
    assert await world.ledger(2) == ["g/0", "g/1", "g/2"]


@pytest.mark.parametrize("applied", [False, True])
async def test_a_checkpoint_that_failed_is_written_with_what_ended_since(
    applied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpod.learner.publish._ATTEMPTS", 1)
    world = World()
    await world.publisher.upload(world.snapshot(0))
    world.end("g/0", 1)
    world.bucket.spoil("put", r"checkpoints/s00000001-.*", times=1, applied=applied)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.publisher.run)
        world.publisher.offer(world.snapshot(1))
        await world.publisher.drain()
        failed = world.publisher.take_failed()
        assert failed is not None
        assert world.publisher.take_failed() is None, "told once: the retry in flight is not due again"
        world.end("g/1", 1)
        world.publisher.offer(world.snapshot(1, publish=False))
        await world.publisher.drain()
        tasks.cancel_scope.cancel()
    assert await world.ledger(1) == ["g/0", "g/1"]


async def test_old_checkpoints_go_after_a_fresh_look_at_the_lease() -> None:
    world = World()
    for step in range(4):
        await world.publisher.upload(world.snapshot(step))
    assert await world.checkpoints() == ["s00000002-e000001", "s00000003-e000001"]
    assert world.fenced == 2


async def test_a_delete_that_fails_is_made_up_for_and_fails_no_upload() -> None:
    world = World()
    world.bucket.spoil("delete", times=1)
    for step in range(4):
        await world.publisher.upload(world.snapshot(step))
    assert world.publisher.checkpointed_step == 3
    assert await world.checkpoints() == ["s00000002-e000001", "s00000003-e000001"]


async def test_weights_that_go_out_again_keep_their_position() -> None:
    world = World()
    await world.publisher.upload(world.snapshot(0))
    await world.publisher.upload(world.snapshot(1))
    again = Snapshot(**{**vars(world.snapshot(1, checkpoint=False)), "republished": True})
    await world.publisher.upload(again)
    await world.publisher.upload(world.snapshot(2))
    positions = []
    for version in range(4):
        found = await world.publisher._versions.find(version, 1)
        assert found is not None
        positions.append(found.pos)
    assert positions == [0, 1, 1, 2]
