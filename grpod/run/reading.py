"""Reading a run from its bucket, for those who only look: status, audit, the report.

What vanishes while it is read (old checkpoints, collected rollouts) is left out; what cannot be decoded is told apart.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import anyio.to_thread

from grpod.bucket.base import Bucket, ObjectMeta
from grpod.errors import NotFound, WireError
from grpod.run.lineage import Lineage
from grpod.wire import keys
from grpod.wire.adapter import FileRef
from grpod.wire.checkpoint import Checkpoint
from grpod.wire.doc import Document
from grpod.wire.run import Final
from grpod.wire.state import GeneratorState
from grpod.wire.tables import End, decode_ledger

_CHUNK, _CHUNK_BYTES = 500, 64 << 20  # objects, and bytes on local disk at one time
D = TypeVar("D", bound=Document)
T = TypeVar("T")


async def read(bucket: Bucket, kind: type[D], key: str) -> D | None:
    """None: it is not there. Raises `WireError`."""
    try:
        found = await bucket.get(key)
    except NotFound:
        return None
    assert found is not None
    return kind.decode(found.data, key)


async def read_each(
    bucket: Bucket, metas: Sequence[ObjectMeta], decode: Callable[[bytes, str], T]
) -> tuple[dict[str, T], dict[str, WireError]]:
    """`decode(bytes, key)` of many objects, in a worker thread: what came out, and what could not be decoded."""
    good: dict[str, T] = {}
    bad: dict[str, WireError] = {}

    def take(paths: Mapping[ObjectMeta, Path]) -> None:
        for meta, path in paths.items():
            if not path.exists():
                continue
            try:
                good[meta.key] = decode(path.read_bytes(), meta.key)
            except WireError as error:
                bad[meta.key] = error

    left = list(metas)
    while left:
        chunk: list[ObjectMeta] = []
        while left and len(chunk) < _CHUNK and sum(meta.size for meta in chunk) < _CHUNK_BYTES:
            chunk.append(left.pop(0))
        with tempfile.TemporaryDirectory(prefix="grpod-") as folder:
            paths = {meta: Path(folder) / str(n) for n, meta in enumerate(chunk)}
            await _fetch(bucket, paths)
            await anyio.to_thread.run_sync(take, paths)
    return good, bad


async def _fetch(bucket: Bucket, paths: Mapping[ObjectMeta, Path]) -> None:
    everything: dict[str | ObjectMeta, Path] = {meta: path for meta, path in paths.items()}  # noqa: C416 - keys of a Mapping are invariant
    try:
        await bucket.fetch(everything)
    except NotFound:  # one of them vanished: which, is only known one by one
        for meta, path in paths.items():
            try:
                await bucket.fetch({meta: path})
            except NotFound:
                continue


async def listing(bucket: Bucket, folder: str) -> dict[str, ObjectMeta]:
    return {meta.key: meta async for meta in bucket.list(folder)}


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    newest: Checkpoint | None  # whole, by the sizes of its files
    damaged: Mapping[str, str] = field(default_factory=dict)  # folder -> what is wrong; passed over by a resume


async def read_checkpoints(bucket: Bucket, lineage: Lineage) -> Checkpoints:
    found = await listing(bucket, keys.CHECKPOINTS)
    order = sorted({parsed[::-1] for key in found if (parsed := keys.parse_checkpoint(key))}, reverse=True)
    newest: Checkpoint | None = None
    damaged: dict[str, str] = {}
    for epoch, step in order:
        folder = keys.checkpoint_folder(step, epoch)
        try:
            manifest = await read(bucket, Checkpoint, f"{folder}/{keys.MANIFEST}")
        except WireError as error:
            damaged[folder] = str(error)
            continue
        if manifest is None:
            damaged[folder] = "no manifest"
        elif wrong := await wrong_files(bucket, folder, manifest.files, found):
            damaged[folder] = "; ".join(wrong)
        elif newest is None and lineage.canonical(manifest.version, manifest.version_epoch):
            newest = manifest
    return Checkpoints(newest=newest, damaged=damaged)


async def wrong_files(bucket: Bucket, folder: str, files: Mapping[str, FileRef], listed: Mapping[str, ObjectMeta]) -> list[str]:
    """By size. What the listing lacks is looked for again: it may have been made before that object was written."""
    refs = {f"{folder}/{name}": ref for name, ref in files.items()}
    metas = dict(listed)
    if lacking := [key for key in refs if key not in metas]:
        metas |= await bucket.stat(lacking)
    return [
        f"{key} is missing" if key not in metas else f"{key} has {metas[key].size} bytes, its manifest says {ref.size}"
        for key, ref in refs.items()
        if key not in metas or metas[key].size != ref.size
    ]


async def read_ledger(bucket: Bucket, segments: Sequence[str]) -> tuple[list[End], dict[str, str]]:
    """(every end, in order; segment -> why it cannot be read)"""
    metas = await bucket.stat(segments) if segments else {}
    good, bad = await read_each(bucket, [metas[key] for key in segments if key in metas], decode_ledger)
    wrong = {key: "is missing" for key in segments if key not in metas} | {key: str(error) for key, error in bad.items()}
    return [end for key in segments for end in good.get(key, ())], wrong


async def read_generators(bucket: Bucket) -> dict[str, GeneratorState]:
    found: dict[str, GeneratorState] = {}
    async for meta in bucket.list(keys.GENERATOR_STATES):
        name = keys.parse_generator_state(meta.key)
        try:
            # not by `read_each`: a state is overwritten meanwhile, and has another size then
            state = await read(bucket, GeneratorState, meta.key) if name else None
        except WireError:
            continue
        if name and state:
            found[name] = state
    return found


def ledger_that_counts(final: Final | None, newest: Checkpoint | None) -> Sequence[str]:
    return final.ledger if final else newest.ledger if newest else ()
