"""A run as it lies in a bucket, made by hand: two generators, two epochs, a few groups."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from grpod.bucket.base import Bucket
from grpod.wire import keys
from grpod.wire.adapter import Adapter, Lora, Probe, file_ref
from grpod.wire.checkpoint import Checkpoint
from grpod.wire.rollout import Drop, Group, Rollout, Sampling, Shipment, encode_shipment
from grpod.wire.run import Final, Run
from grpod.wire.state import GeneratorState, LearnerState
from grpod.wire.tables import End, Metric, encode_ledger, encode_metrics
from tests.run.helpers import claim

RUN_ID = "0123456789ab"
ADAPTER_FILES = {keys.ADAPTER_WEIGHTS: b"weights", keys.ADAPTER_CONFIG: b"{}"}


def trained(*ids: str, step: int = 1) -> list[End]:
    return [End(group_id=group_id, end="trained", step=step) for group_id in ids]


def dropped(reason: str, *ids: str, step: int = 1) -> list[End]:
    return [End(group_id=group_id, end="dropped", step=step, reason=reason) for group_id in ids]


def group(group_id: str, *, size: int = 2, version: int = 0) -> Group:
    rollout = Rollout(
        completion_ids=(5, 2), generator_logprobs=(-1.0, -0.5), loss_mask=(1, 1), reward=1.0, finish_reason="stop", seed=1
    )
    return Group(
        run_id=RUN_ID,
        group_id=group_id,
        group_size=size,
        prompt_id="0",
        data_epoch=0,
        prompt_row=0,
        prompt_ids=(1, 2),
        policy_version=version,
        policy_epoch=1,
        adapter_sha256="a",
        sampling=Sampling(temperature=1.0),
        generator=group_id.rpartition("/")[0],
        created_at=0.0,
        rollouts=(rollout,) * size,
    )


def shipment(*ids: str, drops: Mapping[str, str] | None = None) -> bytes:
    given_up = tuple(Drop(group_id=group_id, reason=reason) for group_id, reason in (drops or {}).items())
    return encode_shipment(Shipment(base_fingerprint="f", groups=tuple(group(i) for i in ids), drops=given_up))


class MadeRun:
    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket

    async def put(self, key: str, data: bytes) -> None:
        await self.bucket.put({key: data})

    async def begin(self) -> MadeRun:
        await self.put(keys.RUN, Run(run_id=RUN_ID, config={}, base_fingerprint="f", created_at=0.0).encode())
        return self

    async def claim(self, epoch: int, *more: Any, **fields: Any) -> None:
        await self.put(keys.claim(epoch), claim(epoch, *more, run_id=RUN_ID, **fields).encode())

    async def adapter(self, version: int, epoch: int = 1, /, **change: Any) -> None:
        folder = keys.adapter_folder(version, epoch)
        await self.bucket.put({f"{folder}/{name}": data for name, data in ADAPTER_FILES.items()})
        fields = {
            "run_id": RUN_ID,
            "version": version,
            "epoch": epoch,
            "pos": version,
            "step": version,
            "base_fingerprint": "f",
            "lora": Lora(r=1, alpha=1, targets=[]),
            "files": {name: file_ref(data) for name, data in ADAPTER_FILES.items()},
            "probe": Probe(token_ids=[1, 2], logprobs=[-1.0], base_logprobs=[-1.0]),
            "created_at": 0.0,
        }
        await self.put(f"{folder}/{keys.MANIFEST}", Adapter(**{**fields, **change}).encode())

    async def ledger(self, step: int, ends: Sequence[End], epoch: int = 1) -> str:
        await self.put(keys.ledger(epoch, step), encode_ledger(ends))
        return keys.ledger(epoch, step)

    async def checkpoint(self, step: int, ledger: Sequence[str] = (), *, epoch: int = 1, version: int = 0) -> str:
        folder = keys.checkpoint_folder(step, epoch)
        files = {**ADAPTER_FILES, keys.OPTIMIZER: b"moments", keys.TRAINER: b"{}"}
        await self.bucket.put({f"{folder}/{name}": data for name, data in files.items()})
        manifest = Checkpoint(
            run_id=RUN_ID,
            step=step,
            epoch=epoch,
            version=version,
            version_epoch=epoch,
            pos=version,
            base_fingerprint="f",
            files={name: file_ref(data) for name, data in files.items()},
            ledger=list(ledger),
            created_at=0.0,
        )
        await self.put(f"{folder}/{keys.MANIFEST}", manifest.encode())
        return folder

    async def final(self, step: int, ledger: Sequence[str], *, version: int = 0, epoch: int = 1) -> None:
        await self.bucket.put({f"{keys.FINAL}/{name}": data for name, data in ADAPTER_FILES.items()})
        final = Final(
            run_id=RUN_ID,
            epoch=epoch,
            step=step,
            version=version,
            base_fingerprint="f",
            files={name: file_ref(data) for name, data in ADAPTER_FILES.items()},
            ledger=list(ledger),
            reason="steps",
            created_at=0.0,
        )
        await self.put(keys.FINAL_MANIFEST, final.encode())

    async def generator(self, name: str, begun: int, **fields: Any) -> None:
        state = {
            "generator": name,
            "counter": 1,
            "begun": begun,
            "open": [],
            "next_seq": 1,
            "started_at": 0.0,
            "updated_at": time.time(),
            "period_s": 5.0,
        }
        await self.put(keys.generator_state(name), GeneratorState(**{**state, **fields}).encode())

    async def learner(self, epoch: int, step: int, version: int | None, **fields: Any) -> None:
        state = {"epoch": epoch, "counter": 1, "step": step, "version": version, "pos": version, "steps": 80}
        await self.put(keys.LEARNER_STATE, LearnerState(**{**state, "updated_at": time.time(), **fields}).encode())

    async def rollouts(self, generator: str, seq: int, *ids: str, drops: Mapping[str, str] | None = None) -> None:
        await self.put(keys.rollout(generator, seq), shipment(*ids, drops=drops))

    async def metrics(self, epoch: int, seq: int, name: str, values: Mapping[int, float]) -> None:
        rows = [Metric(time=0.0, step=step, name=name, value=value) for step, value in values.items()]
        await self.put(keys.metrics(f"learner-e{epoch}", seq), encode_metrics(rows))
