"""LoRA adapters, several at once: each row of a batch goes through its own.

    y = W x                          all rows, one product
    y[lo:hi] += s · B A x[lo:hi]     for each run of rows that share an adapter

Read from PEFT's files and computed as PEFT does. As in vLLM: the scale is alpha / r (or alpha / sqrt(r)) of the config,
per-module patterns are not known here, weights take the base's dtype, and what cannot be served refuses the load whole.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


class NoAdapter(Exception):
    """Nothing lies at the path."""


class BadAdapter(Exception):
    """What lies there cannot be served."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Lora:
    """Loaded once, never changed; requests hold on to it after it was unloaded."""

    name: str
    path: str
    weights: dict[str, tuple[Tensor, Tensor]]
    """module name -> A transposed [in, r], B transposed and scaled [r, out]"""


class LoraLinears:
    """Patches the linear modules of a model, except its output head, so that `segments` take part in every pass."""

    def __init__(self, model: nn.Module) -> None:
        head = model.get_output_embeddings()  # type: ignore[operator]  # of transformers' PreTrainedModel
        self.segments: Sequence[tuple[Lora, int, int]] = ()  # (adapter, first row, row after the last) of the next pass
        self._linears: dict[str, nn.Linear] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and module is not head:
                self._linears[name] = module
                module.forward = partial(self._forward, name, module)  # type: ignore[method-assign]

    def _forward(self, name: str, module: nn.Linear, x_BTI: Tensor) -> Tensor:
        y_BTO = nn.functional.linear(x_BTI, module.weight, module.bias)
        for lora, low, high in self.segments:
            pair = lora.weights.get(name)
            if pair is not None:
                if x_BTI.dim() != 3:
                    raise RuntimeError(f"{name} mixes the rows of a batch: it cannot carry an adapter here")
                down, up = pair
                x_NI = x_BTI[low:high].flatten(0, 1)
                y_BTO[low:high].view(-1, y_BTO.shape[-1]).addmm_(x_NI @ down, up)
        return y_BTO

    def load(self, name: str, path: str, *, max_rank: int) -> Lora:
        """Touches no module. Raises `NoAdapter` and `BadAdapter`."""
        folder = Path(path)
        try:
            config = json.loads((folder / "adapter_config.json").read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise NoAdapter(f"No adapter found for {path}") from None
        except ValueError as error:
            raise BadAdapter(f"adapter_config.json: {error}") from None
        scale = scale_of(config, max_rank=max_rank)
        try:
            tensors = load_file(folder / "adapter_model.safetensors")
        except (OSError, SafetensorError) as error:
            raise BadAdapter(f"adapter_model.safetensors: {error}") from None
        return Lora(name=name, path=path, weights=self._match(tensors, scale, max_rank=max_rank))

    def _match(self, tensors: dict[str, Tensor], scale: float, *, max_rank: int) -> dict[str, tuple[Tensor, Tensor]]:
        halves: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            found = TENSOR.fullmatch(key)
            if found is None or found[1] not in self._linears:
                raise BadAdapter(f"tensor {key} fits no module of the base model that can carry an adapter")
            halves.setdefault(found[1], {})[found[2]] = tensor
        if not halves:
            raise BadAdapter("adapter_model.safetensors holds no tensor")
        weights = {}
        for module_name, pair in halves.items():
            weight = self._linears[module_name].weight
            if set(pair) != {"A", "B"}:
                raise BadAdapter(f"{module_name} has lora_{'/'.join(pair)} only")
            rank = pair["A"].shape[0]
            if not 1 <= rank <= max_rank:
                raise BadAdapter(f"{module_name} has rank {rank}, max_lora_rank is {max_rank}")
            for half, want in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
                if tuple(pair[half].shape) != want:
                    raise BadAdapter(f"{module_name}.lora_{half} has shape {tuple(pair[half].shape)}, the base needs {want}")
            down, up = (pair[half].to(device=weight.device, dtype=torch.float32).T for half in "AB")
            weights[module_name] = down.to(weight.dtype).contiguous(), (up * scale).to(weight.dtype).contiguous()
        return weights


def scale_of(config: Any, *, max_rank: int) -> float:
    """Raises `BadAdapter` for what is no plain LoRA."""
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise BadAdapter("adapter_config.json is not of a LoRA adapter")
    for field in ("use_dora", "modules_to_save", "fan_in_fan_out", "use_qalora"):
        if config.get(field):
            raise BadAdapter(f"adapter_config.json: {field} is not supported")
    if config.get("bias", "none") != "none":
        raise BadAdapter(f"adapter_config.json: bias {config['bias']!r} is not supported")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
        raise BadAdapter(f"adapter_config.json: r {rank!r} and lora_alpha {alpha!r} give no scale")
    if rank > max_rank:
        raise BadAdapter(f"LoRA rank {rank} is greater than max_lora_rank {max_rank}")
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
