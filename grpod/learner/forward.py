"""Token ids through the model, log-probs out: the only place that knows how logits are made.

Full logits are the largest tensor of a learner (tokens x vocabulary, in float32, several times over). Here they exist a
chunk of positions at a time, of the trained completion positions only, and never across the backward pass:

    hidden states ──gather──▶ hidden_NH ──chunks──▶ logits / temperature ──▶ logprob, entropy, d logprob / d hidden

The output head is frozen, so the derivative of one log-prob by its hidden state is a vector that can be kept (N x H) while
the chunk's logits go:  d logprob / d h = (W[target] - softmax(W h / t) W) / t.  Backward is one multiplication.

N places, H hidden size, V vocabulary; B, T as in `batch.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpod.learner.batch import MicroBatch

CHUNK_LOGITS = 1 << 24  # of one chunk: 64 MiB in float32


def completion_logprobs(model: Any, batch: MicroBatch, *, fused: bool) -> tuple[Tensor, Tensor]:
    """(learner_logprobs_BT, entropy_BT), float32, 0 where masked; at the rollouts' temperature.

    `model` is the transformers causal LM with the adapter inside. `fused` False lets the model make its own logits, for
    families whose head does more than one matrix product.
    """
    place = batch.mask_BT
    rows_N, columns_N, targets_N = batch.row_BT[place], batch.column_BT[place], batch.targets_BT[place]
    temperatures_N = batch.temperatures_B[:, None].expand_as(place)[place]
    inputs = {
        "input_ids": batch.input_ids_RL,
        "position_ids": batch.position_ids_RL,
        "attention_mask": batch.attention_mask,
        "use_cache": False,
    }
    if fused:
        hidden_RLH = model.get_decoder()(**inputs).last_hidden_state
        weight_VH = model.get_output_embeddings().weight
        logprobs_N, entropy_N = selected_logprobs(hidden_RLH[rows_N, columns_N], weight_VH, targets_N, temperatures_N)
    else:
        kept, column_of_N = torch.unique(columns_N, return_inverse=True)
        logits_NV = model(**inputs, logits_to_keep=kept).logits[rows_N, column_of_N].float() / temperatures_N[:, None]
        all_NV = logits_NV.log_softmax(-1)
        logprobs_N = all_NV.gather(1, targets_N[:, None])[:, 0]
        entropy_N = -(all_NV.detach().exp() * all_NV.detach()).sum(-1)
    empty_BT = torch.zeros(place.shape, dtype=torch.float32, device=place.device)
    return empty_BT.masked_scatter(place, logprobs_N), empty_BT.masked_scatter(place, entropy_N)


def sequence_logprobs(model: Any, token_ids_L: Tensor, *, fused: bool) -> Tensor:
    """log p(token i+1 | tokens ..i) at temperature 1, L-1 values, float32."""
    inputs = {"input_ids": token_ids_L[None], "use_cache": False}
    targets_N = token_ids_L[1:]
    if fused:
        hidden_NH = model.get_decoder()(**inputs).last_hidden_state[0, :-1]
        weight_VH = model.get_output_embeddings().weight
        return selected_logprobs(hidden_NH, weight_VH, targets_N, torch.ones_like(targets_N, dtype=torch.float32))[0]
    logits_NV: Tensor = model(**inputs).logits[0, :-1].float()
    return logits_NV.log_softmax(-1).gather(1, targets_N[:, None])[:, 0]


def selected_logprobs(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperatures_N: Tensor) -> tuple[Tensor, Tensor]:
    """(logprobs_N, entropy_N), float32; differentiable by the hidden states alone, and the entropy by nothing."""
    keep = torch.is_grad_enabled() and hidden_NH.requires_grad
    result: tuple[Tensor, Tensor] = _Selected.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, targets_N, temperatures_N, keep
    )
    return result


class _Selected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperatures_N: Tensor, keep: bool
    ) -> tuple[Tensor, Tensor]:
        num = len(targets_N)
        logprobs_N = torch.empty(num, dtype=torch.float32, device=hidden_NH.device)
        entropy_N = torch.empty_like(logprobs_N)
        slope_NH = torch.empty(hidden_NH.shape if keep else (0, 0), dtype=torch.float32, device=hidden_NH.device)
        chunk = max(1, CHUNK_LOGITS // len(weight_VH))
        for start in range(0, num, chunk):
            part = slice(start, start + chunk)
            targets_C, scale_C1 = targets_N[part], 1.0 / temperatures_N[part, None]
            logits_CV = (hidden_NH[part] @ weight_VH.T).float() * scale_C1
            total_C = logits_CV.logsumexp(-1)
            logprobs_N[part] = logits_CV.gather(1, targets_C[:, None])[:, 0] - total_C
            probs_CV = (logits_CV - total_C[:, None]).exp_()
            entropy_N[part] = total_C - (logits_CV * probs_CV).sum(-1)
            if keep:
                mean_CH = (probs_CV.to(weight_VH.dtype) @ weight_VH).float()
                slope_NH[part] = (weight_VH[targets_C].float() - mean_CH) * scale_C1
        ctx.save_for_backward(slope_NH)
        ctx.dtype = hidden_NH.dtype
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _entropy: Tensor) -> tuple[Tensor, None, None, None, None]:
        (slope_NH,) = ctx.saved_tensors
        return (grad_N[:, None] * slope_NH).to(ctx.dtype), None, None, None, None
