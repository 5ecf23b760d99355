"""leases/learner/<epoch>/: who may train. The claim is written once; only its holder refreshes the beat."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from grpod.wire.doc import Document


class Holder(BaseModel):
    """Enough to know on the same machine that the process is gone, and in words who it was."""

    model_config = ConfigDict(frozen=True)

    host: str
    boot_id: str
    pid_ns: str
    pid: int
    start_ticks: int  # /proc/<pid>/stat field 22: a pid that was reused has another
    job_id: str | None = None

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}" + (f" (Job {self.job_id})" if self.job_id else "")


class ResumedFrom(BaseModel):
    model_config = ConfigDict(frozen=True)

    step: int
    version: int
    epoch: int  # the epoch under which `version` was published
    pos: int


class Claim(Document):
    run_id: str
    epoch: int
    nonce: str
    holder: Holder
    resumed_from: ResumedFrom | None  # None: the run's first weights
    first_version: int  # every version below it, of an older epoch, stays canonical
    changes: dict[str, Any] = {}  # learner-only config keys that differ from the epoch before
    created_at: float


class Beat(Document):
    nonce: str
    epoch: int
    counter: int  # rises at every beat; readers keep the greatest (epoch, counter)
    released: bool = False  # the holder ended in order and writes nothing more: it may be replaced at once
