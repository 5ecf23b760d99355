"""The policy in training: base model, adapter, optimizer, as one object with one owner.

    groups ──credit──▶ rows ──pack──▶ micro-batches ──forward, loss, backward──▶ gradient ──clip──▶ AdamW step

Every method blocks (torch works inside), so it is called from a worker thread; and it is called by the learner alone, one
call at a time (`score_files` beside it): nothing here is locked. What it hands out (bytes, lists of numbers) is copied:
training may go on meanwhile.
"""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from grpod.config import Config
from grpod.errors import GrpodError
from grpod.grpo.loss import COUNTS, policy_loss
from grpod.learner import adapter_file, optimizer
from grpod.learner.batch import MicroBatch, credit, micro_batches
from grpod.learner.forward import completion_logprobs, sequence_logprobs
from grpod.learner.model import Model, adapter_of, load
from grpod.learner.past import Past, ratio_parts
from grpod.learner.report import step_size, summary
from grpod.learner.shadow import Shadow
from grpod.wire.adapter import file_ref
from grpod.wire.checkpoint import Trainer
from grpod.wire.keys import ADAPTER_WEIGHTS, OPTIMIZER
from grpod.wire.rollout import Group

MEASURE_ONE_OF = 32  # groups: how often the importance ratio is taken apart
CANARY_EFFECT = 1.0  # nats rms by which the canary moves log-probs, where the model lets itself be moved so far
CANARY_LEAST = 0.01  # nats rms; one that does less cannot be told from an engine's noise


@dataclass(frozen=True, kw_only=True)
class StepReport:
    metrics: dict[str, float]
    skipped: bool = False  # no optimizer step was made
    reason: str = ""  # why: "nothing_to_train" | "not_finite"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything that a restored policy needs to go on bit for bit, taken at one moment."""

    adapter: Mapping[str, bytes]  # the two files that are also published
    optimizer: bytes
    scheduler: dict[str, Any]
    rng: dict[str, Any]

    @property
    def sha256(self) -> str:
        """By which rollouts name these weights."""
        return file_ref(self.adapter[ADAPTER_WEIGHTS]).sha256

    @property
    def files(self) -> dict[str, bytes]:
        """What a checkpoint's folder holds beside trainer.json."""
        return {ADAPTER_WEIGHTS: self.adapter[ADAPTER_WEIGHTS], OPTIMIZER: self.optimizer}


