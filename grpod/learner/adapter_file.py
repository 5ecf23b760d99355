"""The adapter as PEFT and vLLM read it: `adapter_model.safetensors` and `adapter_config.json`; equal weights
give equal bytes.

Plain LoRA only. An engine drops the fields that it does not know and answers 200, so an adapter with any of them would be
served as something else than what was trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from grpod.errors import ConfigError
from grpod.wire.keys import ADAPTER_CONFIG, ADAPTER_WEIGHTS


def encode(tensors: Mapping[str, Tensor], *, rank: int, alpha: float, targets: Sequence[str], base: str) -> dict[str, bytes]:
    """`base` is a Hub id or a word: a path would mean nothing to another machine."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": sorted(targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    ready = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    return {
        ADAPTER_WEIGHTS: safetensors.torch.save(ready, metadata={"format": "pt"}),
        ADAPTER_CONFIG: (json.dumps(config, indent=1, sort_keys=True) + "\n").encode(),
    }


def decode(path: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Exactly the tensors of `like`, by name and shape. Raises `ConfigError`."""
    try:
        tensors = safetensors.torch.load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: no whole safetensors file: {error}") from error
    for name, tensor in like.items():
        if name not in tensors:
            raise ConfigError(f"{path}: tensor {name} is missing; was it made with other lora.target_modules?")
        if tensors[name].shape != tensor.shape:
            wanted, found = list(tensor.shape), list(tensors[name].shape)
            raise ConfigError(f"{path}: tensor {name} has shape {found}, not {wanted}; was it made with another lora.rank?")
    unknown = sorted(tensors.keys() - like.keys())
    if unknown:
        raise ConfigError(
            f"{path}: tensor {unknown[0]} has no place in this model; was it made with other lora.target_modules?"
        )
    return tensors
