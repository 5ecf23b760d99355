"""A learner that got no warning: what the next one begins from, and what becomes of all that was generated meanwhile."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog

from grpod.bucket.base import Bucket
from grpod.bucket.file import FileBucket
from grpod.bucket.memory import MemoryBucket
from grpod.run.audit import audit
from grpod.wire import keys
from tests.learner.alone import Learning, learning

pytestmark = pytest.mark.anyio
RARELY = {"checkpoint_every": 1000}


class Killed(Exception):
    pass


@asynccontextmanager
async def killed(bucket: Bucket, base: Path, **section: Any) -> AsyncIterator[Learning]:
    """It is cut off at the end of the block: no last checkpoint."""
    with pytest.raises(ExceptionGroup, match="unhandled") as cut:
        async with learning(bucket, base, **section) as run:
            yield run
            raise Killed
    assert cut.group_contains(Killed)


async def train(run: Learning, count: int, *, epoch: int = 1) -> None:
    """A step a group, each made under what was the newest version then."""
    for n in range(count):
        newest = await run.reached(n)
        await run.ship("found", n, [await run.group(f"found/{n}", version=newest.version, epoch=epoch)])
    await run.reached(count)


async def test_groups_trained_after_the_last_checkpoint_are_trained_again_however_small_the_lag(tiny_base: Path) -> None:
    """Their versions are orphans with the place of what is resumed: the first publish would make them stale."""
    bucket = MemoryBucket(f"memory://{secrets.token_hex(4)}")  # where a publish lands before the next step is done
    async with killed(bucket, tiny_base, steps=6, run={"max_lag": 0}, **RARELY) as run:
        await train(run, 5)
    async with learning(bucket, tiny_base, steps=5, run={"max_lag": 0}, **RARELY) as run:
        assert await run.end() is None
    assert {group: end.end for group, end in (await run.ends()).items()} == {f"found/{n}": "trained" for n in range(5)}
    assert (await audit(bucket)).violations == []


async def test_whoever_finds_a_trained_version_finds_a_checkpoint(tmp_path: Path, tiny_base: Path) -> None:
    bucket = FileBucket(tmp_path / "run")
    async with killed(bucket, tiny_base, steps=9, **RARELY) as run:
        await train(run, 1)
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["s00000000-e000001"]
    with structlog.testing.capture_logs() as logs:
        async with learning(bucket, tiny_base, steps=1, **RARELY) as run:
            assert await run.end() is None
    assert [(line["step"], line["resumed"]) for line in logs if line["event"] == "policy_loaded"] == [(0, True)]


@pytest.mark.parametrize("times", [1, 2])
async def test_killed_before_any_step_it_begins_again_without_being_told_to(
    tmp_path: Path, tiny_base: Path, times: int
) -> None:
    bucket = FileBucket(tmp_path / "run")
    for epoch in range(1, times + 1):
        async with killed(bucket, tiny_base, **RARELY) as run:
            await run.manifest(version=epoch - 1, epoch=epoch)
    torn = tmp_path / "run" / keys.checkpoint_folder(0, 1)
    torn.mkdir(parents=True)
    shutil.copy(tmp_path / "run" / keys.adapter(0, 1, keys.ADAPTER_WEIGHTS), torn)
    async with learning(bucket, tiny_base, **RARELY) as run:
        newest = await run.manifest(version=times, epoch=times + 1)
        await run.ship("found", 0, [await run.group("found/0", version=newest.version, epoch=newest.epoch)])
        assert await run.end() is None
    assert (await run.final()).step == 1
