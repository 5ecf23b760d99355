"""Buckets that are slow or fail, around a real one.

DelayedBucket(bucket, put_delay_s=2)                       every put takes two seconds longer
faulty = FaultyBucket(bucket)
faulty.spoil("put", r"adapters/.*/manifest\\.json", times=2)   its next two puts fail, the rest of the batch is written
faulty.spoil("put", r"state/.*", applied=True)             written, and reported as failed all the same
assert faulty.count("put", r"checkpoints/.*") == 3         keys that were asked for, failed or not
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio

from grpod.bucket.base import Bucket, Object, ObjectMeta
from grpod.errors import BucketError


class WrappedBucket:
    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.url = bucket.url
        self.atomic_create = bucket.atomic_create

    async def put(self, items: Mapping[str, bytes | Path], *, create: bool = False) -> None:
        await self.bucket.put(items, create=create)

    async def get(self, key: str, *, if_changed_from: ObjectMeta | None = None) -> Object | None:
        return await self.bucket.get(key, if_changed_from=if_changed_from)

    async def fetch(self, items: Mapping[str | ObjectMeta, Path]) -> None:
        await self.bucket.fetch(items)

    async def stat(self, keys: Iterable[str]) -> dict[str, ObjectMeta]:
        return await self.bucket.stat(keys)

    async def list(self, folder: str, *, after: str | None = None) -> AsyncIterator[ObjectMeta]:
        async for meta in self.bucket.list(folder, after=after):
            yield meta

    async def delete(self, keys: Iterable[str]) -> None:
        await self.bucket.delete(keys)

    async def changed(self, timeout_s: float) -> None:
        await self.bucket.changed(timeout_s)

    async def close(self) -> None:
        await self.bucket.close()


class DelayedBucket(WrappedBucket):
    def __init__(self, bucket: Bucket, *, put_delay_s: float) -> None:
        super().__init__(bucket)
        self.put_delay_s = put_delay_s

    async def put(self, items: Mapping[str, bytes | Path], *, create: bool = False) -> None:
        await anyio.sleep(self.put_delay_s)
        await self.bucket.put(items, create=create)


def _default_error(keys: Sequence[str]) -> BucketError:
    return BucketError(f"spoilt: {', '.join(keys)}", keys=keys)


@dataclass(kw_only=True)
class Spoiling:
    method: str
    key: str
    times: int | None  # None: for ever
    applied: bool
    error: Callable[[Sequence[str]], Exception]


class FaultyBucket(WrappedBucket):
    """`list` is not spoilt: spoil the `get` of what it shows."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        self.spoilings: list[Spoiling] = []
        self.calls: list[tuple[str, tuple[str, ...]]] = []

    def spoil(
        self,
        method: str,
        key: str = ".*",
        *,
        times: int | None = None,
        applied: bool = False,
        error: Callable[[Sequence[str]], Exception] = _default_error,
    ) -> Spoiling:
        """The next `times` calls of `method` with a key that matches fail for these keys. Remove it: `spoilings.remove`."""
        spoiling = Spoiling(method=method, key=key, times=times, applied=applied, error=error)
        self.spoilings.append(spoiling)
        return spoiling

    def count(self, method: str, key: str = ".*") -> int:
        return sum(bool(re.fullmatch(key, k)) for m, keys in self.calls if m == method for k in keys)

    def _hit(self, method: str, keys: Sequence[str]) -> tuple[Spoiling, list[str]] | None:
        self.calls.append((method, tuple(keys)))
        for spoiling in self.spoilings:
            hit = [key for key in keys if re.fullmatch(spoiling.key, key)]
            if spoiling.method == method and hit and spoiling.times != 0:
                if spoiling.times is not None:
                    spoiling.times -= 1
                return spoiling, hit
        return None

    async def put(self, items: Mapping[str, bytes | Path], *, create: bool = False) -> None:
        spoilt = self._hit("put", list(items))
        if spoilt is None:
            return await self.bucket.put(items, create=create)
        spoiling, hit = spoilt
        rest = {key: data for key, data in items.items() if spoiling.applied or key not in hit}
        if rest:
            await self.bucket.put(rest, create=create)
        raise spoiling.error(hit)

    async def get(self, key: str, *, if_changed_from: ObjectMeta | None = None) -> Object | None:
        if spoilt := self._hit("get", [key]):
            raise spoilt[0].error([key])
        return await self.bucket.get(key, if_changed_from=if_changed_from)

    async def fetch(self, items: Mapping[str | ObjectMeta, Path]) -> None:
        if spoilt := self._hit("fetch", [item.key if isinstance(item, ObjectMeta) else item for item in items]):
            raise spoilt[0].error(spoilt[1])
        await self.bucket.fetch(items)

    async def stat(self, keys: Iterable[str]) -> dict[str, ObjectMeta]:
        keys = list(keys)
        if spoilt := self._hit("stat", keys):
            raise spoilt[0].error(spoilt[1])
        return await self.bucket.stat(keys)

    async def delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        spoilt = self._hit("delete", keys)
        if spoilt is None:
            return await self.bucket.delete(keys)
        spoiling, hit = spoilt
        await self.bucket.delete([key for key in keys if spoiling.applied or key not in hit])
        raise spoiling.error(hit)
