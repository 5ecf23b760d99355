"""A published adapter's log-probs, beside the training: a second adapter over the same frozen base weights.

A step writes to the adapter in training while a version that was taken before it is scored. Only LoRA tensors are there twice.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import safetensors.torch
import torch

from grpod.learner.forward import sequence_logprobs
from grpod.learner.model import Model, adapter_of


class Shadow:
    """One call at a time; from any thread, whatever the policy is doing."""

    def __init__(self, model: Model) -> None:
        tensors = (*model.peft.parameters(), *model.peft.buffers())
        frozen = {id(tensor): tensor for tensor in tensors if not tensor.requires_grad}
        self._peft: Any = copy.deepcopy(model.peft, frozen).eval()
        self._model = model
        self._adapter = adapter_of(self._peft)

    @torch.no_grad()
    def score(self, weights: bytes, token_ids: Sequence[int]) -> list[float]:
        """`Policy.score` under the adapter of `weights`, a safetensors file of the same shapes."""
        for name, tensor in safetensors.torch.load(weights).items():
            self._adapter[name].copy_(tensor)
        ids_L = torch.tensor(token_ids, device=self._model.device)
        return sequence_logprobs(self._peft.get_base_model(), ids_L, fused=self._model.stock).tolist()
