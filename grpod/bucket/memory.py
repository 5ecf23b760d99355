"""A bucket in the process: the same URL is the same bucket, for as long as the process lives.

It is the model of all others: what `tests/bucket/contract.py` asks of a backend is what this one does in a few lines.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread

from grpod.bucket.base import Object, ObjectMeta, check_key, check_keys
from grpod.bucket.pulse import Pulse
from grpod.errors import AlreadyExists, BucketError, NotFound


class _Store:
    def __init__(self) -> None:
        self.lock = threading.Lock()  # event loops of several threads may share a bucket
        self.objects: dict[str, Object] = {}
        self.tags = itertools.count(1)
        self.pulse = Pulse()


_stores: dict[str, _Store] = {}


class MemoryBucket:
    atomic_create = True

    def __init__(self, url: str = "memory://") -> None:
        self.url = url
        self._store = _stores.setdefault(url, _Store())

    async def put(self, items: Mapping[str, bytes | Path], *, create: bool = False) -> None:
        check_keys(items)
        bodies, unread = await _bodies(items)
        await anyio.lowlevel.checkpoint()  # from here on nothing can be cancelled half-way
        store = self._store
        with store.lock:
            taken = [key for key in bodies if create and key in store.objects]
            for key, body in bodies.items():
                if key not in taken:
                    meta = ObjectMeta(key=key, size=len(body), tag=str(next(store.tags)), modified=time.time())
                    store.objects[key] = Object(meta=meta, data=body)
        if len(taken) < len(bodies):
            store.pulse.ring()
        if unread:
            raise BucketError(f"cannot put in {self.url}: {unread}; already there: {taken}", keys=[*unread, *taken])
        if taken:
            raise AlreadyExists(taken)

    async def get(self, key: str, *, if_changed_from: ObjectMeta | None = None) -> Object | None:
        check_key(key)
        await anyio.lowlevel.checkpoint()
        found = self._store.objects.get(key)
        if found is None:
            raise NotFound(key)
        return None if if_changed_from is not None and if_changed_from.tag == found.meta.tag else found

    async def fetch(self, items: Mapping[str | ObjectMeta, Path]) -> None:
        for item, path in items.items():
            key = item.key if isinstance(item, ObjectMeta) else item
            found = await self.get(key)
            assert found is not None
            if isinstance(item, ObjectMeta) and item.size != found.meta.size:
                raise BucketError(f"{self.url}: {key!r} has {found.meta.size} bytes, not {item.size}", keys=(key,))
            await anyio.to_thread.run_sync(_appear, path, found.data)

    async def stat(self, keys: Iterable[str]) -> dict[str, ObjectMeta]:
        keys = [check_key(key) for key in keys]
        await anyio.lowlevel.checkpoint()
        objects = self._store.objects
        return {key: found.meta for key in keys if (found := objects.get(key)) is not None}

    async def list(self, folder: str, *, after: str | None = None) -> AsyncIterator[ObjectMeta]:
        start = f"{check_key(folder)}/" if folder else ""
        await anyio.lowlevel.checkpoint()
        with self._store.lock:
            found = [o.meta for k, o in self._store.objects.items() if k.startswith(start) and (after is None or k > after)]
        for meta in sorted(found, key=lambda m: m.key):
            yield meta

    async def delete(self, keys: Iterable[str]) -> None:
        keys = [check_key(key) for key in keys]
        await anyio.lowlevel.checkpoint()
        with self._store.lock:
            gone = [self._store.objects.pop(key, None) for key in keys]
        if any(gone):
            self._store.pulse.ring()

    async def changed(self, timeout_s: float) -> None:
        await self._store.pulse.wait(timeout_s)

    async def close(self) -> None:
        """The objects stay: who opens the URL again finds them."""


async def _bodies(items: Mapping[str, bytes | Path]) -> tuple[dict[str, bytes], dict[str, str]]:
    """And why a local file could not be read, by key."""
    bodies, unread = {}, {}
    for key, data in items.items():
        try:
            bodies[key] = await anyio.Path(data).read_bytes() if isinstance(data, Path) else bytes(data)
        except OSError as error:
            unread[key] = str(error)
    return bodies, unread


def _appear(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(data)
    part.replace(path)
