"""What the learner knows of every policy version that a rollout may name: its position and its hash.

Its own versions are noted when their manifest is written; older ones are read from the bucket when a rollout first names them.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpod.bucket.base import Bucket
from grpod.errors import NotFound, WireError
from grpod.run.lineage import Lineage
from grpod.wire import keys
from grpod.wire.adapter import Adapter


@dataclass(frozen=True, kw_only=True)
class Version:
    version: int
    epoch: int
    pos: int
    sha256: str  # of adapter_model.safetensors


class Versions:
    def __init__(self, bucket: Bucket, lineage: Lineage) -> None:
        self._bucket = bucket
        self.lineage = lineage
        self._known: dict[tuple[int, int], Version | None] = {}
        self.newest: Version | None = None

    def note(self, manifest: Adapter) -> Version:
        """A version of this learner whose manifest is written: from now on the newest."""
        self.newest = self._known[manifest.version, manifest.epoch] = self._version(manifest)
        return self.newest

    async def find(self, version: int, epoch: int) -> Version | None:
        """None: never published."""
        if (version, epoch) not in self._known:
            key = keys.adapter(version, epoch, keys.MANIFEST)
            try:
                found = await self._bucket.get(key)
                assert found is not None
                self._known[version, epoch] = self._version(Adapter.decode(found.data, key))
            except (NotFound, WireError):
                if epoch >= self.lineage.highest_epoch and (self.newest is None or version > self.newest.version):
                    return None  # may yet appear
                self._known[version, epoch] = None
        return self._known[version, epoch]

    def lag(self, version: Version) -> int:
        assert self.newest is not None
        return self.newest.pos - version.pos

    def _version(self, manifest: Adapter) -> Version:
        return Version(
            version=manifest.version,
            epoch=manifest.epoch,
            pos=self.lineage.pos(manifest.version, manifest.epoch, manifest.pos),
            sha256=manifest.files[keys.ADAPTER_WEIGHTS].sha256,
        )
