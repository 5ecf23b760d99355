"""What a bucket is: a flat map from key to bytes that every role reaches, and the only thing that they share.

    put(create=True)  all-or-nothing per key, never per batch: a reader may see part of a batch, never part of an object
    list              key order, whole path segments: list("a") never shows "ab/…"
    get / stat        see what a returned put has written

Keys are '/'-separated, relative to the run's folder; `check_key` is the one rule of what a key may be.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from grpod.errors import BucketError

LOCAL = ("memory:", "file:")  # URLs of buckets that cost nothing to look at
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+@-]*")


@dataclass(frozen=True, kw_only=True)
class ObjectMeta:
    key: str
    size: int  # bytes
    tag: str  # changes when the content does; opaque
    modified: float | None = None  # seconds since 1970 on the store's clock, where it tells


@dataclass(frozen=True, kw_only=True)
class Object:
    meta: ObjectMeta
    data: bytes


class Bucket(Protocol):
    url: str
    atomic_create: bool  # does create-only hold against racing writers?

    async def put(self, items: Mapping[str, bytes | Path], *, create: bool = False) -> None:
        """Write a batch. Raises `AlreadyExists` (create) or `BucketError` with the keys that failed; the others are written."""

    async def get(self, key: str, *, if_changed_from: ObjectMeta | None = None) -> Object | None:
        """Raises `NotFound`. None: its content is still that of `if_changed_from`; no body was moved."""

    async def fetch(self, items: Mapping[str | ObjectMeta, Path]) -> None:
        """Many and large, each to a local file that appears whole; an ObjectMeta is verified by size."""

    async def stat(self, keys: Iterable[str]) -> dict[str, ObjectMeta]:
        """Many at once; missing ones are left out."""

    def list(self, folder: str, *, after: str | None = None) -> AsyncIterator[ObjectMeta]:
        """Every object below `folder` ('' is all), in key order, keys > `after` only."""

    async def delete(self, keys: Iterable[str]) -> None:
        """A missing key is no error."""

    async def changed(self, timeout_s: float) -> None:
        """Returns when something may have changed, at the latest after `timeout_s`."""

    async def close(self) -> None: ...


def check_key(key: str) -> str:
    """Returns the key; raises `BucketError` naming the segment that no backend would keep as it is."""
    for segment in key.split("/"):
        if not _SEGMENT.fullmatch(segment) or len(segment) > 200:
            raise BucketError(
                f"unsafe key {key!r}: segment {segment!r} must match {_SEGMENT.pattern} and have at most 200 characters",
                keys=(key,),
            )
    return key


def is_key(text: str) -> bool:
    """Could an object have this key? For names that others have put there."""
    return all(_SEGMENT.fullmatch(segment) and len(segment) <= 200 for segment in text.split("/"))


def check_keys(keys: Iterable[str]) -> None:
    """The keys of a batch: one that is unsafe refuses all of them, before anything is written."""
    batch = list(keys)
    try:
        for key in batch:
            check_key(key)
    except BucketError as error:
        raise BucketError(str(error), keys=batch) from None
