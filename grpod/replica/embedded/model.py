"""One forward pass of the base model over a batch, with caches that later passes append to.

A row's tokens lie in one run of columns, never with a hole: padding is right of it in a first pass, left of it afterwards
(`Rows.select` moves the run to the right edge). So distances between columns are distances between positions, and every
mask of transformers, sliding windows too, is right; rotary positions are given.

Shapes: B rows, T new tokens, L columns of the cache, H key heads, D head size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache, DynamicLayer

from grpod.replica.embedded.lora import LoraLinears
from grpod.run.base_model import eos_ids

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TINY = 8_000_000  # parameters up to which threads cost more than they bring


class GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers has few types
    """Keys and values as [B, room, H, D], of which the first `used` columns count; written in place."""

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None, used: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.buffers = None if keys is None or values is None else (keys, values)
        self.used = used
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        new = [states.transpose(1, 2) for states in (key_states, value_states)]
        begin, end = self.used, self.used + new[0].shape[1]
        if self.buffers is None or self.buffers[0].shape[1] < end:
            self.buffers = self._grown(new, end)
        for buffer, states in zip(self.buffers, new, strict=True):
            buffer[:, begin:end] = states
        self.used = end
        keys, values = (buffer[:, :end].transpose(1, 2) for buffer in self.buffers)
        return keys, values

    def get_seq_length(self, *args: Any) -> int:
        return self.used

    def _grown(self, new: Sequence[Tensor], end: int) -> tuple[Tensor, Tensor]:
        room = end if self.buffers is None else end + max(32, end // 4)
        grown = [states.new_empty(states.shape[0], room, *states.shape[2:]) for states in new]
        if self.buffers is not None:
            for target, source in zip(grown, self.buffers, strict=True):
                target[:, : self.used] = source[:, : self.used]
        return grown[0], grown[1]


class Rows:
    """The cache of a batch's rows and how many tokens each has."""

    def __init__(self, layers: list[GrowingLayer], lengths_B: Tensor, starts_B: Tensor) -> None:
        self.layers = layers
        self.lengths_B = lengths_B
        self.starts_B = starts_B  # first column of each row's run

    @property
    def used(self) -> int:
        return self.layers[0].used

    @staticmethod
    def select(parts: Sequence[tuple[Rows, Sequence[int]]], order: Sequence[int], room: int) -> Rows:
        """Chosen rows of several caches (repeats allowed), concatenated, put in `order`, moved to the right edge."""
        device = parts[0][0].lengths_B.device
        order_B = torch.tensor(order, device=device)
        place_B = order_B.argsort()  # where each concatenated row goes
        chosen = [torch.tensor(rows, device=device) for _, rows in parts]
        lengths_B = torch.cat([part.lengths_B[index] for (part, _), index in zip(parts, chosen, strict=True)])
        width = int(lengths_B.max())
        columns_L = torch.arange(width, device=device)
        layers = []
        for at in range(len(parts[0][0].layers)):
            buffers: list[Tensor] = []
            for half in range(2):
                target: Tensor | None = None
                begin = 0
                for (part, _), rows_b in zip(parts, chosen, strict=True):
                    both = part.layers[at].buffers
                    assert both is not None
                    source = both[half]
                    if target is None:
                        target = source.new_empty(len(order), width + room, *source.shape[2:])
                    offset_b = part.starts_B[rows_b] + part.lengths_B[rows_b] - width
                    index_bL = (offset_b[:, None] + columns_L).clamp(min=0)  # left of the run: anything, it is masked
                    target[place_B[begin : begin + len(rows_b)], :width] = source[rows_b[:, None], index_bL]
                    begin += len(rows_b)
                assert target is not None
                buffers.append(target)
            layers.append(GrowingLayer(buffers[0], buffers[1], used=width))
        lengths_B = lengths_B[order_B]
        return Rows(layers, lengths_B, width - lengths_B)


class Model:
    def __init__(self, folder: Path, *, dtype: str, device: str) -> None:
        load: Any = AutoModelForCausalLM.from_pretrained
        self.net: Any = load(folder, dtype=DTYPES.get(dtype, dtype), local_files_only=True, attn_implementation="sdpa")
        self.net.to(torch.device(device)).eval().requires_grad_(False)
        self.device = torch.device(device)
        self.dtype = str(self.net.dtype).removeprefix("torch.")
        text = self.net.config.get_text_config()
        self.num_layers: int = text.num_hidden_layers
        self.num_parameters: int = self.net.num_parameters()
        self.vocab_size: int = self.net.get_input_embeddings().num_embeddings
        self.last_position: int = getattr(text, "max_position_embeddings", 1 << 30) - 1
        self.end_ids = frozenset(eos_ids(folder))
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        self.token_bytes: int = 2 * self.num_layers * heads * head_dim * self.net.dtype.itemsize  # of the cache
        self.loras = LoraLinears(self.net)
        # renamed in transformers 5.2x; the old word warns there
        self._cache_word = "cache" if "cache" in inspect.signature(type(self.net).forward).parameters else "past_key_values"

    def new_rows(self, lengths: Sequence[int]) -> Rows:
        lengths_B = torch.tensor(lengths, device=self.device)
        return Rows([GrowingLayer() for _ in range(self.num_layers)], lengths_B, torch.zeros_like(lengths_B))

    def forward(self, ids_BT: Tensor, positions_BT: Tensor, mask_BL: Tensor, rows: Rows, keep_K: Tensor | int) -> Tensor:
        """Appends T tokens to every row; logits (float32) at the columns `keep_K` of the T: [B, K, V]; 0 keeps all."""
        output = self.net(
            input_ids=ids_BT,
            position_ids=positions_BT,
            attention_mask=mask_BL,
            use_cache=True,
            logits_to_keep=keep_K,
            **{self._cache_word: Cache(layers=[*rows.layers])},
        )
        logits: Tensor = output.logits.float()
        return logits
