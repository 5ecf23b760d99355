"""A learner that does what the test says: it begins a run, publishes any files under any number, and gives credit."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from grpod.bucket.base import Bucket
from grpod.config import Config
from grpod.configure import agreed_values
from grpod.learner.policy import Policy
from grpod.learner.schedule import probe_ids
from grpod.wire import keys
from grpod.wire.adapter import Adapter, Lora, Probe, file_ref
from grpod.wire.run import Run
from grpod.wire.state import GeneratorState, LearnerState
from tests.run.helpers import claim

RUN_ID = "scripted"


class ScriptedLearner:
    def __init__(self, bucket: Bucket, config: Config, policy: Policy, fingerprint: str) -> None:
        self.bucket, self.policy, self._config, self._fingerprint = bucket, policy, config, fingerprint
        self.probe_ids = probe_ids(RUN_ID, policy.vocab_size, config.model.max_model_len)
        self.base_logprobs = policy.score(self.probe_ids, adapter=False)
        self._counter = 0
        self._newest = 0
        self._credits: dict[str, int] = {}

    async def begin(self) -> None:
        run = Run(run_id=RUN_ID, config=agreed_values(self._config), base_fingerprint=self._fingerprint, created_at=0.0)
        canary = self.policy.canary_files(self.probe_ids)
        await self.bucket.put({f"{keys.CANARY}/{name}": data for name, data in canary.items()})
        await self.bucket.put({keys.RUN: run.encode(), keys.claim(1): claim(1).model_copy(update={"run_id": RUN_ID}).encode()})

    def made(self) -> tuple[dict[str, bytes], list[float]]:
        """The policy as it is: its files, and how it scores the probe."""
        return self.policy.adapter_files(), self.policy.score(self.probe_ids, adapter=True)

    async def publish(self, version: int, files: Mapping[str, bytes], logprobs: list[float]) -> None:
        """The manifest is right about the bytes, whatever they are."""
        manifest = Adapter(
            run_id=RUN_ID,
            version=version,
            epoch=1,
            pos=version,
            step=version,
            base_fingerprint=self._fingerprint,
            lora=Lora(r=self._config.lora.rank, alpha=self._config.lora.alpha, targets=self.policy.lora_targets),
            files={name: file_ref(data) for name, data in files.items()},
            probe=Probe(token_ids=self.probe_ids, logprobs=logprobs, base_logprobs=self.base_logprobs),
            created_at=0.0,
        )
        await self.bucket.put({keys.adapter(version, 1, name): data for name, data in files.items()})
        await self.bucket.put({keys.adapter(version, 1, keys.MANIFEST): manifest.encode()})
        self._newest = version
        await self._tell()

    async def generator(self) -> GeneratorState:
        """The one generator's state, once it has one."""
        while not (listed := [meta.key async for meta in self.bucket.list(keys.GENERATOR_STATES)]):
            await self.bucket.changed(0.2)
        (key,) = listed
        found = await self.bucket.get(key)
        assert found is not None
        return GeneratorState.decode(found.data, key)

    async def allow(self, more: int) -> None:
        """Credit for so many groups more."""
        name = (await self.generator()).generator
        self._credits[name] = self._credits.get(name, 0) + more
        await self._tell()

    async def shipped(self, count: int) -> GeneratorState:
        """Waits until so many groups are in the bucket."""
        while (state := await self.generator()).begun - len(state.open) < count:
            await self.bucket.changed(0.2)
        return state

    async def refused(self, version: int) -> GeneratorState:
        """Waits until the generator says so."""
        while f"{version}-1" not in (state := await self.generator()).refused:
            await self.bucket.changed(0.2)
        return state

    async def _tell(self) -> None:
        self._counter += 1
        state: dict[str, Any] = {"epoch": 1, "counter": self._counter, "step": self._newest, "version": self._newest}
        state |= {"pos": self._newest, "credits": self._credits, "waiting_for": 1, "steps": 100, "updated_at": time.time()}
        await self.bucket.put({keys.LEARNER_STATE: LearnerState.model_validate(state).encode()})
