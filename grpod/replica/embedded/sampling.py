"""logits -> tokens and their *processed* log-probs: those of the very distribution that was sampled from. Pure.

Order as in vLLM: temperature, then top_k, then top_p on what is left, then log-softmax. Temperature 0 takes the greatest
logit; its log-probs are those at temperature 1. One number in [0, 1) decides each token (inverse of the cumulative
distribution), so that a seed gives the same tokens whatever else is in the batch.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    temperature: float
    top_p: float
    """1 is off"""
    top_k: int
    """0 is off"""


class Sampler:
    """Built once for a batch's rows, used at each of its steps."""

    def __init__(self, rows: Sequence[Sampling], device: torch.device) -> None:
        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

        self._greedy_B1 = column([float(row.temperature == 0) for row in rows]).bool()
        self._temperature_B1 = column([row.temperature or 1.0 for row in rows])
        self._scaled = any(row.temperature not in (0, 1) for row in rows)
        self._any_greedy = any(row.temperature == 0 for row in rows)
        self._all_greedy = all(row.temperature == 0 for row in rows)
        ks, ps = [row.top_k if row.temperature else 0 for row in rows], [row.top_p if row.temperature else 1.0 for row in rows]
        self._max_k = max(ks)
        self._k_B1 = column([float(k) for k in ks]).long()
        self._cut_p = min(ps) < 1
        self._p_B1 = column(ps)

    def __call__(self, logits_BV: Tensor, dice: Sequence[float]) -> tuple[list[int], list[float]]:
        """`dice`: one number in [0, 1) for each row. Returns tokens and log-probs, B each."""
        logprobs_BV = self.processed(logits_BV)
        if self._all_greedy:
            tokens_B = logits_BV.argmax(-1)
        else:
            tokens_B = pick(logprobs_BV, dice)
            if self._any_greedy:
                tokens_B = torch.where(self._greedy_B1[:, 0], logits_BV.argmax(-1), tokens_B)
        chosen_B = logprobs_BV.gather(-1, tokens_B[:, None])[:, 0]
        return tokens_B.tolist(), chosen_B.tolist()

    def processed(self, logits_BV: Tensor) -> Tensor:
        if self._scaled:
            logits_BV = logits_BV / self._temperature_B1
        if self._max_k:
            logits_BV = self._keep_top_k(logits_BV)
        if self._cut_p:
            logits_BV = self._keep_top_p(logits_BV)
        return logits_BV.log_softmax(-1)

    def _keep_top_k(self, logits_BV: Tensor) -> Tensor:
        greatest_BK = logits_BV.topk(min(self._max_k, logits_BV.shape[-1]), dim=-1).values
        least_B1 = greatest_BK.gather(-1, (self._k_B1 - 1).clamp(0, greatest_BK.shape[-1] - 1))
        return logits_BV.masked_fill((logits_BV < least_B1) & (self._k_B1 > 0), -torch.inf)

    def _keep_top_p(self, logits_BV: Tensor) -> Tensor:
        """The fewest tokens whose mass reaches p; always the most likely one."""
        descending_BV, order_BV = logits_BV.sort(dim=-1, descending=True)
        mass_BV = descending_BV.softmax(-1)
        before_BV = mass_BV.cumsum(-1) - mass_BV
        drop_BV = (before_BV >= self._p_B1) & (self._p_B1 < 1)
        drop_BV[:, 0] = False
        return logits_BV.masked_fill(torch.zeros_like(drop_BV).scatter(-1, order_BV, drop_BV), -torch.inf)


def pick(logprobs_BV: Tensor, dice: Sequence[float]) -> Tensor:
    """The first token at which the cumulative distribution exceeds its die: never one of probability 0."""
    cumulative_BV = logprobs_BV.double().exp().cumsum(-1)
    total_B1 = cumulative_BV[:, -1:]
    die_B1 = torch.tensor(dice, dtype=torch.float64, device=logprobs_BV.device)[:, None] * total_B1
    die_B1 = torch.minimum(die_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1)))  # a product may round up to the total
    return torch.searchsorted(cumulative_BV, die_B1, right=True)[:, 0].clamp(max=logprobs_BV.shape[-1] - 1)
