"""adapters/v…-e…/manifest.json: what makes a version of the policy visible. Written after its files, create-only.

`pos` is the version's position on the run's one line of publishes (`run/lineage.py`): lag is a distance of positions.
`probe` lets a replica be checked against the learner: log-probs of one fixed token sequence, with and without the adapter.
"""

from __future__ import annotations

import hashlib

from pydantic import BaseModel, ConfigDict

from grpod.wire.doc import Document


class FileRef(BaseModel):
    model_config = ConfigDict(frozen=True)

    size: int  # bytes
    sha256: str


class Lora(BaseModel):
    model_config = ConfigDict(frozen=True)

    r: int
    alpha: float
    targets: list[str]


class Probe(BaseModel):
    """log p(token_ids[i+1] | token_ids[..i]) at temperature 1, so one value less than token_ids (>= 128)."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    token_ids: list[int]
    logprobs: list[float]
    base_logprobs: list[float]


class Adapter(Document):
    run_id: str
    version: int
    epoch: int
    pos: int
    step: int
    base_fingerprint: str
    lora: Lora
    files: dict[str, FileRef]
    probe: Probe
    created_at: float


def file_ref(data: bytes) -> FileRef:
    return FileRef(size=len(data), sha256=hashlib.sha256(data).hexdigest())
