"""Adapters and jobs for the embedded replica's tests, and the plain forward pass that it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpod.replica.embedded.batch import Batch
from grpod.replica.embedded.jobs import Job, seeded
from grpod.replica.embedded.lora import Lora
from grpod.replica.embedded.model import Model
from grpod.replica.embedded.sampling import Sampling

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ALL = Sampling(temperature=1.0, top_p=1.0, top_k=0)


def make_adapter(base: Path, folder: Path, *, seed: int, rank: int = 4, targets: Sequence[str] = TARGETS, **more: Any) -> Path:
    """By PEFT itself, with a large effect."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    net = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(targets), init_lora_weights=False, **more)
    peft = get_peft_model(net, config)
    with torch.no_grad():
        for name, weight in peft.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.3)
    peft.save_pretrained(folder)
    return folder


def plain_logprobs(base: Path, adapter: Path | None, token_ids: Sequence[int]) -> Tensor:
    """[T, V] log-probs at temperature 1 of one sequence alone, without cache or padding."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        net = PeftModel.from_pretrained(net, adapter)
    with torch.no_grad():
        logits: Tensor = net.eval()(torch.tensor([list(token_ids)])).logits[0]
    return logits.log_softmax(-1)


def job(
    prompt_ids: Sequence[int], *, lora: Lora | None = None, n: int = 1, seed: int = 0, max_tokens: int = 6, **more: Any
) -> Job:
    options: dict[str, Any] = {"sampling": ALL, "end_ids": frozenset(), "score": False, **more}
    return Job(prompt_ids=prompt_ids, choices=seeded(n, seed), max_tokens=max_tokens, lora=lora, notify=lambda: None, **options)


@torch.inference_mode()
def run(model: Model, *joining: Sequence[Job], between: int = 2) -> None:
    """Each tuple of jobs joins `between` steps after the one before; then until all have ended."""
    torch.set_num_threads(1)
    batch = Batch(model)
    for jobs in joining:
        batch.admit(jobs)
        for _ in range(between):
            batch.step()
    while batch.num_live:
        batch.step()
