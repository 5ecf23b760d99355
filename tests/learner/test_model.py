"""A base model or a LoRA that cannot be used is said in one message, before weights are read where that is possible."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from grpod.bucket.memory import MemoryBucket
from grpod.config import Config, LearnerSection, LoraSection
from grpod.errors import ConfigError
from grpod.learner.model import choose_device, load, resolve_targets
from grpod.learner.optimizer import learning_rate
from grpod.learner.policy import Policy
from tests.learner.alone import learning
from tests.learner.policies import FOUR, Policies, apart, config, gradient, group, weights


def test_a_folder_that_is_no_model(tmp_path: Path, tiny_base: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load(config(), tmp_path, 0)
    shutil.copy(tiny_base / "config.json", tmp_path)
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        load(config(), tmp_path, 0)
    (tmp_path / "model.safetensors").write_bytes((tiny_base / "model.safetensors").read_bytes()[:-1000])
    with pytest.raises(ConfigError, match="weights cannot be loaded"):
        load(config(), tmp_path, 0)
    (tmp_path / "config.json").write_text('{"model_type": "no_such_family"}')
    with pytest.raises(ConfigError, match=r"config\.json cannot be used"):
        load(config(), tmp_path, 0)


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path, tiny_base: Path) -> None:
    shutil.copy(tiny_base / "config.json", tmp_path)
    tensors = safetensors.torch.load_file(tiny_base / "model.safetensors")
    name = next(n for n in tensors if "layers.1.mlp" in n)
    del tensors[name]
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=name):
        load(config(), tmp_path, 0)


def test_all_linear_is_spelt_out(tiny_base: Path) -> None:
    found = resolve_targets(tiny_base, LoraSection())
    assert found == ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    assert resolve_targets(tiny_base, LoraSection(target_modules=["v_proj", "q_proj"])) == ("q_proj", "v_proj")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module", "no_such_module.*did you mean"),
        ("qproj", "qproj.*did you mean q_proj"),
        ("embed_tokens", "embed_tokens.*cannot be served"),
        ("lm_head", "lm_head.*cannot be served"),
    ],
)
def test_a_target_that_cannot_be_trained_or_served(tmp_path: Path, tiny_base: Path, target: str, message: str) -> None:
    shutil.copy(tiny_base / "config.json", tmp_path)  # no weights are there: the message comes before they are asked for
    with pytest.raises(ConfigError, match=message):
        resolve_targets(tmp_path, LoraSection(target_modules=["v_proj", target]))


@pytest.mark.anyio
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "not tied"])
@pytest.mark.parametrize(
    ("target", "words"),
    [("embed_tokens", "cannot be served"), ("lm_head", "cannot be served"), ("qproj", "did you mean q_proj")],
)
async def test_such_a_run_is_not_begun_and_no_weights_are_read(
    tmp_path: Path, tiny_base: Path, target: str, words: str, tied: bool
) -> None:
    base, bucket = tmp_path / "base", MemoryBucket(f"memory://{tmp_path}")
    shutil.copytree(tiny_base, base)
    (base / "model.safetensors").write_bytes(b"no weights")
    raw: dict[str, Any] = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**raw, "tie_word_embeddings": tied}))
    async with learning(bucket, base, lora={"target_modules": [target]}) as run:
        error = await run.end()
    assert isinstance(error, ConfigError)
    assert f"lora.target_modules '{target}'" in str(error)
    assert words in str(error)
    assert await run.listed("") == [], "run.json would keep what cannot be"


def test_dropout_of_the_base_model_is_switched_off(tmp_path: Path, tiny_base: Path) -> None:
    shutil.copytree(tiny_base, tmp_path, dirs_exist_ok=True)
    raw: dict[str, Any] = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "attention_dropout": 0.5}))
    model = load(config(), tmp_path, 0)
    assert model.peft.training
    assert {layer.self_attn.attention_dropout for layer in model.causal.model.layers} == {0.0}


def test_an_adapter_on_a_bfloat16_base_is_trained_in_float32(tiny_base: Path) -> None:
    raw = config().model_dump(by_alias=True)
    raw["model"]["dtype"] = "bfloat16"
    policy = Policy.load(Config.model_validate(raw), tiny_base, 0)
    assert policy.describe()["dtype"] == "bfloat16"
    assert {parameter.dtype for parameter in weights(policy).values()} == {torch.float32}
    assert not policy.step([group(*FOUR)]).skipped


def test_where_memory_is_short_activations_are_computed_twice(tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = gradient(Policies(tiny_base)(moved=True), [group(*FOUR)])
    monkeypatch.setattr("grpod.learner.model._free_bytes", lambda device: 1.0)
    policies = Policies(tiny_base)
    assert any(getattr(module, "gradient_checkpointing", False) for module in policies.model.causal.modules())
    assert apart(gradient(policies(moved=True), [group(*FOUR)]), plain) < 1e-6


def test_devices() -> None:
    assert choose_device("cpu").type == "cpu"
    for name in ("gpu", "cuda:99"):
        with pytest.raises(ConfigError, match=f"learner.device '{name}'"):
            choose_device(name)


def test_the_learning_rate_rises_to_its_peak_and_never_is_zero() -> None:
    def rates(**more: Any) -> list[float]:
        section = LearnerSection(steps=6, learning_rate=1.0, **more)
        return [round(learning_rate(section, step), 4) for step in range(section.steps)]

    assert rates() == [1.0] * 6
    assert rates(warmup_steps=3) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(warmup_steps=1, schedule="linear") == [0.5, 1.0, 0.8, 0.6, 0.4, 0.2]
    assert rates(warmup_steps=1, schedule="cosine") == [0.5, 1.0, 0.9045, 0.6545, 0.3455, 0.0955]
    assert learning_rate(LearnerSection(steps=6, schedule="linear"), 9) == 0.0  # only past the run's end


def test_the_seed_decides_the_untrained_adapter(tiny_base: Path) -> None:
    def first(seed: int) -> list[float]:
        cfg: Config = config()
        named = load(cfg, tiny_base, seed).peft.named_parameters()
        return next(p for n, p in named if "lora_A" in n).detach().flatten().tolist()  # type: ignore[no-any-return]

    assert first(1) == first(1) != first(2)
