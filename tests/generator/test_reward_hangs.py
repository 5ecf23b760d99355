"""Hangs that nothing within Python can end, and processes that must not outlive the pool or grpod."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from grpod.generator.reward import RewardFailure, RewardPool
from tests.generator.scoring import pool, prompt, score


async def gone(pids: Sequence[int]) -> bool:
    """Waits until none of them runs (a zombie that nobody has collected yet does not run)."""
    with anyio.move_on_after(20) as scope:
        await anyio.to_thread.run_sync(_wait_until_gone, pids, abandon_on_cancel=True)
    return not scope.cancelled_caught


def _wait_until_gone(pids: Sequence[int]) -> None:
    while any(_runs(pid) for pid in pids):
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.anyio
async def test_hangs_of_every_kind_are_ended_by_name_and_the_others_are_scored() -> None:
    done: dict[str, str] = {}

    async def one(rewards: RewardPool, text: str) -> None:
        try:
            done[text] = str((await score(rewards, prompt(text))).totals)
        except RewardFailure as fault:
            done[text] = fault.reason

    texts = [f"good {i}" if i % 2 else f"HANG {i // 2}" for i in range(8)]
    async with pool({"function": "hangs", "timeout_s": 1.5}, workers=2) as rewards:
        async with anyio.create_task_group() as group:
            for text in texts:
                group.start_soon(one, rewards, text)
        workers = [worker._process.pid for worker in rewards._workers if worker._process]
    assert done == {text: "(0.0, 1.0, 0.0, 1.0)" if text.startswith("good") else "reward_timeout" for text in texts}
    assert await gone(workers)


@pytest.mark.anyio
async def test_what_a_hang_has_started_ends_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    async with pool({"function": "hangs_with_children", "timeout_s": 600.0}, columns=("pid_file",)) as rewards:
        async with anyio.create_task_group() as group:
            group.start_soon(score, rewards, prompt(pid_file=str(file)))
            pids = await anyio.to_thread.run_sync(_pids, file)
            assert len(pids) == 3
            group.cancel_scope.cancel()
        assert await gone(pids)


def _pids(file: Path) -> list[int]:
    """Waits for the three of `hangs_with_children`."""
    while not file.exists() or len(file.read_text().split()) < 3:
        time.sleep(0.02)
    return [int(word) for word in file.read_text().split()]


@pytest.mark.anyio
async def test_a_cancelled_group_ends_its_worker_and_the_next_is_scored() -> None:
    async with pool({"function": "hangs", "timeout_s": 60.0}) as rewards:
        with anyio.move_on_after(0.3) as scope:
            await score(rewards, prompt("HANG 1"))
        assert scope.cancelled_caught
        assert (await score(rewards)).totals == (0.0, 1.0, 0.0, 1.0)


@pytest.mark.anyio
async def test_a_service_stop_that_signals_every_process_lets_a_group_be_scored() -> None:
    async with pool("other") as rewards:
        process = rewards._workers[0]._process
        assert process is not None
        for pid in (process.pid, *children_of(process.pid)):
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        assert (await score(rewards)).totals == (0.0, 0.5, 0.0, 1.0)
        assert rewards._workers[0]._process is process


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


ORPHAN = """
import sys
import anyio
from tests.generator.scoring import pool, prompt, score

async def main():
    async with pool({"function": "hangs_with_children", "timeout_s": 600.0}, columns=("pid_file",)) as rewards:
        await score(rewards, prompt(pid_file=sys.argv[1]))

anyio.run(main)
"""


def test_nothing_is_left_when_grpod_is_killed(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pids = tmp_path / "pids"
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN, str(pids)], cwd=request.config.rootpath)
    try:
        scorer, *children = _pids(pids)
        (keeper,) = children_of(parent.pid)
        assert scorer in children_of(keeper)
    finally:
        parent.kill()
        parent.wait()
    _wait_until_gone([keeper, scorer, *children])  # or the test's time-out
