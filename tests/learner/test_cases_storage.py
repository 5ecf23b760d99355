"""Storage that takes nothing for a while: one message, nothing torn under a final name, and whole again once there is room."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

import anyio
import pytest
import structlog

from grpod.bucket.memory import MemoryBucket
from grpod.errors import BucketError
from grpod.run.audit import audit
from grpod.wire import keys
from tests.learner.alone import Learning, learning

pytestmark = pytest.mark.anyio


class FullBucket(MemoryBucket):
    """A put of `no_room` keys fails; the others of its batch are written."""

    def __init__(self) -> None:
        super().__init__(f"memory://{secrets.token_hex(4)}")
        self.no_room: Callable[[str], bool] = lambda key: False
        self.failures, self.enough = 0, 0
        self.failed = anyio.Event()

    async def put(self, items: Mapping[str, bytes | Path], *, create: bool = False) -> None:
        failing = [key for key in items if self.no_room(key)]
        await super().put({key: data for key, data in items.items() if key not in failing}, create=create)
        if failing:
            self.failures += 1
            if self.failures > self.enough:
                self.failed.set()
            raise BucketError("no space left on device (0 B free of 20 MB)", keys=failing)


async def one_more(run: Learning, seq: int) -> None:
    await run.ship("found", seq, [await run.group(f"found/{seq}")])


@pytest.mark.parametrize(
    ("no_room", "failures"),
    [
        (lambda key: key.endswith(keys.OPTIMIZER), 5),  # beyond what one upload tries: the snapshot is given up, and made anew
        (lambda key: key.startswith(keys.CHECKPOINTS) and key.endswith(keys.MANIFEST), 1),
        (lambda key: key.startswith((keys.CHECKPOINTS, keys.LEDGER, keys.METRICS)) or "v00000002" in key, 1),
    ],
    ids=["optimizer", "manifest", "nearly everything"],
)
async def test_a_full_disk_is_one_message_and_all_is_written_once_there_is_room(
    tiny_base: Path, no_room: Callable[[str], bool], failures: int
) -> None:
    bucket = FullBucket()
    bucket.enough = failures
    with structlog.testing.capture_logs() as logs:
        async with learning(bucket, tiny_base, steps=3, run={"max_lag": 9}) as run:
            await one_more(run, 0)
            await run.reached(1)
            bucket.no_room = no_room
            await one_more(run, 1)
            await bucket.failed.wait()
            manifests = [key for key in await run.listed(keys.CHECKPOINTS) if key.endswith(keys.MANIFEST)]
            assert [keys.parse_checkpoint(key) for key in manifests] == [(0, 1), (1, 1)], "what is not whole has no manifest"
            bucket.no_room = lambda key: False
            while keys.checkpoint(2, 1, keys.MANIFEST) not in await run.listed(keys.CHECKPOINTS):  # nothing else is to come
                await bucket.changed(0.2)
            await run.reached(2)
            await one_more(run, 2)
            assert await run.end() is None
            assert {end.end for end in (await run.ends()).values()} == {"trained"}
    loud = [line for line in logs if line["log_level"] in ("warning", "error") and line["event"] != "metrics_not_written"]
    assert [(line["event"], line["error"]) for line in loud] == [("put_failed", "no space left on device (0 B free of 20 MB)")]
    assert (await audit(bucket, deep=True)).violations == []
    assert (await audit(bucket)).damaged == {}


async def test_a_version_whose_place_is_taken_is_given_another_number(tiny_base: Path) -> None:
    """Somebody else's object under the next number: that number is given up, and the weights go out under the one after."""
    bucket = FullBucket()
    async with learning(bucket, tiny_base, steps=2, run={"max_lag": 9}) as run:
        await run.manifest()
        await bucket.put({keys.adapter(1, 1, keys.ADAPTER_WEIGHTS): b"not ours"})
        await one_more(run, 0)
        manifest = await run.reached(1)
        assert manifest.version == 2
        await one_more(run, 1)
        assert await run.end() is None
    found = await bucket.get(keys.adapter(1, 1, keys.ADAPTER_WEIGHTS))
    assert found is not None
    assert found.data == b"not ours"
