"""Seconds of one learner step, on rollouts that need no generator: `python -m tests.bench.learner [--large] [--steps N]`.

    sums      16 groups of 8, 12 prompt tokens, 4 completion tokens, Qwen2 of 0.4 M parameters     (the quickstart's shape)
    smollm2    4 groups of 8, 200 + 64 tokens, the shape of SmolLM2-135M in float32                 (--large)

Each in the two layouts: prompts shared within a group, and a padded row for every rollout. Random weights.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers

from grpod.config import Config
from grpod.learner.model import load
from grpod.learner.policy import Policy
from grpod.wire.rollout import Group, Rollout, Sampling


@dataclass(frozen=True, kw_only=True)
class Shape:
    groups: int
    size: int
    prompt: int
    completion: int
    model: transformers.PretrainedConfig


SMALL = Shape(
    groups=16,
    size=8,
    prompt=12,
    completion=4,
    model=transformers.Qwen2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    ),
)
LARGE = Shape(
    groups=4,
    size=8,
    prompt=200,
    completion=64,
    model=transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    ),
)


def groups(shape: Shape) -> list[Group]:
    draw = random.Random(0)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, 500) for _ in range(n))

    def rollout(completion_ids: tuple[int, ...], reward: float) -> Rollout:
        return Rollout(
            completion_ids=completion_ids,
            generator_logprobs=(-6.0,) * len(completion_ids),
            loss_mask=(1,) * len(completion_ids),
            reward=reward,
            finish_reason="stop",
            seed=0,
        )

    return [
        Group(
            run_id="bench",
            group_id=f"bench/{number}",
            group_size=shape.size,
            prompt_id="p",
            data_epoch=0,
            prompt_row=number,
            prompt_ids=ids(shape.prompt),
            policy_version=0,
            policy_epoch=1,
            adapter_sha256="",
            sampling=Sampling(temperature=1.0),
            generator="bench",
            created_at=0.0,
            rollouts=tuple(
                rollout(ids(draw.randint(max(1, shape.completion // 2), shape.completion)), float(i % 2))
                for i in range(shape.size)
            ),
        )
        for number in range(shape.groups)
    ]


def measured(name: str, shape: Shape, steps: int) -> list[dict[str, float | str]]:
    config = Config.model_validate(
        {
            "model": {"base": "base", "dtype": "float32", "max_model_len": 2048},
            "lora": {"rank": 4, "alpha": 8},
            "learner": {"learning_rate": 1e-4, "token_budget": 4096},
        }
    )
    found = groups(shape)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(shape.model, dtype=torch.float32).save_pretrained(folder)
        model = load(config, Path(folder), 0)
    rows: list[dict[str, float | str]] = []
    for share in (True, False):
        policy = Policy(config, replace(model, stock=share), "base", 0)
        seconds = []
        for _ in range(steps + 1):
            begun = time.perf_counter()
            report = policy.step(found)
            seconds.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        policy.snapshot()
        rows.append(
            {
                "shape": name,
                "layout": "shared" if share else "padded",
                "step_s": round(statistics.median(seconds[1:]), 4),
                "snapshot_s": round(time.perf_counter() - begun, 4),
                "microbatches": report.metrics["batch/microbatches_per_step"],
                "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),  # so far
                "threads": torch.get_num_threads(),
            }
        )
        print("  ".join(f"{key} {value:<8}" for key, value in rows[-1].items()), flush=True)
    return rows


def main(steps: int, large: bool) -> None:
    rows = measured("smollm2", LARGE, steps) if large else measured("sums", SMALL, steps)
    print(json.dumps({"bench": "learner", "steps": steps, "step_s": rows[0]["step_s"], "rows": rows}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--large", action="store_true")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    main(arguments.steps, arguments.large)
