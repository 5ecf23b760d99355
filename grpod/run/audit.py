"""Is every group of the run accounted for, and every object what its manifest says? From the bucket alone.

    state/generators, rollouts/  ─▶ which groups there were
    final/manifest.json, else the newest whole checkpoint  ─▶ which ledger segments count  ─▶ how each group ended

Violations break a law of the run. What is merely damaged or unreadable (a torn checkpoint, an object in quarantine) is passed
over by every role, and told apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio.to_thread
from rich.markup import escape

from grpod.bucket.base import Bucket
from grpod.errors import BucketError, ConfigError, WireError
from grpod.run.claims import read_claims
from grpod.run.join import read_run
from grpod.run.lineage import Lineage
from grpod.run.reading import (
    ledger_that_counts,
    listing,
    read,
    read_checkpoints,
    read_each,
    read_generators,
    read_ledger,
    wrong_files,
)
from grpod.run.tally import Groups, Known, faults, tally
from grpod.run.text import counts, to_text
from grpod.wire import keys
from grpod.wire.adapter import Adapter, FileRef
from grpod.wire.rollout import decode_ids
from grpod.wire.run import Final


@dataclass(frozen=True, kw_only=True)
class Audit:
    url: str
    run_id: str
    ended: bool
    groups: Groups
    rollout_objects: int
    duplicates: int  # ids that stand in more than one object; each still ends once
    quarantined: int  # objects in quarantine/
    unreadable: Mapping[str, str] = field(default_factory=dict)  # rollout object -> why
    damaged: Mapping[str, str] = field(default_factory=dict)  # checkpoint folder -> why it is passed over
    violations: Sequence[str] = ()
    deep: bool = False

    def as_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "ok": not self.violations,
            "groups": self.groups.as_json(),
            "unreadable": dict(self.unreadable),
            "damaged": dict(self.damaged),
            "violations": list(self.violations),
        }

    def render(self) -> str:
        groups = self.groups
        lines = [
            f"run {self.run_id}, {'ended' if self.ended else 'not ended'}: {groups.generated} groups in all",
            f"  trained   {groups.trained}",
            f"  dropped   {counts(groups.dropped)}",
            f"  lost      {groups.lost}",
            f"  pending   {groups.pending}",
            f"{self.rollout_objects} rollout objects; {self.duplicates} groups stand in more than one; "
            f"{len(self.unreadable)} cannot be read, {self.quarantined} are in quarantine",
            *(f"[yellow]unreadable[/] {escape(f'{key}: {why}')}" for key, why in self.unreadable.items()),
            *(f"[yellow]passed over[/] {escape(f'{key}: {why}')}" for key, why in self.damaged.items()),
            *(f"[red]violation[/] {escape(violation)}" for violation in self.violations),
            f"[red]{len(self.violations)} violations[/]"
            if self.violations
            else "[green]every group ends once, every object is what its manifest says[/]"
            + ("" if self.deep else " (by size; --deep reads them)"),
        ]
        return to_text("\n".join(lines))


def render(found: Audit) -> str:
    return found.render()


async def audit(bucket: Bucket, *, deep: bool = False) -> Audit:
    """`deep`: verify every hash, which reads every adapter. Raises `ConfigError` when there is no run."""
    run = await read_run(bucket)
    if run is None:
        raise ConfigError(f"no run at {bucket.url}: there is no {keys.RUN}")
    violations: list[str] = []
    lineage = Lineage(await read_claims(bucket))
    final = await _final(bucket, violations)
    checkpoints = await read_checkpoints(bucket, lineage)
    ends, lacking = await read_ledger(bucket, ledger_that_counts(final, checkpoints.newest))
    violations += [f"ledger segment {key}: {why}" for key, why in lacking.items()]

    # states after the ledger, rollouts after the states: what one tells of, the next must show
    generators = await read_generators(bucket)
    known = Known(begun={name: state.begun for name, state in generators.items()})
    metas = [meta async for meta in bucket.list(keys.ROLLOUTS) if keys.parse_rollout(meta.key)]
    shipped, unreadable = await read_each(bucket, metas, decode_ids)
    seen: set[str] = set()
    duplicates: set[str] = set()
    own_drops: set[str] = set()
    for ids, drops in shipped.values():
        dropped = {drop.group_id for drop in drops}
        duplicates |= seen & (ids | dropped)
        seen |= ids | dropped
        own_drops |= dropped - ids
    known.add(seen)
    violations += faults(known, ends, given_up=own_drops)
    violations += await _versions(bucket, run.run_id, lineage, deep)
    if final is not None:
        violations += await _files(bucket, keys.FINAL, final.files, deep)
    return Audit(
        url=bucket.url,
        run_id=run.run_id,
        ended=final is not None,
        groups=tally(known, ends, ended=final is not None),
        rollout_objects=len(metas),
        duplicates=len(duplicates),
        quarantined=len({key.rpartition("/")[0] for key in await listing(bucket, keys.QUARANTINE)}),
        unreadable={key: str(error) for key, error in unreadable.items()},
        damaged=checkpoints.damaged,
        violations=violations,
        deep=deep,
    )


async def _final(bucket: Bucket, violations: list[str]) -> Final | None:
    try:
        return await read(bucket, Final, keys.FINAL_MANIFEST)
    except WireError as error:
        violations.append(str(error))
        return None


async def _versions(bucket: Bucket, run_id: str, lineage: Lineage, deep: bool) -> list[str]:
    listed = await listing(bucket, keys.ADAPTERS)
    metas = [meta for key, meta in listed.items() if keys.parse_adapter(key) and key.endswith(f"/{keys.MANIFEST}")]
    manifests, bad = await read_each(bucket, metas, Adapter.decode)
    violations = [str(error) for error in bad.values()]
    epochs: dict[int, list[int]] = {}
    for key, manifest in manifests.items():
        folder = key.removesuffix(f"/{keys.MANIFEST}")
        if (manifest.version, manifest.epoch) != keys.parse_adapter(key):
            violations.append(f"{key}: says it is version {manifest.version} of epoch {manifest.epoch}")
        if manifest.run_id != run_id:
            violations.append(f"{key}: is of run {manifest.run_id}")
        if lineage.canonical(manifest.version, manifest.epoch):
            epochs.setdefault(manifest.version, []).append(manifest.epoch)
        wrong = await wrong_files(bucket, folder, manifest.files, listed)
        violations += [f"{key}: {what}" for what in wrong]
        if deep and not wrong:
            violations += await _hashes(bucket, folder, manifest.files)
    violations += [f"version {v} counts in epochs {e}" for v, e in sorted(epochs.items()) if len(e) > 1]
    return violations


async def _files(bucket: Bucket, folder: str, files: Mapping[str, FileRef], deep: bool) -> list[str]:
    wrong = await wrong_files(bucket, folder, files, {})
    return wrong if wrong or not deep else await _hashes(bucket, folder, files)


async def _hashes(bucket: Bucket, folder: str, files: Mapping[str, FileRef]) -> list[str]:
    with TemporaryDirectory(prefix="grpod-") as scratch:
        paths = {name: Path(scratch) / str(n) for n, name in enumerate(files)}
        try:
            await bucket.fetch({f"{folder}/{name}": path for name, path in paths.items()})
        except BucketError as error:
            return [f"{folder}: {error}"]
        found = {name: await anyio.to_thread.run_sync(_sha256, path) for name, path in paths.items()}
    return [f"{folder}/{name} has another sha256 than its manifest says" for name in files if found[name] != files[name].sha256]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
