"""Generator and learner as they run, on one event loop and one bucket: the replica lies, the trainer learns nothing.

    outcome = await loop(tmp_path, tiny_base, replica, prompts=[…], reward="…", learner={"steps": 4})

What came of it is read from the bucket alone, as anybody may read it.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from grpod.bucket.base import Bucket
from grpod.bucket.memory import MemoryBucket
from grpod.config import Config
from grpod.context import Context, Stopping
from grpod.errors import GrpodError
from grpod.generator import loop as generator
from grpod.learner import loop as learner
from grpod.wire import keys
from grpod.wire.rollout import Group, Shipment, decode_shipment
from grpod.wire.run import Final
from grpod.wire.state import GeneratorState
from grpod.wire.tables import End, Metric, decode_ledger, decode_metrics
from tests.bench.loop import FakePolicy, score
from tests.fakes import FakeReplica

ALTERNATE = "def reward(completions, **_):\n    return [float(i % 2) for i in range(len(completions))]\n"
GROUP_SIZE = 4


def liar(**fields: Any) -> FakeReplica:
    """A fake replica whose scores fit `FakePolicy`: attestation finds nothing wrong."""
    return FakeReplica(max_loras=16, score=score, **fields)


@dataclass(kw_only=True)
class Outcome:
    bucket: Bucket
    error: GrpodError | None  # that the run ended with

    async def shipments(self) -> list[Shipment]:
        return [decode_shipment(await self._read(key), key) for key in await self._keys(keys.ROLLOUTS)]

    async def groups(self) -> list[Group]:
        return [group for shipment in await self.shipments() for group in shipment.groups]

    async def drops(self) -> Counter[str]:
        """By the generator, as they stand in its objects."""
        return Counter(drop.reason for shipment in await self.shipments() for drop in shipment.drops)

    async def states(self) -> list[GeneratorState]:
        return [GeneratorState.decode(await self._read(key), key) for key in await self._keys(keys.GENERATOR_STATES)]

    async def ends(self) -> list[End]:
        """Of a run that has ended."""
        final = Final.decode(await self._read(keys.FINAL_MANIFEST), keys.FINAL_MANIFEST)
        return [end for key in final.ledger for end in decode_ledger(await self._read(key), key)]

    async def metrics(self) -> dict[str, float]:
        """The last value of each."""
        rows: list[Metric] = []
        for key in await self._keys(keys.METRICS):
            rows += decode_metrics(await self._read(key), key)
        return {row.name: row.value for row in sorted(rows, key=lambda row: row.time)}

    async def _keys(self, folder: str) -> list[str]:
        return [meta.key async for meta in self.bucket.list(folder)]

    async def _read(self, key: str) -> bytes:
        found = await self.bucket.get(key)
        assert found is not None
        return found.data


async def loop(
    folder: Path,
    base: Path,
    replica: FakeReplica,
    *,
    prompts: Sequence[Mapping[str, Any]] = ({"prompt": "1+1="},),
    reward: str = ALTERNATE,
    timeout_s: float = 60.0,
    together: bool = True,
    **sections: Mapping[str, Any],
) -> Outcome:
    """Until the run ends, or somebody in it fails. `together` False: each has its own process, as far as they can tell; the
    error is then the learner's."""
    bucket = MemoryBucket(f"memory://{secrets.token_hex(4)}")
    config = write_config(folder, base, replica.url, prompts=prompts, reward=reward, bucket=bucket.url, **sections)
    ctx = Context(config=config, folder=folder, bucket=bucket, stop=Stopping(), roles=("learner", "generator"))

    async def train() -> None:
        await learner.run(ctx, load_policy=lambda *_: FakePolicy(0.0))  # type: ignore[arg-type,return-value]

    async def generate() -> None:
        try:
            await generator.run(ctx)
        except* GrpodError:
            if together:
                raise

    error: GrpodError | None = None
    with anyio.fail_after(timeout_s):
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(train)
                tasks.start_soon(generate)
        except* GrpodError as errors:
            error = first(errors)
    return Outcome(bucket=bucket, error=error)


def write_config(
    folder: Path,
    base: Path,
    url: str,
    *,
    prompts: Sequence[Mapping[str, Any]],
    reward: str,
    bucket: str,
    **sections: Mapping[str, Any],
) -> Config:
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (folder / "reward.py").write_text(reward)
    values: dict[str, dict[str, Any]] = {
        "run": {"bucket": bucket, "max_lag": 2, "startup_timeout_s": 30.0, "grace_s": 5.0},
        "model": {"base": str(base), "dtype": "float32", "max_model_len": 256},
        "data": {"source": "prompts.jsonl", "order": "epoch"},
        "generator": {
            "engine": "remote",
            "remote": {"url": url},
            "group_size": GROUP_SIZE,
            "sampling": {"max_new_tokens": 8},
            "reward_workers": 1,
        },
        # a group that the fake happens to cut in all its completions would be replaced by another: tests count groups
        "learner": {"steps": 2, "groups_per_step": 1, "loss": {"mask_truncated": False}},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return Config.model_validate({**values, "rewards": [{"function": "reward.py:reward", "timeout_s": 2.0}]})


def first(errors: BaseExceptionGroup[GrpodError]) -> GrpodError:
    found = errors.exceptions[0]
    return first(found) if isinstance(found, BaseExceptionGroup) else found
