"""Versions that are what their manifest's probe says, however little they do, and such that are not: what a replica makes of
them is the same question for the embedded one and for a real vLLM.

    files, scores = learner.made()        publish(files, scores)             right
                                          publish(renamed(files), scores)    files that are not those of the probe
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from grpod.config import Config
from grpod.learner.policy import Policy
from grpod.wire.keys import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tests.generator.scripted import ScriptedLearner
from tests.learner.policies import FOUR, group

Files = Mapping[str, bytes]


def trained(config: Config, base: Path) -> Policy:
    """In float32, whatever the engine computes in."""
    values = config.model_dump(by_alias=True)
    values |= {"learner": {"learning_rate": 1e-2, "device": "cpu"}, "model": {**values["model"], "dtype": "float32"}}
    return Policy.load(Config.model_validate(values), base, 0)


def step(policy: Policy, rate: float, *, times: int = 1) -> None:
    object.__setattr__(policy.config.learner, "learning_rate", rate)
    for _ in range(times):
        assert not policy.step([group(*FOUR)]).skipped


def renamed(files: Files) -> dict[str, bytes]:
    """By the names of a model that is wrapped once more."""
    return _weights(files, lambda name, data: {name.replace("base_model.model.", "base_model.model.language_model."): data})


def corrupted(files: Files) -> dict[str, bytes]:
    """Every B with its values in reverse: a whole file, of the right names, shapes and sizes."""
    return _weights(files, lambda name, data: {name: data[::-1, ::-1].copy() if ".lora_B." in name else data})


def overflowing(files: Files) -> dict[str, bytes]:
    """Numbers that are finite, and too large for what comes of them."""
    return _weights(files, lambda name, data: {name: np.full_like(data, 3e38) if ".lora_B." in name else data})


def truncated(files: Files) -> dict[str, bytes]:
    return {**files, ADAPTER_WEIGHTS: files[ADAPTER_WEIGHTS][: len(files[ADAPTER_WEIGHTS]) * 3 // 5]}


def patterned(files: Files) -> dict[str, bytes]:
    """A field that engines drop: they serve other weights than were trained, and answer 200."""
    config = {**json.loads(files[ADAPTER_CONFIG]), "alpha_pattern": {"layers.0.self_attn.q_proj": 64}}
    return {**files, ADAPTER_CONFIG: json.dumps(config).encode()}


def with_pattern(learner: ScriptedLearner) -> list[float]:
    """How a learner that honours the pattern would score: q_proj of layer 0 at 64 / alpha of its scale."""
    name = next(n for n in learner.policy._adapter if "layers.0.self_attn.q_proj.lora_B" in n)
    parameter = learner.policy._adapter[name]
    kept = parameter.detach().clone()
    parameter.data.mul_(64 / learner.policy.config.lora.alpha)
    scores = learner.policy.score(learner.probe_ids, adapter=True)
    parameter.data.copy_(kept)
    return scores


def _weights(files: Files, change: Callable[[str, NDArray], dict[str, NDArray]]) -> dict[str, bytes]:  # type: ignore[type-arg]
    tensors = safetensors.numpy.load(files[ADAPTER_WEIGHTS])
    changed = {name: data for old, values in tensors.items() for name, data in change(old, values).items()}
    written = {**files, ADAPTER_WEIGHTS: safetensors.numpy.save(changed)}
    assert written[ADAPTER_WEIGHTS] != files[ADAPTER_WEIGHTS]
    return written
