"""checkpoints/s…-e…/: the learner's resumable state (adapter, optimizer, trainer.json), and the manifest that makes it whole.

The manifest also makes every ledger segment that it lists durable: what no chosen checkpoint lists never happened.
It may be resumed from only while its (version, epoch) is canonical; the newest is the greatest (epoch, step).
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from grpod.wire.adapter import CheckpointFiles, Segments
from grpod.wire.doc import Document


class Cursor(BaseModel):
    """How far one generator's objects are read: all seq < low, and those in `done`, to the end of every group in them."""

    model_config = ConfigDict(frozen=True)

    low: int = 0
    done: list[int] = []


class Trainer(Document):
    """trainer.json: everything of the learner that is no tensor."""

    step: int
    version: int  # the newest published when the snapshot was taken, or the one published with it
    pos: int
    cursors: dict[str, Cursor] = {}
    begun: dict[str, int] = {}  # per generator, the credit already granted (cumulative)
    ended: dict[str, int] = {}  # per generator, how many of its groups have ended
    scheduler: dict[str, Any] = {}
    rng: dict[str, Any] = {}


class Checkpoint(Document):
    run_id: str
    step: int
    epoch: int
    version: int
    version_epoch: int  # the epoch under which `version` was published
    pos: int
    base_fingerprint: str
    files: CheckpointFiles
    ledger: Segments  # keys of every segment that counts, from the run's first step on
    created_at: float
