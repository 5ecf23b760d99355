"""The newest checkpoint is not whole, or none is: what a learner begins from, and what it leaves alone."""

from __future__ import annotations

import json
import secrets
import shutil
from pathlib import Path

import pytest
import structlog

from grpod.bucket.file import FileBucket
from grpod.errors import ConfigError
from grpod.run.audit import audit
from grpod.wire import keys
from grpod.wire.checkpoint import Checkpoint
from tests.learner.alone import Learning, learning

pytestmark = pytest.mark.anyio
GOAL = {"run": {"max_lag": 100}, "steps": 6, "keep_checkpoints": 2}


async def train(run: Learning, count: int, *, first: int = 0) -> None:
    for n in range(first, first + count):
        await run.ship("found", n, [await run.group(f"found/{n}")])
    await run.reached(first + count)


async def three_steps(bucket: FileBucket, base: Path) -> None:
    async with learning(bucket, base, **GOAL) as run:
        await train(run, 3)
        run.stop.request("restart")
        assert await run.end() is None


def broken(folder: Path) -> list[Path]:
    """Newer ones beside the newest whole one, each torn in its way."""
    whole = sorted(path for path in (folder / keys.CHECKPOINTS).iterdir())[-1]

    def copy(steps: int) -> Path:
        return Path(shutil.copytree(whole, whole.with_name(f"s{3 + steps:08d}-e000001")))

    no_manifest, torn, lost, empty, flipped = (copy(n) for n in range(1, 6))
    (no_manifest / keys.MANIFEST).unlink()
    data = (torn / keys.OPTIMIZER).read_bytes()
    (torn / keys.OPTIMIZER).write_bytes(data[: len(data) // 2])
    (lost / keys.OPTIMIZER).unlink()
    (empty / keys.MANIFEST).write_bytes(b"")
    bits = bytearray((flipped / keys.ADAPTER_WEIGHTS).read_bytes())
    bits[-1] ^= 1
    (flipped / keys.ADAPTER_WEIGHTS).write_bytes(bits)
    return [no_manifest, torn, lost, empty, flipped]


def contents(folders: list[Path]) -> dict[Path, bytes]:
    return {path: path.read_bytes() for folder in folders for path in folder.iterdir()}


async def test_the_newest_whole_checkpoint_is_resumed_from_and_the_torn_ones_are_named_and_left_alone(
    tmp_path: Path, tiny_base: Path
) -> None:
    bucket = FileBucket(tmp_path / "run")
    await three_steps(bucket, tiny_base)
    torn = broken(tmp_path / "run")
    before = contents(torn)
    highest = await highest_version(bucket)
    with structlog.testing.capture_logs() as logs:
        async with learning(bucket, tiny_base, **GOAL) as run:
            await train(run, 3, first=3)
            assert await run.end() is None
    (said,) = [line for line in logs if line["event"] == "checkpoints_passed_over"]
    assert set(said["broken"]) == {f"{keys.CHECKPOINTS}/{path.name}" for path in torn}
    assert [line["step"] for line in logs if line["event"] == "policy_loaded"] == [3]
    versions = sorted(
        parsed for key in await listed(bucket, keys.ADAPTERS) if (parsed := keys.parse_adapter(key)) and parsed[1] == 2
    )
    assert versions[0][0] == highest + 1
    ends = await run.ends()
    assert {group for group, end in ends.items() if end.end == "trained"} == {f"found/{n}" for n in range(6)}
    assert contents(torn) == before, "neither deleted nor mended"
    whole = [path for path in (tmp_path / "run" / keys.CHECKPOINTS).iterdir() if path not in torn]
    assert sorted(path.name for path in whole)[-1] == "s00000006-e000002"
    assert len(whole) == 2, "keep_checkpoints counts whole ones only"
    assert (await audit(bucket)).violations == []


async def highest_version(bucket: FileBucket) -> int:
    return max(parsed[0] for key in await listed(bucket, keys.ADAPTERS) if (parsed := keys.parse_adapter(key)))


async def listed(bucket: FileBucket, folder: str) -> list[str]:
    return [meta.key async for meta in bucket.list(folder)]


async def test_with_no_whole_checkpoint_left_it_does_not_begin_again_unless_it_is_told_to(
    tmp_path: Path, tiny_base: Path
) -> None:
    bucket = FileBucket(tmp_path / "run")
    await three_steps(bucket, tiny_base)
    for path in (tmp_path / "run" / keys.CHECKPOINTS).iterdir():
        (path / keys.OPTIMIZER).write_bytes(b"torn")
    claims, highest = await listed(bucket, keys.LEASES), await highest_version(bucket)
    async with learning(bucket, tiny_base, **GOAL) as run:
        error = await run.end()
    assert isinstance(error, ConfigError)
    assert "no whole checkpoint is left" in str(error)
    assert "run.restart" in str(error)
    assert await listed(bucket, keys.LEASES) == claims, "nothing is claimed"

    async with learning(bucket, tiny_base, **{**GOAL, "steps": 3, "run": {"max_lag": 100, "restart": True}}) as run:
        assert await run.end() is None, "it reads again what stands there"
    first = min(parsed for key in await listed(bucket, keys.ADAPTERS) if (parsed := keys.parse_adapter(key)) and parsed[1] == 2)
    assert first == (highest + 1, 2), "version numbers go on rising"
    assert {end.end for end in (await run.ends()).values()} == {"trained"}


async def test_a_checkpoint_of_another_run_is_passed_over(tmp_path: Path, tiny_base: Path) -> None:
    bucket = FileBucket(tmp_path / "run")
    await three_steps(bucket, tiny_base)
    whole = sorted((tmp_path / "run" / keys.CHECKPOINTS).iterdir())[-1]
    foreign = Path(shutil.copytree(whole, whole.with_name("s00000009-e000001")))
    manifest = json.loads((foreign / keys.MANIFEST).read_text())
    (foreign / keys.MANIFEST).write_text(json.dumps({**manifest, "step": 9, "run_id": secrets.token_hex(6)}))
    async with learning(bucket, tiny_base, **GOAL) as run:
        await train(run, 3, first=3)
        assert await run.end() is None
    final = await run.final()
    assert (final.step, final.reason) == (6, "steps")
    assert Checkpoint.decode((foreign / keys.MANIFEST).read_bytes(), "").step == 9
