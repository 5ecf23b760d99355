"""The real learner on a tiny model, alone with its bucket: somebody else's rollout objects are put there, and it is watched.

async with learning(bucket, base, steps=1) as run:
    await run.put("found", 0, [group_of("found/0", …)])
    error = await run.end()
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import safetensors.numpy
from numpy.typing import NDArray

from grpod.bucket.base import Bucket
from grpod.config import Config
from grpod.context import Context, Stopping
from grpod.errors import GrpodError
from grpod.learner import loop as learner
from grpod.run.join import read_run
from grpod.wire import keys
from grpod.wire.adapter import Adapter
from grpod.wire.rollout import Group, Rollout, Sampling, Shipment, encode_shipment
from grpod.wire.run import Final
from grpod.wire.tables import End, Metric, decode_ledger, decode_metrics

PROMPT = (5, 6, 7)
A, B, C, D = (9, 10, 2), (11, 12, 2), (13, 2), (14, 15, 16, 2)


def rollout(ids: Sequence[int], reward: float, **more: Any) -> Rollout:
    fields: dict[str, Any] = {
        "completion_ids": tuple(ids),
        "generator_logprobs": (-1.0,) * len(ids),
        "loss_mask": (1,) * len(ids),
        "reward": reward,
        "rewards": {"r": reward},
        "finish_reason": "stop",
        "seed": 0,
    }
    return Rollout(**{**fields, **more})


ROLLOUTS = (rollout(A, 1.0), rollout(B, 0.0), rollout(C, 1.0), rollout(D, 0.0))


@dataclass(kw_only=True)
class Learning:
    """Owned by the test that opened it."""

    bucket: Bucket
    stop: Stopping
    error: GrpodError | None = None
    ended: anyio.Event = field(default_factory=anyio.Event)

    async def manifest(self, version: int = 0, epoch: int = 1) -> Adapter:
        """Waits for it."""
        key = keys.adapter(version, epoch, keys.MANIFEST)
        while key not in await self.bucket.stat([key]):
            if self.ended.is_set():
                raise AssertionError(f"the learner ended before version {version}") from self.error
            await self.bucket.changed(0.2)
        return Adapter.decode(await self.read(key), key)

    async def reached(self, step: int) -> Adapter:
        """Waits until that step is published: versions are fewer where a put is slower than a step."""
        while True:
            for key in await self.listed(keys.ADAPTERS):
                if key.endswith(f"/{keys.MANIFEST}"):
                    manifest = Adapter.decode(await self.read(key), key)
                    if manifest.step >= step:
                        return manifest
            if self.ended.is_set():
                raise AssertionError(f"the learner ended before step {step}") from self.error
            await self.bucket.changed(0.2)

    async def group(
        self, group_id: str, rollouts: Sequence[Rollout] = ROLLOUTS, *, version: int = 0, epoch: int = 1, **more: Any
    ) -> Group:
        """Made under a version that stands in the bucket."""
        manifest = await self.manifest(version, epoch)
        fields: dict[str, Any] = {
            "run_id": manifest.run_id,
            "group_id": group_id,
            "group_size": len(rollouts),
            "prompt_id": "p",
            "data_epoch": 0,
            "prompt_row": 0,
            "prompt_ids": PROMPT,
            "policy_version": version,
            "policy_epoch": epoch,
            "adapter_sha256": manifest.files[keys.ADAPTER_WEIGHTS].sha256,
            "sampling": Sampling(temperature=1.0),
            "generator": group_id.partition("/")[0],
            "created_at": 0.0,
            "rollouts": tuple(rollouts),
        }
        return Group(**{**fields, **more})

    async def ship(self, name: str, seq: int, groups: Sequence[Group]) -> bytes:
        run = await read_run(self.bucket)
        assert run is not None
        data = encode_shipment(Shipment(base_fingerprint=run.base_fingerprint, groups=tuple(groups)))
        await self.bucket.put({keys.rollout(name, seq): data})
        return data

    async def end(self) -> GrpodError | None:
        """What it ended with."""
        await self.ended.wait()
        return self.error

    async def read(self, key: str) -> bytes:
        found = await self.bucket.get(key)
        assert found is not None
        return found.data

    async def listed(self, folder: str) -> list[str]:
        return [meta.key async for meta in self.bucket.list(folder)]

    async def weights(self, version: int, epoch: int = 1) -> dict[str, NDArray[Any]]:
        return safetensors.numpy.load(await self.read(keys.adapter(version, epoch, keys.ADAPTER_WEIGHTS)))

    async def final(self) -> Final:
        return Final.decode(await self.read(keys.FINAL_MANIFEST), keys.FINAL_MANIFEST)

    async def ends(self, segments: Sequence[str] | None = None) -> dict[str, End]:
        """By group; of the segments that final/ lists, unless others are given."""
        listed = (await self.final()).ledger if segments is None else segments
        ends = [end for key in listed for end in decode_ledger(await self.read(key), key)]
        assert len({end.group_id for end in ends}) == len(ends), "a group ends once"
        return {end.group_id: end for end in ends}

    async def metrics(self) -> list[Metric]:
        rows: list[Metric] = []
        for key in await self.listed(keys.METRICS):
            rows += decode_metrics(await self.read(key), key)
        return rows

    async def quarantine(self) -> dict[str, str]:
        """Object -> reason."""
        notes = [key for key in await self.listed(keys.QUARANTINE) if key.endswith(".json")]
        found = [json.loads(await self.read(key)) for key in notes]
        return {note["key"]: note["reason"] for note in found}


@asynccontextmanager
async def learning(
    bucket: Bucket,
    base: Path,
    *,
    timeout_s: float = 60.0,
    run: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
    **section: Any,
) -> AsyncIterator[Learning]:
    """`section`: keys of `learner`. On leaving it is asked to stop, and waited for."""
    config = Config.model_validate(
        {
            "run": {"bucket": bucket.url, "max_lag": 2, "grace_s": 5.0, **(run or {})},
            "model": {"base": str(base), "dtype": "float32", "max_model_len": 256},
            "lora": {"rank": 2, "alpha": 4, **(lora or {})},
            "generator": {"sampling": {"max_new_tokens": 8}},
            "learner": {"steps": 1, "groups_per_step": 1, "learning_rate": 1e-2, "device": "cpu", **section},
        }
    )
    ctx = Context(config=config, folder=base, bucket=bucket, stop=Stopping(), roles=("learner",))
    one = Learning(bucket=bucket, stop=ctx.stop)

    async def train() -> None:
        try:
            await learner.run(ctx)
        except* GrpodError as errors:
            one.error = first(errors)
        finally:
            one.ended.set()

    with anyio.fail_after(timeout_s):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(train)
            yield one
            one.stop.request("the test is over")


def first(errors: BaseExceptionGroup[GrpodError]) -> GrpodError:
    found = errors.exceptions[0]
    return first(found) if isinstance(found, BaseExceptionGroup) else found
