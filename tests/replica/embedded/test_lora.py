"""What cannot be served is refused whole, with the reason, and touches nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpod.replica.embedded.lora import BadAdapter, NoAdapter
from grpod.replica.embedded.model import Model
from tests.replica.embedded.made import make_adapter

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture(scope="module")
def model(tiny_base: Path) -> Model:
    return Model(tiny_base, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def good(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tiny_base, tmp_path_factory.mktemp("good") / "adapter", seed=1, targets=("q_proj", "down_proj"))


def config(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / CONFIG).write_text(json.dumps({**json.loads((folder / CONFIG).read_bytes()), **changes}))


def tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], object]:
    return lambda folder: save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)


def renamed(old: str, new: str) -> Callable[[Path], object]:
    return tensors(lambda all_: {name.replace(old, new): tensor for name, tensor in all_.items()})


def cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100])


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (cut, WEIGHTS),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), WEIGHTS),
    "config is no JSON": (lambda folder: (folder / CONFIG).write_text("{"), CONFIG),
    "rank too high": (config(r=16), "LoRA rank 16 is greater than max_lora_rank 8"),
    "tensors of a higher rank than told": (
        tensors(lambda all_: {name: torch.cat([t] * 4, dim=0 if "lora_A" in name else 1) for name, t in all_.items()}),
        "has rank 16, max_lora_rank is 8",
    ),
    "not LoRA": (config(peft_type="IA3"), "not of a LoRA adapter"),
    "DoRA": (config(use_dora=True), "use_dora"),
    "trained biases": (config(bias="all"), "bias 'all'"),
    "whole modules": (config(modules_to_save=["lm_head"]), "modules_to_save"),
    "names of another layout": (renamed("model.layers", "model.language_model.layers"), "fits no module"),
    "no such layer": (renamed("layers.1", "layers.7"), "fits no module"),
    "on the output head": (renamed("model.layers.1.self_attn.q_proj", "lm_head"), "fits no module"),
    "another base": (tensors(lambda all_: {name: t.repeat(1, 2) for name, t in all_.items()}), "the base needs"),
    "half an adapter": (tensors(lambda all_: {name: t for name, t in all_.items() if "lora_A" in name}), "lora_A only"),
    "no tensor": (tensors(lambda all_: {}), "holds no tensor"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_spoilt_adapter_is_refused_with_its_reason(model: Model, good: Path, tmp_path: Path, what: str):
    spoil, message = SPOILT[what]
    shutil.copytree(good, tmp_path / "adapter")
    spoil(tmp_path / "adapter")
    with pytest.raises(BadAdapter, match=message):
        model.loras.load("v1", str(tmp_path / "adapter"), max_rank=8)


def test_nothing_at_the_path_is_told_apart(model: Model, good: Path, tmp_path: Path):
    for path in (tmp_path / "missing", tmp_path, good / CONFIG):
        with pytest.raises(NoAdapter, match=f"No adapter found for {path}"):
            model.loras.load("v1", str(path), max_rank=8)


def test_a_good_adapter_is_read_and_patterns_are_unknown_as_in_vllm(model: Model, good: Path, tmp_path: Path):
    plain = model.loras.load("v1", str(good), max_rank=8)
    assert sorted(plain.weights) == sorted(
        f"model.layers.{layer}.{module}" for layer in range(2) for module in ("self_attn.q_proj", "mlp.down_proj")
    )
    shutil.copytree(good, tmp_path / "adapter")
    config(alpha_pattern={"q_proj": 64})(tmp_path / "adapter")
    patterned = model.loras.load("v2", str(tmp_path / "adapter"), max_rank=8)
    for name, pair in plain.weights.items():
        assert all(torch.equal(a, b) for a, b in zip(pair, patterned.weights[name], strict=True))
