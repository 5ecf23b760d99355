"""A learner that does nothing but hold the lease and write: `python -m tests.run.holder MODE FOLDER …` as a real process.

write FOLDER TTL_S            prints "held", then writes metrics/h/<n>.parquet until it has lost its lease (exit 3)
race FOLDER NAME ROUNDS SEED  for each round: waits for the other, tries to hold FOLDER/<round>, prints "held" or "lost: …"
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import anyio

from grpod.bucket.file import FileBucket
from grpod.errors import LeaseLost
from grpod.run.lease import FencedBucket, hold
from grpod.wire import keys
from grpod.wire.lease import Claim
from tests.run.helpers import Stop


async def fresh(claims: tuple[Claim, ...]) -> tuple[None, int]:
    return None, 0


def terms(ttl_s: float, takeover: str) -> dict[str, Any]:
    return {"run_id": "r", "ttl_s": ttl_s, "takeover": takeover, "prepare": fresh, "changes": {}, "stop": Stop()}


async def write(folder: Path, ttl_s: float) -> None:
    bucket = FileBucket(folder)
    async with hold(bucket, **terms(ttl_s, "wait")) as lease:
        fenced = FencedBucket(bucket, lease)
        await lease.beat_now()
        print("held", flush=True)
        for n in range(1_000_000):
            await fenced.put({keys.metrics("h", n): b"x"}, create=True)
            await anyio.sleep(0.01)


async def race(folder: Path, name: str, rounds: int, seed: int) -> None:
    dice = random.Random(seed)
    for n in range(rounds):
        bucket = FileBucket(folder / f"round{n}")
        await meet(folder, f"begin{n}", name)
        await anyio.sleep(dice.random() * 0.05)
        try:
            async with hold(bucket, **terms(30.0, "exit")):
                print("held", flush=True)
                await meet(folder, f"end{n}", name)
        except LeaseLost as error:
            print(f"lost: {error}", flush=True)
            await meet(folder, f"end{n}", name)


async def meet(folder: Path, what: str, name: str) -> None:
    """Returns when both have come here."""
    (folder / f"{what}-{name}").touch()
    give_up = time.monotonic() + 30
    while len([path async for path in anyio.Path(folder).glob(f"{what}-*")]) < 2:
        if time.monotonic() > give_up:
            raise TimeoutError(what)
        await anyio.sleep(0.002)


if __name__ == "__main__":
    mode, folder = sys.argv[1], Path(sys.argv[2])
    try:
        if mode == "write":
            anyio.run(write, folder, float(sys.argv[3]))
        else:
            anyio.run(race, folder, sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    except LeaseLost as error:
        print(f"lost: {error}", flush=True)
        sys.exit(error.exit_code)
