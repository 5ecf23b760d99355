"""What the learner's weights say of rollouts that a replica made: read from a run's folder, by plain transformers and PEFT."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.integration import runs


@dataclass(frozen=True, kw_only=True)
class Agreement:
    tokens: int
    mean: float
    """of |learner - engine|, nats"""
    worst: float
    ratio: float
    """mean of exp(learner - engine)"""
    inside: float
    """share of tokens with that ratio inside [0.9, 1.1]"""


def agreement(run: Path, base: Path, *, versions: int = 5, rollouts: int = 16) -> Agreement:
    """Of `rollouts` each of so many versions, spread over all that were used."""
    by_version: dict[tuple[int, int], list[runs.Row]] = defaultdict(list)
    for rows in runs.rollouts(run)[0].values():
        for row in rows:
            by_version[row["policy_version"], row["policy_epoch"]].append(row)
    used = sorted(by_version)
    chosen = {used[round(i * (len(used) - 1) / max(1, versions - 1))] for i in range(versions)}
    apart = [
        mine - theirs
        for version, epoch in sorted(chosen)
        for row, scores in _scored(base, run / f"adapters/v{version:08d}-e{epoch:06d}", by_version[version, epoch][:rollouts])
        for mine, theirs in zip(scores, row["generator_logprobs"], strict=True)
    ]
    ratios = [math.exp(value) for value in apart]
    return Agreement(
        tokens=len(apart),
        mean=sum(map(abs, apart)) / len(apart),
        worst=max(map(abs, apart)),
        ratio=sum(ratios) / len(ratios),
        inside=sum(0.9 <= ratio <= 1.1 for ratio in ratios) / len(ratios),
    )


def _scored(base: Path, adapter: Path, rows: Sequence[runs.Row]) -> list[tuple[runs.Row, list[float]]]:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    net = PeftModel.from_pretrained(plain, adapter).eval()
    scored = []
    for row in rows:
        prompt, completion = list(row["prompt_ids"]), list(row["completion_ids"])
        with torch.no_grad():
            logprobs = net(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
        scored.append((row, [float(logprobs[len(prompt) - 1 + at, token]) for at, token in enumerate(completion)]))
    return scored
