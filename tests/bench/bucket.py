"""python -m tests.bench.bucket: operations a second of each backend, one caller; last line one JSON object."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio

from grpod.bucket.base import Bucket
from grpod.bucket.file import FileBucket
from grpod.bucket.memory import MemoryBucket

NUM = 200
SMALL, LARGE = b"x" * 2_000, b"x" * 4_000_000


async def rate(calls: int, call: Callable[[int], Awaitable[object]]) -> float:
    begun = time.perf_counter()
    for i in range(calls):
        await call(i)
    return calls / (time.perf_counter() - begun)


async def listed(bucket: Bucket, after: str | None = None) -> int:
    return len([meta async for meta in bucket.list("rollouts", after=after)])


async def measure(bucket: Bucket) -> dict[str, float]:
    names = [f"rollouts/g{i % 4}/{i // 4:010d}.parquet" for i in range(NUM)]
    found = {
        "create 2 kB": await rate(NUM, lambda i: bucket.put({names[i]: SMALL}, create=True)),
        "overwrite 2 kB": await rate(NUM, lambda i: bucket.put({"state/learner.json": SMALL})),
        "put 4 MB": await rate(10, lambda i: bucket.put({f"big/{i}": LARGE})),
        "get 2 kB": await rate(NUM, lambda i: bucket.get(names[i])),
        "get 4 MB": await rate(10, lambda i: bucket.get(f"big/{i}")),
    }
    meta = (await bucket.stat(["state/learner.json"]))["state/learner.json"]
    return found | {
        "get unchanged": await rate(NUM, lambda i: bucket.get("state/learner.json", if_changed_from=meta)),
        "stat of 50 keys": await rate(NUM, lambda i: bucket.stat(names[:50])),
        f"list of {NUM}": await rate(20, lambda i: listed(bucket)),
        "list after the last": await rate(20, lambda i: listed(bucket, names[-1])),
        "delete": await rate(NUM, lambda i: bucket.delete([names[i]])),
    }


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="grpod-bench-") as folder:
        buckets = {"memory": MemoryBucket("memory://bench"), "file": FileBucket(Path(folder))}
        found = {name: await measure(bucket) for name, bucket in buckets.items()}
    print(f"{'calls a second':<22}" + "".join(f"{name:>12}" for name in found))
    for operation in found["memory"]:
        print(f"{operation:<22}" + "".join(f"{rates[operation]:>12.0f}" for rates in found.values()))
    print(json.dumps({name: {k: round(v, 1) for k, v in rates.items()} for name, rates in found.items()}))


if __name__ == "__main__":
    anyio.run(main)
