"""Policies and groups for the tests of the learner's torch side. The model is loaded once: each policy begins anew on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from grpod.config import Config
from grpod.learner.model import Model, load
from grpod.learner.policy import Policy
from grpod.wire.rollout import Group, Rollout, Sampling

PROMPT = (5, 6, 7)
A, B, C, D = (9, 10, 2), (11, 12, 2), (13, 2), (14, 15, 16, 2)


def config(**learner: Any) -> Config:
    """Keywords are of `learner`; `loss` too."""
    return Config.model_validate(
        {
            "model": {"base": "base", "dtype": "float32", "max_model_len": 256},
            "lora": {"rank": 4, "alpha": 8},
            "generator": {"sampling": {"max_new_tokens": 8}},
            "learner": {"learning_rate": 1e-3, "device": "cpu", **learner},
        }
    )


def family(folder: Path, model_type: str) -> Path:
    """A tiny model of large random weights: what is wrong with a mask or a head must show in its log-probs."""
    hf_config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        sliding_window=None if model_type == "mistral" else 4,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32).save_pretrained(folder)
    return folder


class Policies:
    """Makes policies that share one base model; the last one made is the one that may be used."""

    def __init__(self, base: Path) -> None:
        self.model: Model = load(config(), base, seed=0)
        self._fresh = {n: p.detach().clone() for n, p in self.model.peft.named_parameters() if p.requires_grad}

    def __call__(self, *, share: bool = True, moved: bool = False, **learner: Any) -> Policy:
        """`share` False: the plain layout, with the logits that transformers makes. `moved`: B is not zero."""
        for name, parameter in self.model.peft.named_parameters():
            if name in self._fresh:
                parameter.data.copy_(self._fresh[name])
        policy = Policy(config(**learner), replace(self.model, stock=share), "base", 0)
        if moved:
            random = torch.Generator().manual_seed(3)
            for parameter in policy._adapter.values():
                parameter.data += torch.randn(parameter.shape, generator=random) * 0.05
        return policy


def rollout(
    ids: Sequence[int],
    reward: float,
    logprobs: Sequence[float] | None = None,
    mask: Sequence[int] | None = None,
    end: str = "stop",
) -> Rollout:
    return Rollout(
        completion_ids=tuple(ids),
        generator_logprobs=tuple(logprobs or [-1.0] * len(ids)),
        loss_mask=tuple(mask or [1] * len(ids)),
        reward=reward,
        finish_reason=end,
        seed=0,
    )


def group(*rollouts: Rollout, prompt: Sequence[int] = PROMPT, temperature: float = 1.0, sha: str = "") -> Group:
    return Group(
        run_id="run1",
        group_id="g/0",
        group_size=len(rollouts),
        prompt_id="p",
        data_epoch=0,
        prompt_row=0,
        prompt_ids=tuple(prompt),
        policy_version=0,
        policy_epoch=1,
        adapter_sha256=sha,
        sampling=Sampling(temperature=temperature),
        generator="g",
        created_at=0.0,
        rollouts=rollouts,
    )


FOUR = (rollout(A, 1.0), rollout(B, 0.0), rollout(C, 1.0), rollout(D, 0.0))


def plain_logprobs(policy: Policy, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0) -> Tensor:
    """What transformers says of one completion on its own: nothing packed, nothing gathered."""
    logits = policy._model.causal(input_ids=torch.tensor([[*prompt, *completion]]), use_cache=False).logits[0].float()
    places = logits[len(prompt) - 1 : -1] / temperature
    return places.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def on_policy(policy: Policy, found: Group) -> Group:
    """The same group, sampled by this very policy: the importance ratio is 1."""
    with torch.no_grad():
        rollouts = tuple(
            replace(
                r,
                generator_logprobs=tuple(
                    plain_logprobs(policy, found.prompt_ids, r.completion_ids, found.sampling.temperature).tolist()
                ),
            )
            for r in found.rollouts
        )
    return replace(found, rollouts=rollouts)


def gradient(policy: Policy, groups: Sequence[Group]) -> dict[str, Tensor]:
    """Of a whole step, before it is clipped."""
    policy._optimizer.zero_grad(set_to_none=True)
    for batch in policy._micro_batches(groups):
        policy._backward(batch)
    return gradients_of(policy)


def gradient_of(policy: Policy, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    policy._optimizer.zero_grad(set_to_none=True)
    loss().backward()  # type: ignore[no-untyped-call]
    return gradients_of(policy)


def gradients_of(policy: Policy) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in policy._adapter.items()}


def weights(policy: Policy) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in policy._adapter.items()}


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of two sets of tensors."""
    return max(float((one[name] - other[name]).abs().max()) for name in one)
