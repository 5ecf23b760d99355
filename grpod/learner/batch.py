"""A step's rollouts as tensors: rows of token ids, and for every completion token the place whose hidden state predicts it.

    row        p0 p1 p2 a0 a1 b0 b1 b2 --        positions  0 1 2 3 4 3 4 5       predicts  p2→a0 a0→a1 p2→b0 b0→b1 b1→b2
    attention  b1 sees p0 p1 p2 b0 b1, never a0 or a1

Shapes: R rows, L padded row length, B rollouts of the micro-batch, T its longest completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpod.config import Config
from grpod.grpo.admission import trained_mask
from grpod.grpo.advantage import advantages
from grpod.grpo.loss import token_weights
from grpod.learner.packing import pack, share_prompt
from grpod.wire.rollout import Group


@dataclass(frozen=True, kw_only=True)
class Credited:
    """A rollout with what the loss needs to know of it."""

    completion_ids: tuple[int, ...]
    generator_logprobs: tuple[float, ...]
    mask: tuple[int, ...]  # 1: trained
    advantage: float
    token_weight: float
    temperature: float


@dataclass(frozen=True, kw_only=True)
class Row:
    prompt_ids: tuple[int, ...]
    rollouts: tuple[Credited, ...]

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + sum(len(rollout.completion_ids) for rollout in self.rollouts)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    input_ids_RL: Tensor
    position_ids_RL: Tensor | None  # None: 0, 1, 2, … in every row
    attention_mask: Tensor | None  # bool R1LL where rows share prompts; int64 RL where they are only padded; None: neither
    row_BT: Tensor  # the place of the hidden state that predicts token t
    column_BT: Tensor
    targets_BT: Tensor
    mask_BT: Tensor  # bool
    generator_logprobs_BT: Tensor
    advantages_B: Tensor
    token_weights_B: Tensor
    temperatures_B: Tensor
    num_tokens: int  # without the padding


def credit(groups: Sequence[Group], config: Config) -> list[Row]:
    """One row a group, of the rollouts that have a token to train; the others still count in their group's mean."""
    section = config.learner.loss
    masks = [trained_mask(r, mask_truncated=section.mask_truncated) for group in groups for r in group.rollouts]
    limit = config.generator.sampling.max_new_tokens
    weights = token_weights(section.kind, [sum(mask) for mask in masks], length_limit=limit)
    rows: list[Row] = []
    index = 0
    for group in groups:
        values = advantages([rollout.reward for rollout in group.rollouts], scale=section.advantage_scale)
        credited = []
        for rollout, value in zip(group.rollouts, values, strict=True):
            if any(masks[index]):
                credited.append(
                    Credited(
                        completion_ids=rollout.completion_ids,
                        generator_logprobs=rollout.generator_logprobs,
                        mask=masks[index],
                        advantage=value,
                        token_weight=weights[index],
                        temperature=group.sampling.temperature,
                    )
                )
            index += 1
        if credited:
            rows.append(Row(prompt_ids=group.prompt_ids, rollouts=tuple(credited)))
    return rows


def micro_batches(
    rows: Sequence[Row], *, token_budget: int, hidden_size: int, share: bool, device: torch.device
) -> list[MicroBatch]:
    """`share` False: every rollout has a row of its own."""
    split: list[Row] = []
    for row in rows:
        lengths = [len(rollout.completion_ids) for rollout in row.rollouts]
        parts = [[i] for i in range(len(lengths))]
        if share:
            parts = share_prompt(len(row.prompt_ids), lengths, token_budget=token_budget, hidden_size=hidden_size)
        split += [Row(prompt_ids=row.prompt_ids, rollouts=tuple(row.rollouts[i] for i in part)) for part in parts]
    batches = pack([row.length for row in split], token_budget)
    return [_tensors([split[i] for i in batch], device) for batch in batches]


def _tensors(rows: Sequence[Row], device: torch.device) -> MicroBatch:
    length = max(row.length for row in rows)
    longest = max(len(rollout.completion_ids) for row in rows for rollout in row.rollouts)
    ids, positions, segments = [], [], []
    placed: list[tuple[int, list[int]]] = []
    for number, row in enumerate(rows):
        start = len(row.prompt_ids)
        ids_L, positions_L, segments_L = list(row.prompt_ids), list(range(start)), [0] * start
        for segment, rollout in enumerate(row.rollouts, 1):
            n = len(rollout.completion_ids)
            placed.append((number, [start - 1, *range(len(ids_L), len(ids_L) + n - 1)]))
            ids_L += rollout.completion_ids
            positions_L += range(start, start + n)
            segments_L += [segment] * n
        padding = length - len(ids_L)
        ids.append(ids_L + [0] * padding)
        positions.append(positions_L + [0] * padding)
        segments.append(segments_L + [-1] * padding)
    rollouts = [rollout for row in rows for rollout in row.rollouts]

    def padded(values: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
        full = [[*value, *[0] * (longest - len(value))] for value in values]
        return torch.tensor(full, dtype=dtype, device=device)

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    shared = len(rollouts) > len(rows)
    return MicroBatch(
        input_ids_RL=torch.tensor(ids, device=device),
        position_ids_RL=torch.tensor(positions, device=device) if shared else None,
        attention_mask=_attention(torch.tensor(segments, device=device), shared=shared),
        row_BT=torch.tensor([[number] for number, _ in placed], device=device).expand(-1, longest),
        column_BT=padded([columns for _, columns in placed], torch.int64),
        targets_BT=padded([rollout.completion_ids for rollout in rollouts], torch.int64),
        mask_BT=padded([rollout.mask for rollout in rollouts], torch.bool),
        generator_logprobs_BT=padded([rollout.generator_logprobs for rollout in rollouts], torch.float32),
        advantages_B=column([rollout.advantage for rollout in rollouts]),
        token_weights_B=column([rollout.token_weight for rollout in rollouts]),
        temperatures_B=column([rollout.temperature for rollout in rollouts]),
        num_tokens=sum(row.length for row in rows),
    )


def _attention(segments_RL: Tensor, *, shared: bool) -> Tensor | None:
    """Segment 0 is the prompt, 1… its completions, -1 padding."""
    if not shared:
        return (segments_RL >= 0).long() if bool((segments_RL < 0).any()) else None
    length = segments_RL.shape[1]
    query, key = segments_RL[:, :, None], segments_RL[:, None, :]
    seen = (key == query) | ((key == 0) & (query > 0))  # padding sees padding: a row that sees nothing would be NaN
    causal = torch.ones(length, length, dtype=torch.bool, device=segments_RL.device).tril()
    return (seen & causal)[:, None]
