"""AdamW (0.9, 0.95), its learning rate as a pure function of the step, and its state as one safetensors file.

The scheduler is that function: its whole state is the number of steps done, so it cannot drift from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from grpod.config import LearnerSection
from grpod.errors import ConfigError

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def learning_rate(section: LearnerSection, step: int) -> float:
    """Of the step that follows `step` done ones. Warm-up rises to the peak in `warmup_steps`; no step has a rate of 0."""
    if step < section.warmup_steps:
        return section.learning_rate * (step + 1) / (section.warmup_steps + 1)
    if section.schedule == "constant":
        return section.learning_rate
    left = max(0.0, (section.steps - step) / max(1, section.steps - section.warmup_steps))
    if section.schedule == "linear":
        return section.learning_rate * left
    return section.learning_rate * 0.5 * (1.0 - math.cos(math.pi * left))


def adamw(parameters: Mapping[str, Tensor], section: LearnerSection) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        list(parameters.values()), lr=section.learning_rate, betas=(0.9, 0.95), weight_decay=section.weight_decay
    )


def encode(optimizer: torch.optim.AdamW, parameters: Mapping[str, Tensor]) -> bytes:
    tensors = {
        f"{moment}.{name}": optimizer.state[parameter][moment].detach().to("cpu", copy=True)
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for moment in MOMENTS
    }
    return safetensors.torch.save(tensors, metadata={"format": "pt"})


def decode(path: Path, optimizer: torch.optim.AdamW, parameters: Mapping[str, Tensor]) -> None:
    """Sets the state of every parameter; a file of no tensors is that of an optimizer before its first step."""
    try:
        tensors = safetensors.torch.load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: no whole safetensors file: {error}") from error
    optimizer.state.clear()
    for name, parameter in parameters.items() if tensors else ():
        state = {}
        for moment in MOMENTS:
            found = tensors.get(f"{moment}.{name}")
            if found is None or found.shape != (torch.Size() if moment == "step" else parameter.shape):
                raise ConfigError(f"{path}: {moment}.{name} is missing or has another shape")
            # AdamW keeps its step counts on the CPU
            state[moment] = found.clone() if moment == "step" else found.to(parameter.device, copy=True)
        optimizer.state[parameter] = state
