"""A bucket in a folder: a disk, NFS, or (with a warning) a mounted bucket. `disk.py` does the work, in threads.

Other programs may put files there, too: what is no valid key is not listed, and what cannot be read is the reader's to judge.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, TypeVarTuple, Unpack

import anyio.to_thread

from grpod.bucket import disk
from grpod.bucket.base import Object, ObjectMeta, check_key, check_keys
from grpod.bucket.leftovers import remove_leftovers
from grpod.bucket.mounts import BUCKET_MOUNT, on_bucket_mount
from grpod.bucket.watch import watch
from grpod.errors import AlreadyExists, BucketError, ConfigError, NotFound
from grpod.telemetry.log import get_logger

log = get_logger()
T = TypeVar("T")
A = TypeVarTuple("A")
_warned: set[str] = set()  # one warning for each mounted folder and process


class FileBucket:
    def __init__(self, path: Path | str, *, create: bool = True) -> None:
        folder = Path(os.path.abspath(path))
        self.url = f"file://{folder}"
        if create:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError) as error:
                raise ConfigError(f"{self.url}: a file stands there; a bucket is a folder") from error
            except OSError as error:
                above = next(parent for parent in folder.parents if parent.is_dir())
                raise BucketError(f"cannot make the folder {self.url}: {disk.explain(error, str(above))}") from error
        elif not folder.is_dir():
            raise ConfigError(f"{self.url}: no such folder")
        self._root = os.path.realpath(folder)  # a link is followed here, and none below
        self._watch = watch(self._root)
        self._clean = False
        self.atomic_create = not on_bucket_mount(folder)
        if not self.atomic_create and self._root not in _warned:
            _warned.add(self._root)
            log.warning("bucket_on_mount", url=self.url, mount=BUCKET_MOUNT, advice="writes are late and not atomic: use hf://")

    async def put(self, items: Mapping[str, bytes | Path], *, create: bool = False) -> None:
        check_keys(items)
        taken: list[str] = []
        failed: dict[str, str] = {}
        try:
            await anyio.to_thread.run_sync(self._put, items, create, taken, failed)
        finally:  # the thread has ended, also when this task was cancelled
            if len(taken) + len(failed) < len(items):
                self._watch.pulse.ring()
        if taken and not failed:
            raise AlreadyExists(taken)
        self._raise("write", failed, taken)

    def _put(self, items: Mapping[str, bytes | Path], create: bool, taken: list[str], failed: dict[str, str]) -> None:
        if not self._clean:
            self._clean = True
            if self.atomic_create:  # to walk a mounted bucket costs calls, and its files are not on this machine
                remove_leftovers(self._root)
        for key, data in items.items():
            try:
                for folder in disk.write(self._root, key, data, create=create, atomic=self.atomic_create):
                    self._watch.put_into(folder)
            except FileExistsError:
                taken.append(key)
            except OSError as error:
                failed[key] = disk.explain(error, self._root)

    async def get(self, key: str, *, if_changed_from: ObjectMeta | None = None) -> Object | None:
        tag = if_changed_from.tag if if_changed_from is not None else None
        return await self._in_thread("read", check_key(key), disk.read, self._root, key, tag)

    async def fetch(self, items: Mapping[str | ObjectMeta, Path]) -> None:
        for item, path in items.items():
            key, size = (item.key, item.size) if isinstance(item, ObjectMeta) else (item, None)
            await self._in_thread(f"copy to {path}", check_key(key), disk.copy, self._root, key, path, size, where=path.parent)

    async def stat(self, keys: Iterable[str]) -> dict[str, ObjectMeta]:
        keys = [check_key(key) for key in keys]
        found = await self._in_thread("look at", "", disk.stat, self._root, keys)
        return {meta.key: meta for meta in found}

    async def list(self, folder: str, *, after: str | None = None) -> AsyncIterator[ObjectMeta]:
        ahead: builtins.list[ObjectMeta | str] = [check_key(folder) if folder else ""]
        while ahead:
            match ahead.pop():
                case ObjectMeta() as meta:
                    yield meta
                case below:
                    ahead += reversed(await self._in_thread("list", below, disk.scan, self._root, below, after))

    async def delete(self, keys: Iterable[str]) -> None:
        keys = [check_key(key) for key in keys]
        gone: builtins.list[str] = []
        failed: dict[str, str] = {}
        try:
            await anyio.to_thread.run_sync(self._delete, keys, gone, failed)
        finally:
            if gone:
                self._watch.pulse.ring()
        self._raise("delete", failed)

    def _delete(self, keys: Iterable[str], gone: builtins.list[str], failed: dict[str, str]) -> None:
        for key in keys:
            try:
                if (folder := disk.remove(self._root, key)) is not None:
                    gone.append(key)
                    self._watch.put_into(folder)
            except OSError as error:
                failed[key] = disk.explain(error, self._root)

    async def changed(self, timeout_s: float) -> None:
        await self._watch.pulse.wait(timeout_s, self._look)

    async def _look(self) -> None:
        if await anyio.to_thread.run_sync(self._watch.look):
            self._watch.pulse.ring(own=False)

    async def close(self) -> None:
        """Nothing is kept open."""

    async def _in_thread(
        self, verb: str, key: str, function: Callable[[Unpack[A]], T], *args: *A, where: Path | None = None
    ) -> T:
        def guarded() -> T:
            try:
                return function(*args)
            except FileNotFoundError:
                raise NotFound(key) from None
            except OSError as error:
                raise self._error(verb, {key: disk.explain(error, str(where or self._root))}) from error

        return await anyio.to_thread.run_sync(guarded)

    def _raise(self, verb: str, failed: Mapping[str, str], taken: Sequence[str] = ()) -> None:
        if failed:
            raise self._error(verb, failed, taken)

    def _error(self, verb: str, failed: Mapping[str, str], taken: Sequence[str] = ()) -> BucketError:
        """One message: what, where, why, and how much is free; keys that failed for one reason stand together."""
        by_reason: dict[str, builtins.list[str]] = {}
        for key, reason in failed.items():
            by_reason.setdefault(reason, []).append(key)
        if taken:
            by_reason["already there, and written once only"] = builtins.list(taken)
        parts = [
            f"{', '.join(map(repr, keys[:3]))}{f' and {len(keys) - 3} more' * (len(keys) > 3)}: {reason}"
            for reason, keys in by_reason.items()
        ]
        return BucketError(f"cannot {verb} in {self.url}: {'; '.join(parts)}", keys=[*failed, *taken])
