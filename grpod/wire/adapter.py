"""adapters/v…-e…/manifest.json: what makes a version of the policy visible. Written after its files, create-only.

`pos` is the version's position on the run's one line of publishes (`run/lineage.py`): lag is a distance of positions.
`probe` lets a replica be checked against the learner: log-probs of one fixed token sequence, with and without the adapter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from grpod.wire import keys
from grpod.wire.doc import Document


class FileRef(BaseModel):
    model_config = ConfigDict(frozen=True)

    size: int  # bytes
    sha256: str


def _holding(*needed: str) -> Callable[[dict[str, FileRef]], dict[str, FileRef]]:
    """Names are plain, as they become keys and paths of a scratch folder, and what its reader opens is among them."""

    def check(files: dict[str, FileRef]) -> dict[str, FileRef]:
        for name in files:
            if not keys.NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no plain file name")
        for name in needed:
            if name not in files:
                raise ValueError(f"{name} is missing")
        return files

    return check


Files = Annotated[dict[str, FileRef], AfterValidator(_holding())]
AdapterFiles = Annotated[dict[str, FileRef], AfterValidator(_holding(keys.ADAPTER_WEIGHTS))]
CheckpointFiles = Annotated[dict[str, FileRef], AfterValidator(_holding(keys.ADAPTER_WEIGHTS, keys.OPTIMIZER, keys.TRAINER))]


def _segment(key: str) -> str:
    if keys.parse_ledger(key) is None:
        raise ValueError(f"{key!r} is no key of a ledger segment")
    return key


Segments = list[Annotated[str, AfterValidator(_segment)]]


class Lora(BaseModel):
    model_config = ConfigDict(frozen=True)

    r: int
    alpha: float
    targets: list[str]


class Probe(BaseModel):
    """log p(token_ids[i+1] | token_ids[..i]) at temperature 1, so one value less than token_ids (>= 128)."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    token_ids: list[Annotated[int, Field(ge=0)]] = Field(min_length=2)
    logprobs: list[float]
    base_logprobs: list[float]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for name, values in (("logprobs", self.logprobs), ("base_logprobs", self.base_logprobs)):
            if len(values) != len(self.token_ids) - 1:
                raise ValueError(f"{len(values)} {name} for {len(self.token_ids)} tokens")
        return self


class Adapter(Document):
    run_id: str
    version: int
    epoch: int
    pos: int
    step: int
    base_fingerprint: str
    lora: Lora
    files: AdapterFiles
    probe: Probe
    created_at: float


def file_ref(data: bytes) -> FileRef:
    return FileRef(size=len(data), sha256=hashlib.sha256(data).hexdigest())
