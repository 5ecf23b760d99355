"""Orchestration overhead: the real learner and generator loops over a real bucket, around a trainer of fixed step time and a
replica of fixed latency, against the time that an ideal pipeline of the same parts would take.

    python -m tests.bench.loop [--steps 60] [--bucket file|memory]

The ideal: group s may begin when the version that its lag allows is published, is there one latency later, and is trained as
soon as it is there and the step before is done; publishing and shipping take no time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from grpod.bucket.base import Bucket
from grpod.bucket.file import FileBucket
from grpod.bucket.memory import MemoryBucket
from grpod.config import Config
from grpod.context import Context, Stopping
from grpod.generator import loop as generator
from grpod.learner import loop as learner
from grpod.learner.policy import Snapshot, StepReport
from grpod.telemetry import log
from grpod.wire import keys
from grpod.wire.tables import decode_metrics
from tests.fakes import FakeReplica, flat_score
from tests.models import make_tiny_base

# (max_lag, step_s, latency_s): bound by the learner, by the replica, and near the edge between them
SETTINGS = ((0, 0.5, 0.5), (1, 0.5, 0.4), (1, 0.5, 1.5), (2, 0.5, 1.2), (4, 0.5, 2.0), (4, 0.25, 1.5))
GROUPS, GROUP_SIZE, VOCABULARY = 4, 4, 512


@dataclass
class FakePolicy:
    """Takes its time, learns nothing. Its log-probs are the fake replica's, so that attestation has nothing against it."""

    step_s: float
    num_steps: int = 0
    vocab_size: int = VOCABULARY
    max_positions: int = 0
    resumable_bytes: int = 1000
    lora_targets: Sequence[str] = ("q_proj",)

    def describe(self) -> dict[str, Any]:
        return {"device": "none"}

    def step(self, groups: Sequence[Any]) -> StepReport:
        time.sleep(self.step_s)
        self.num_steps += 1
        return StepReport(metrics={"loss": 0.0})

    def score(self, token_ids: Sequence[int], *, adapter: bool) -> list[float]:
        return flat_score("base", token_ids)

    def score_files(self, files: Mapping[str, bytes], token_ids: Sequence[int]) -> list[float]:
        return flat_score("base", token_ids)

    def canary_files(self, token_ids: Sequence[int]) -> dict[str, bytes]:
        return {keys.ADAPTER_WEIGHTS: b"canary", keys.ADAPTER_CONFIG: b"{}"}

    def snapshot(self) -> Snapshot:
        adapter = {keys.ADAPTER_WEIGHTS: b"%d" % self.num_steps, keys.ADAPTER_CONFIG: b"{}"}
        return Snapshot(adapter=adapter, optimizer=b"o", scheduler={"num_steps": self.num_steps}, rng={})


def score(model: str, token_ids: Sequence[int]) -> list[float]:
    shift = 1.0 if "canary" in model else 0.0
    return [value - shift for value in flat_score("base", token_ids)]


def ideal_s(steps: int, step_s: float, latency_s: float, max_lag: int) -> float:
    """From the end of the first step to the end of the last: how a replica comes up is not the loop's affair."""
    published, trained = [0.0], 0.0  # when version v was published
    for step in range(steps):
        begun = published[max(0, step - max_lag)]
        trained = max(trained, begun + latency_s) + step_s
        published.append(trained)
    return trained - published[1]


async def one(bucket: Bucket, folder: Path, *, steps: int, step_s: float, latency_s: float, max_lag: int) -> dict[str, float]:
    async with FakeReplica(max_loras=16, score=score) as replica:
        replica.spoil("delay", latency_s, when=lambda body: body.get("n") == GROUP_SIZE)
        config = Config.model_validate(
            {
                "run": {"bucket": bucket.url, "max_lag": max_lag},
                "model": {"base": str(folder / "base"), "max_model_len": 256},
                "data": {"source": str(folder / "prompts.jsonl")},
                "rewards": [{"function": str(folder / "reward.py") + ":reward"}],
                "generator": {
                    "engine": "remote",
                    "remote": {"url": replica.url},
                    "group_size": GROUP_SIZE,
                    "sampling": {"max_new_tokens": 8},
                },
                "learner": {"steps": steps, "groups_per_step": GROUPS, "checkpoint_every": steps},
            }
        )
        ctx = Context(config=config, folder=folder, bucket=bucket, stop=Stopping(), roles=("learner", "generator"))

        async def train() -> None:
            await learner.run(ctx, load_policy=lambda *_: FakePolicy(step_s))  # type: ignore[arg-type,return-value]

        with anyio.fail_after(600):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(train)
                tasks.start_soon(generator.run, ctx)
    steps_at = {row.step: row.time async for row in metric(bucket, "perf/step_s")}
    dropped = [row.value async for row in metric(bucket, "groups/dropped_total/stale")]
    wall = steps_at[steps] - steps_at[1]
    ideal = ideal_s(steps, step_s, latency_s, max_lag)
    return {
        "max_lag": max_lag,
        "latency_s": latency_s,
        "step_s": step_s,
        "wall_s": round(wall, 3),
        "ideal_s": round(ideal, 3),
        "ratio": round(wall / ideal, 4),
        "stale": dropped[-1] if dropped else 0,
    }


async def metric(bucket: Bucket, name: str) -> Any:
    async for meta in bucket.list(keys.METRICS):
        found = await bucket.get(meta.key)
        assert found is not None
        for row in decode_metrics(found.data, meta.key):
            if row.name == name:
                yield row


async def main(steps: int, kind: str) -> None:
    log.configure(level="warning")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_base(folder / "base")
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(50)))
        reward = "def reward(completions):\n    return [float(i % 2) for i in range(len(completions))]\n"
        (folder / "reward.py").write_text(reward)
        for max_lag, step_s, latency_s in SETTINGS:
            url = folder / f"run-{len(rows)}"
            bucket: Bucket = FileBucket(url) if kind == "file" else MemoryBucket(f"memory://{url.name}")
            row = await one(bucket, folder, steps=steps, step_s=step_s, latency_s=latency_s, max_lag=max_lag)
            rows.append(row)
            print("  ".join(f"{key} {value:<7g}" for key, value in row.items()), flush=True)
    worst = max(row["ratio"] for row in rows if row["max_lag"] >= 1)
    print(json.dumps({"bench": "loop", "bucket": kind, "steps": steps, "worst_ratio_at_lag_1_or_more": worst, "rows": rows}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--bucket", choices=["file", "memory"], default="file")
    arguments = parser.parse_args()
    anyio.run(main, arguments.steps, arguments.bucket)