class Policy:
    def __init__(self, config: Config, model: Model, base: str, seed: int) -> None:
        self.config = config
        self.num_steps = 0  # optimizer steps made
        self._model = model
        self._base = base
        self._seed = seed
        self._adapter = adapter_of(model.peft)
        self._shadow = Shadow(model)
        self._optimizer = optimizer.adamw(self._adapter, config.learner)
        self._past = Past(config.run.max_lag + 2)

    @classmethod
    def load(cls, config: Config, base: Path, seed: int) -> Policy:
        """Untrained: A random by `seed`, B zero. Raises `ConfigError`."""
        hub_id = config.model.base
        local = base.as_posix().endswith(hub_id.lstrip("./")) or Path(hub_id).is_absolute()
        return cls(config, load(config, base, seed), "base" if local else hub_id, seed)

    # --- what others need to know ---

    @property
    def lora_targets(self) -> list[str]:
        return list(self._model.targets)

    @property
    def vocab_size(self) -> int:
        return int(self._model.causal.get_input_embeddings().num_embeddings)

    @property
    def max_positions(self) -> int:
        """Tokens that a prompt and its completion may have together; 0: no limit is known."""
        return int(getattr(self._model.causal.config, "max_position_embeddings", 0) or 0)

    @property
    def num_adapter_bytes(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in self._adapter.values())

    @property
    def resumable_bytes(self) -> int:
        """Adapter and optimizer: AdamW keeps two moments of each weight."""
        return 3 * self.num_adapter_bytes

    def describe(self) -> dict[str, Any]:
        """Fields for one line of the log."""
        model, trained = self._model, sum(parameter.numel() for parameter in self._adapter.values())
        return {
            "device": str(model.device),
            "dtype": str(model.causal.dtype).removeprefix("torch."),
            "family": model.causal.config.model_type,
            "parameters": model.num_parameters,
            "trained_parameters": trained,
            "lora_targets": ",".join(model.targets),
            "prompts_shared": model.stock,
        }

    # --- training ---

    def step(self, groups: Sequence[Group]) -> StepReport:
        """One optimizer step on all of `groups`, or none at all where there is nothing to train or a number is not finite."""
        learner = self.config.learner
        metrics = step_size(groups) | self._ratio_parts(groups)
        begun = time.perf_counter()
        batches = self._micro_batches(groups)
        if not batches:
            return StepReport(metrics=metrics, skipped=True, reason="nothing_to_train")
        self._optimizer.zero_grad(set_to_none=True)
        passes = [self._backward(batch) for batch in batches]
        loss, *counts = torch.stack([sums for sums, _ in passes]).sum(0).tolist()
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._adapter.values(), learner.max_grad_norm))
        done = time.perf_counter()
        rate = optimizer.learning_rate(learner, self.num_steps)
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if finite:
            for parameters in self._optimizer.param_groups:
                parameters["lr"] = rate
            self._optimizer.step()
            self.num_steps += 1
        self._optimizer.zero_grad(set_to_none=True)
        metrics |= summary(dict(zip((*COUNTS, "entropy"), counts, strict=True)), learner.loss)
        metrics |= {
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": rate,
            "batch/microbatches_per_step": len(batches),
            "batch/samples_per_row": sum(len(b.mask_BT) for b in batches) / sum(len(b.input_ids_RL) for b in batches),
            "batch/row_fill_frac": sum(b.num_tokens for b in batches) / sum(b.input_ids_RL.numel() for b in batches),
            "perf/fwd_s": sum(seconds for _, seconds in passes),
            "perf/fwd_bwd_s": done - begun,
            "perf/optimizer_s": time.perf_counter() - done,
        }
        if not finite:  # a metric is a number: what is not is left out, and the reason says so
            metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return StepReport(metrics=metrics, skipped=not finite, reason="" if finite else "not_finite")

    def _micro_batches(self, groups: Sequence[Group]) -> list[MicroBatch]:
        return micro_batches(
            credit(groups, self.config),
            token_budget=self.config.learner.token_budget,
            hidden_size=int(self._model.causal.config.hidden_size),
            share=self._model.stock,
            device=self._model.device,
        )

    def _backward(self, batch: MicroBatch) -> tuple[Tensor, float]:
        """Adds to the gradient. Returns the sums of loss, COUNTS and entropy, and the seconds of the forward pass."""
        begun = time.perf_counter()
        base_BT = None
        if self.config.learner.loss.kl_beta > 0:
            with torch.no_grad(), self._model.peft.disable_adapter():
                base_BT, _ = completion_logprobs(self._model.causal, batch, fused=self._model.stock)
        learner_BT, entropy_BT = completion_logprobs(self._model.causal, batch, fused=self._model.stock)
        result = policy_loss(
            learner_logprobs_BT=learner_BT,
            generator_logprobs_BT=batch.generator_logprobs_BT,
            mask_BT=batch.mask_BT,
            advantages_B=batch.advantages_B,
            token_weights_B=batch.token_weights_B,
            section=self.config.learner.loss,
            base_logprobs_BT=base_BT,
        )
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        seconds = time.perf_counter() - begun
        result.loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it without types
        return torch.cat([result.loss.detach()[None], result.counts_K, entropy_BT.sum()[None]]), seconds

    def _ratio_parts(self, groups: Sequence[Group]) -> dict[str, float]:
        """Of one group, in turn, so seldom that it costs about a percent; nothing where its version is not remembered."""
        turn, rest = divmod(self.num_steps, -(-MEASURE_ONE_OF // len(groups)))
        group = groups[turn % len(groups)]
        weights = self._past.find(group.adapter_sha256)
        batches = self._micro_batches([group]) if rest == 0 and weights else []
        if not batches or not weights:
            return {}
        now_N = self._trained_logprobs(batches)
        kept = {name: parameter.detach().clone() for name, parameter in self._adapter.items()}
        try:
            self._assign(safetensors.torch.load(weights))
            then_N = self._trained_logprobs(batches)
        finally:
            self._assign(kept)
        return ratio_parts(now_N, then_N, [batch.generator_logprobs_BT[batch.mask_BT] for batch in batches])

    @torch.no_grad()
    def _trained_logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        model = self._model
        model.peft.eval()
        try:
            return [completion_logprobs(model.causal, batch, fused=model.stock)[0][batch.mask_BT] for batch in batches]
        finally:
            model.peft.train()

    # --- scoring ---

    @torch.no_grad()
    def score(self, token_ids: Sequence[int], *, adapter: bool) -> list[float]:
        """log p(token_ids[i+1] | token_ids[..i]) at temperature 1, with the adapter or of the base: one value less than ids."""
        model = self._model
        ids_L = torch.tensor(token_ids, device=model.device)
        model.peft.eval()
        try:
            if adapter:
                return sequence_logprobs(model.causal, ids_L, fused=model.stock).tolist()
            with model.peft.disable_adapter():
                return sequence_logprobs(model.causal, ids_L, fused=model.stock).tolist()
        finally:
            model.peft.train()

    def score_files(self, files: Mapping[str, bytes], token_ids: Sequence[int]) -> list[float]:
        """`score` under an adapter that was taken before, from a thread of its own while training goes on."""
        return self._shadow.score(files[ADAPTER_WEIGHTS], token_ids)

    # --- files ---

    def adapter_files(self) -> dict[str, bytes]:
        files = self._encode()
        self._past.note(file_ref(files[ADAPTER_WEIGHTS]).sha256, files[ADAPTER_WEIGHTS])
        return files

    def _encode(self) -> dict[str, bytes]:
        lora = self.config.lora
        return adapter_file.encode(self._adapter, rank=lora.rank, alpha=lora.alpha, targets=self.lora_targets, base=self._base)

    def load_adapter(self, weights: Path) -> None:
        """Begins from other weights of the same shape; the optimizer stays as it is. Raises `ConfigError`."""
        self._assign(adapter_file.decode(weights, self._adapter))

    def canary_files(self, token_ids: Sequence[int]) -> dict[str, bytes]:
        """A random adapter, the same for a seed, doubled until it moves the log-probs of `token_ids` by CANARY_EFFECT rms.

        A model whose logits are all small (a random one) cannot be moved so far: then it is the one that moves it most.
        """
        kept = {name: parameter.detach().clone() for name, parameter in self._adapter.items()}
        random = torch.Generator().manual_seed(self._seed ^ 0xCA9A51)
        drawn = {name: torch.randn(p.shape, generator=random) / math.sqrt(p.shape[-1]) for name, p in kept.items()}
        base = self.score(token_ids, adapter=False)
        best, files = 0.0, dict[str, bytes]()
        try:
            for doublings in range(-8, 24):
                self._assign({n: t * (2.0**doublings if ".lora_B." in n else 1.0) for n, t in drawn.items()})
                moved = [a - b for a, b in zip(self.score(token_ids, adapter=True), base, strict=True)]
                effect = math.sqrt(math.fsum(d * d for d in moved) / len(moved))
                if math.isfinite(effect) and effect > best:
                    best, files = effect, self._encode()
                if best >= CANARY_EFFECT:
                    break
        finally:
            self._assign(kept)
        if best < CANARY_LEAST:
            raise GrpodError("no random adapter moves this model's log-probs: are lora.target_modules in its forward pass?")
        return files

    @torch.no_grad()
    def _assign(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self._adapter.items():
            parameter.copy_(tensors[name])

    # --- resume ---

    def snapshot(self) -> Snapshot:
        rng = {"torch": _text(torch.get_rng_state())}
        if self._model.device.type == "cuda":
            rng["cuda"] = _text(torch.cuda.get_rng_state(self._model.device))
        return Snapshot(
            adapter=self.adapter_files(),
            optimizer=optimizer.encode(self._optimizer, self._adapter),
            scheduler={"num_steps": self.num_steps},
            rng=rng,
        )

    def restore(self, files: Mapping[str, Path], trainer: Trainer) -> None:
        """`files`: a checkpoint's adapter and optimizer by name. Goes on bit for bit as the snapshot's policy would have."""
        self.load_adapter(files[ADAPTER_WEIGHTS])
        optimizer.decode(files[OPTIMIZER], self._optimizer, self._adapter)
        self.num_steps = int(trainer.scheduler["num_steps"])
        torch.set_rng_state(_tensor(trainer.rng["torch"]))
        if self._model.device.type == "cuda" and "cuda" in trainer.rng:
            torch.cuda.set_rng_state(_tensor(trainer.rng["cuda"]), self._model.device)


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
