"""Which policy versions count, and where each stands on the run's one line of publishes. Pure.

    epoch 1   v0 v1 v2 v3 | v4 v5              the checkpoint that epoch 2 resumed from holds v3
    epoch 2               v6 v7 v8             first_version 6: v6 is v3's weights under a new number
    pos       0  1  2  3    3  3  (v4, v5)     orphans take the pos of what was resumed
                          3  4  5

(version, epoch) is *canonical* iff version < `first_version` of every later epoch: what a zombie publishes after another
claimed is not. The newest is the greatest (epoch, version). Lag is a distance of positions, never of version numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from grpod.wire.lease import Claim

_FIRST_WEIGHTS = (0, -1, 0)  # (epoch, version, pos) before everything: of a claim that begins the run again


@dataclass(frozen=True)
class Lineage:
    claims: tuple[Claim, ...]  # one an epoch

    @property
    def highest_epoch(self) -> int:
        """0: nobody has claimed the run yet."""
        return max((claim.epoch for claim in self.claims), default=0)

    @property
    def holder(self) -> Claim | None:
        """The claim of the highest epoch."""
        return max(self.claims, key=lambda claim: claim.epoch, default=None)

    def canonical(self, version: int, epoch: int) -> bool:
        if not any(claim.epoch == epoch for claim in self.claims):
            return False
        return all(version < claim.first_version for claim in self.claims if claim.epoch > epoch)

    def newest(self, published: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
        """(version, epoch) of the newest canonical one, out of such pairs."""
        canonical = [(epoch, version) for version, epoch in published if self.canonical(version, epoch)]
        if not canonical:
            return None
        epoch, version = max(canonical)
        return version, epoch

    def pos(self, version: int, epoch: int, manifest_pos: int) -> int:
        """`manifest_pos`, unless a resume has orphaned this version."""
        pos = manifest_pos
        for claim in self.claims:
            origin = claim.resumed_from
            origin_epoch, origin_version, origin_pos = (origin.epoch, origin.version, origin.pos) if origin else _FIRST_WEIGHTS
            if epoch < claim.epoch and (epoch, version) > (origin_epoch, origin_version):
                pos = min(pos, origin_pos)
        return pos

    def undone(self, step: int, epoch: int) -> bool:
        """Was this step taken back by a resume from an earlier one?"""
        return any(
            epoch < claim.epoch and step > (claim.resumed_from.step if claim.resumed_from else 0) for claim in self.claims
        )
