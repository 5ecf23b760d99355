"""checkpoints/: which one to resume from, and which may go.

A checkpoint is whole when its manifest reads, every file has its size and hash, and its version is canonical. The newest whole
one is the greatest (epoch, step). Broken ones are named once, and neither deleted nor counted as kept.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from grpod.bucket.base import Bucket
from grpod.errors import ConfigError, NotFound, WireError
from grpod.run.lineage import Lineage
from grpod.run.reading import read_each
from grpod.telemetry.log import get_logger
from grpod.wire import keys
from grpod.wire.adapter import Adapter
from grpod.wire.checkpoint import Checkpoint, Trainer
from grpod.wire.tables import End, decode_ledger


@dataclass(frozen=True, kw_only=True)
class Resume:
    """The newest whole checkpoint, on local disk."""

    manifest: Checkpoint
    trainer: Trainer
    files: dict[str, Path]
    ends: list[End]  # of every segment that counts
    older: tuple[str, ...]  # folders of whole-looking checkpoints before it, oldest first


async def newest_whole(bucket: Bucket, lineage: Lineage, run_id: str, folder: Path) -> Resume | None:
    """Downloads it to `folder`. None: there is none."""
    found: dict[tuple[int, int], bool] = {}  # (epoch, step) -> has a manifest
    async for meta in bucket.list(keys.CHECKPOINTS):
        if parsed := keys.parse_checkpoint(meta.key):
            step, epoch = parsed
            found[epoch, step] = found.get((epoch, step), False) or meta.key.endswith(f"/{keys.MANIFEST}")
    passed_over: dict[str, str] = {}
    order = sorted(found, reverse=True)
    resume = None
    for position, (epoch, step) in enumerate(order):
        name = keys.checkpoint_folder(step, epoch)
        if not found[epoch, step]:
            passed_over[name] = "no manifest"
            continue
        try:
            resume = await _open(bucket, lineage, run_id, step, epoch, folder)
        except (WireError, NotFound) as error:
            passed_over[name] = str(error)
            continue
        older = [keys.checkpoint_folder(s, e) for e, s in order[position + 1 :] if found[e, s]]
        resume = Resume(**{**vars(resume), "older": tuple(reversed(older))})
        break
    if passed_over:
        get_logger().warning("checkpoints_passed_over", **{"broken": passed_over})
    return resume


async def _open(bucket: Bucket, lineage: Lineage, run_id: str, step: int, epoch: int, folder: Path) -> Resume:
    key = keys.checkpoint(step, epoch, keys.MANIFEST)
    found = await bucket.get(key)
    assert found is not None
    manifest = Checkpoint.decode(found.data, key)
    if manifest.run_id != run_id:
        raise WireError("foreign_run", f"{key}: of run {manifest.run_id}, this is {run_id}")
    if not lineage.canonical(manifest.version, manifest.version_epoch):
        raise WireError("foreign_epoch", f"{key}: version {manifest.version} of epoch {manifest.version_epoch} does not count")
    files = {name: folder / name for name in manifest.files}
    await bucket.fetch({keys.checkpoint(step, epoch, name): path for name, path in files.items()})
    for name, ref in manifest.files.items():
        data = files[name].read_bytes()
        if len(data) != ref.size:
            raise WireError("torn", f"{name} has {len(data)} bytes, its manifest says {ref.size}")
        if hashlib.sha256(data).hexdigest() != ref.sha256:
            raise WireError("hash", f"{name} has another sha256 than its manifest says")
    trainer = Trainer.decode(files[keys.TRAINER].read_bytes(), keys.checkpoint(step, epoch, keys.TRAINER))
    ends: list[End] = []
    for segment in manifest.ledger:
        found = await bucket.get(segment)
        assert found is not None
        ends.extend(decode_ledger(found.data, segment))
    return Resume(manifest=manifest, trainer=trainer, files=files, ends=ends, older=())


async def highest_version(bucket: Bucket) -> int:
    """The greatest version number seen in any epoch, whole or not; -1 when there is none."""
    highest = -1
    async for meta in bucket.list(keys.ADAPTERS):
        if parsed := keys.parse_adapter(meta.key):
            highest = max(highest, parsed[0])
    return highest


async def furthest_step(bucket: Bucket) -> int:
    """The last step of which anything is left, in a torn checkpoint's name or a version's manifest; 0: it has not begun."""
    furthest, manifests = 0, []
    async for meta in bucket.list(keys.CHECKPOINTS):
        if parsed := keys.parse_checkpoint(meta.key):
            furthest = max(furthest, parsed[0])
    async for meta in bucket.list(keys.ADAPTERS):
        if keys.parse_adapter(meta.key) and meta.key.endswith(f"/{keys.MANIFEST}"):
            manifests.append(meta)
    good, _ = await read_each(bucket, manifests, Adapter.decode)
    return max([furthest, *(manifest.step for manifest in good.values())])


def refuse_restart(highest: int, step: int) -> ConfigError:
    return ConfigError(
        f"this run has reached step {step} and version {highest}, but no whole checkpoint is left to resume from: "
        "mend checkpoints/, or set run.restart=true to begin again at step 0 (version numbers go on rising)"
    )


async def delete_checkpoints(bucket: Bucket, folders: list[str]) -> None:
    """Each one's manifest first: nobody begins from one that is half gone."""
    for folder in folders:
        names = [meta.key async for meta in bucket.list(folder)]
        manifest = f"{folder}/{keys.MANIFEST}"
        await bucket.delete([manifest])
        await bucket.delete([name for name in names if name != manifest])
