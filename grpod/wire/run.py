"""run.json, final/manifest.json and control/stop-<nonce>.json: how a run begins and ends."""

from __future__ import annotations

from typing import Any

from grpod.wire.adapter import Files, Segments
from grpod.wire.doc import Document


class Run(Document):
    """Create-only, by whoever comes first. Secrets never stand in it."""

    run_id: str
    config: dict[str, Any]  # the agreed keys, nested as in the YAML
    base_fingerprint: str  # of config, tokenizer and weight index: not a path
    inputs: dict[str, str] = {}  # name -> sha256 of what lies under inputs/
    created_at: float


class Final(Document):
    """Written last: the run is over. Group ids without a row in `ledger` count as `run_ended`."""

    run_id: str
    epoch: int
    step: int
    version: int
    base_fingerprint: str
    files: Files
    ledger: Segments  # keys of the segments that count
    reason: str  # "steps" | "reward"
    created_at: float


class Stop(Document):
    """A request to stop; one that stood there at a role's own start is ignored."""

    reason: str = ""
    created_at: float
