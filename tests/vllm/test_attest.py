"""Versions that are not what they are said to be, and servers that do not serve what they are given: a real vLLM, in the
learner's float32 and in bfloat16, behind a whole generator. Refused with what was measured; no rollout is made by them."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog

from grpod.bucket.memory import MemoryBucket
from grpod.config import Config
from grpod.context import Context, Stopping
from grpod.errors import NotReady
from grpod.generator import loop as generator
from grpod.generator.engine import vllm_spec
from grpod.replica.client import CompletionRequest, ReplicaClient
from grpod.replica.supervise import supervised
from grpod.run.base_model import fingerprint
from tests.generator.adapters_made import corrupted, overflowing, patterned, renamed, step, trained, truncated, with_pattern
from tests.generator.loops import ALTERNATE, Outcome, first, write_config
from tests.generator.scripted import ScriptedLearner
from tests.models import make_tiny_base
from tests.replica.embedded.made import make_adapter, plain_logprobs
from tests.vllm.liar import ignoring_adapters

VLLM = os.environ.get("VLLM_EXECUTABLE", "")
ENDS = (2, 0)

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.vllm,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not VLLM, reason="VLLM_EXECUTABLE names no vllm"),
]


@asynccontextmanager
async def server(config: Config, base: Path) -> AsyncIterator[str]:
    """As a generator starts it for itself."""
    async with supervised(vllm_spec(config, base, "cpu", "vllm", learner_here=False), log=structlog.get_logger()) as child:
        await child.ready()
        yield child.url


class Scene:
    """Runs of a generator in front of one server; the learner is the test."""

    def __init__(self, folder: Path, base: Path, dtype: str) -> None:
        self.folder, self.base, self.dtype = folder, base, dtype

    def config(self, url: str, *, base: Path | None = None, bucket: str = "memory://none") -> Config:
        return write_config(
            self.folder,
            base or self.base,
            url,
            prompts=[{"prompt": "1+1="}],
            reward=ALTERNATE,
            bucket=bucket,
            run={"startup_timeout_s": 200.0},
            model={"dtype": self.dtype},
            lora={"rank": 2, "alpha": 4},
            generator={"vllm": {"executable": VLLM}},
        )

    @asynccontextmanager
    async def run(self, url: str, *, base: Path | None = None) -> AsyncIterator[ScriptedLearner]:
        """Until the test has done its part, or the generator gives up: then what it raises comes out."""
        base = base or self.base
        bucket = MemoryBucket(f"memory://{url}-{base.name}")
        config = self.config(url, base=base, bucket=bucket.url)
        learner = ScriptedLearner(bucket, config, trained(config, base), fingerprint(base))
        await learner.begin()
        stop = Stopping()
        ctx = Context(config=config, folder=self.folder, bucket=bucket, stop=stop, roles=("generator",))
        with anyio.fail_after(120):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(generator.run, ctx)
                yield learner
                stop.request("done")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_what_is_not_as_it_is_said_to_be_is_refused(tmp_path: Path, dtype: str) -> None:
    base = make_tiny_base(tmp_path / "base", hidden=128, eos_ids=ENDS)
    scene = Scene(tmp_path, base, dtype)
    async with server(scene.config("http://none"), base) as url:
        await check_versions(scene, url)
        await check_servers(scene, url, make_tiny_base(tmp_path / "other", hidden=128, eos_ids=ENDS, seed=1))
        if dtype == "float32":
            await check_end_tokens(url, base, make_adapter(base, tmp_path / "adapter", seed=1, rank=2))


async def check_versions(scene: Scene, url: str) -> None:
    with structlog.testing.capture_logs() as logs:
        async with scene.run(url) as learner:
            served = await play(learner)
    refused = {line["version"]: line["error"] for line in logs if line["event"] == "version_refused"}
    assert len(refused) == len([line for line in logs if line["event"] == "version_refused"]), "each is told once"
    assert sorted(refused) == [3, 4, 6, 7, 9, 10, 12]
    for version, slope in measured(refused).items():
        assert abs(slope - 1) > 0.01, refused[version]
    assert "alpha_pattern" in refused[6], "which this engine makes the same of as the learner, and others do not"
    for version in (9, 12):
        assert "nats (rms) from the adapter" in refused[version]
    kinds = {line["version"]: line["kind"] for line in logs if line["event"] == "version_served"}
    assert [kinds.pop(version) for version in (0, 1)] == ["unproven"] * 2, "too little effect to tell"
    assert kinds == dict.fromkeys((2, 5, 8, 11), "proven")
    print(json.dumps({"test": "attest", "dtype": scene.dtype, "slopes": measured(refused)}))
    groups = await Outcome(bucket=learner.bucket, error=None).groups()
    assert Counter(group.policy_version for group in groups) == Counter(served)


def measured(refused: dict[int, str]) -> dict[int, float]:
    """Of those that could be scored and are not what they were said to be: slope, where 1 is right."""
    found = {
        version: re.search(r"distance to the adapter .* to the base .*; slope (\S+)", refused[version]) for version in refused
    }
    assert all(found[version] for version in (3, 4, 6, 7, 10)), refused
    return {version: float(match[1]) for version, match in found.items() if match and version != 6}


async def play(learner: ScriptedLearner) -> list[int]:
    """Which version each group is to be made under."""
    policy, served = learner.policy, list[int]()

    async def group_under(version: int) -> None:
        served.append(version)
        await learner.allow(1)
        await learner.shipped(len(served))

    async def good(version: int) -> dict[str, bytes]:
        files, scores = learner.made()
        await learner.publish(version, files, scores)
        await group_under(version)
        return files

    await good(0)
    step(policy, 1e-8)
    await good(1)
    step(policy, 1e-2, times=4)
    older = await good(2)
    step(policy, 1e-2)
    files, scores = learner.made()
    forged = {
        3: (renamed(files), scores),
        4: (older, scores),
        6: (patterned(files), with_pattern(learner)),
        7: (corrupted(files), scores),
        9: (truncated(files), scores),
        10: (patterned(files), scores),
    }
    last_good = 2
    for version in range(3, 12):
        if version not in forged:
            await good(version)
            last_good = version
        else:
            await learner.publish(version, *forged[version])
            await learner.refused(version)
            await group_under(last_good)
    await learner.publish(12, overflowing(files), scores)
    await learner.refused(12)
    return served


async def check_servers(scene: Scene, url: str, other: Path) -> None:
    async with ignoring_adapters(url) as lying:
        error = await ends_without_a_rollout(scene, lying)
    assert "ignores adapters" in str(error)
    error = await ends_without_a_rollout(scene, url, base=other)
    assert re.search(r"serves another base model than the learner's: .* \d+\.\d+ nats apart", str(error))


async def ends_without_a_rollout(scene: Scene, url: str, **run: Any) -> NotReady:
    with pytest.raises(BaseExceptionGroup) as caught:
        async with scene.run(url, **run) as learner:
            step(learner.policy, 1e-2)
            await learner.publish(0, *learner.made())
            await learner.allow(1)
            await anyio.sleep_forever()
    error = first(caught.value)
    assert isinstance(error, NotReady)
    assert await Outcome(bucket=learner.bucket, error=None).groups() == []
    return error


async def check_end_tokens(url: str, base: Path, adapter: Path) -> None:
    """Both of the model's end tokens end a completion, and come back with their log-probs."""
    prompt = list(range(5, 21))
    async with ReplicaClient(url) as client:
        await client.load_adapter("ends", str(adapter))
        ends = Counter[int]()
        for seed in range(40):
            request = CompletionRequest(model="ends", prompt_ids=prompt, n=8, max_tokens=64, seed=seed, stop_token_ids=ENDS)
            for choice in (await client.complete(request)).choices:
                assert not set(choice.token_ids[:-1]) & set(ENDS)
                if choice.token_ids[-1] not in ENDS:
                    assert (choice.finish_reason, len(choice.token_ids)) == ("length", 64)
                    continue
                assert choice.finish_reason == "stop"
                if not ends[choice.token_ids[-1]]:
                    whole = plain_logprobs(base, adapter, [*prompt, *choice.token_ids])
                    wanted = [float(whole[len(prompt) - 1 + i, token]) for i, token in enumerate(choice.token_ids)]
                    assert list(choice.logprobs) == pytest.approx(wanted, abs=1e-3)
                ends[choice.token_ids[-1]] += 1
            if set(ends) == set(ENDS):
                break
        assert set(ends) == set(ENDS), ends
        await client.unload_adapter("ends")
