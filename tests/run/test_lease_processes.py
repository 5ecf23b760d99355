"""The lease between real processes on one folder: races, a holder that is stopped, one that is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from grpod.bucket.file import FileBucket
from grpod.run.claims import read_claims
from grpod.run.lease import hold
from grpod.run.process import is_gone
from grpod.run.waiting import read_beat
from grpod.wire import keys
from tests.run.holder import terms

pytestmark = pytest.mark.anyio
ROUNDS = 20


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen([sys.executable, "-m", "tests.run.holder", *arguments], stdout=subprocess.PIPE, text=True)
    with child:
        try:
            yield child
        finally:
            child.kill()


async def outcomes(child: subprocess.Popen[str]) -> list[str]:
    output, _ = await anyio.to_thread.run_sync(child.communicate)
    return [line for line in output.splitlines() if line.startswith(("held", "lost"))]


async def until_held(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    lines = iter(child.stdout.readline, "")
    assert await anyio.to_thread.run_sync(lambda: any(line == "held\n" for line in lines))


async def test_of_two_processes_exactly_one_holds_20_of_20(tmp_path: Path) -> None:
    with (
        process("race", str(tmp_path), "a", str(ROUNDS), "1") as a,
        process("race", str(tmp_path), "b", str(ROUNDS), "2") as b,
    ):
        first, second = await outcomes(a), await outcomes(b)
        assert (a.returncode, b.returncode) == (0, 0)
        pairs = list(zip(first, second, strict=True))
        assert len(pairs) == ROUNDS
        for one, other in pairs:
            winner, loser = (a, other) if one == "held" else (b, one)
            assert {one, other} == {"held", loser}
            assert f"held by pid {winner.pid}" in loser


async def written(bucket: FileBucket) -> list[str]:
    return [meta.key async for meta in bucket.list(keys.METRICS)]


async def test_a_stopped_holder_is_replaced_and_ends_with_3(tmp_path: Path) -> None:
    bucket = FileBucket(tmp_path)
    with process("write", str(tmp_path), "1.0") as holder:
        await until_held(holder)
        (claim,) = await read_claims(bucket)
        holder.send_signal(signal.SIGSTOP)
        assert is_gone(claim.holder) is False  # it may go on at any time: only its silence counts
        async with hold(bucket, **terms(1.0, "wait")) as lease:
            assert lease.epoch == 2
            before = await written(bucket)
            beat = await read_beat(bucket, claim)
            await anyio.sleep(1.0)  # it was silent for a ttl before this one took over: twice the ttl in all
            holder.send_signal(signal.SIGCONT)
            lost = await outcomes(holder)
            assert holder.returncode == 3
            assert "lost" in lost[-1]
            after = await written(bucket)
            last = await read_beat(bucket, claim)
            assert beat is not None
            assert last is not None
            # at most the one put, and the one beat, that had passed their check when it was stopped
            assert len(set(after) - set(before)) <= 1
            assert last.counter - beat.counter <= 1
            assert not last.released
            lease.check()


async def test_a_killed_holder_is_replaced_without_waiting_for_the_ttl(tmp_path: Path) -> None:
    bucket = FileBucket(tmp_path)
    with process("write", str(tmp_path), "3600") as holder:
        await until_held(holder)
        (claim,) = await read_claims(bucket)
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:

                async def kill() -> None:
                    await anyio.sleep(0.1)
                    holder.kill()  # not waited for: a zombie is gone, too

                tasks.start_soon(kill)
                async with hold(bucket, **terms(3600.0, "wait")) as lease:
                    assert lease.epoch == 2
                    assert is_gone(claim.holder)
