"""What a policy writes: an adapter that PEFT loads, a canary, and a state from which it goes on bit for bit."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import peft
import pytest
import safetensors.torch
import torch
import transformers

from grpod.config import Config
from grpod.errors import ConfigError
from grpod.learner.policy import Policy
from grpod.wire.checkpoint import Trainer
from grpod.wire.keys import ADAPTER_CONFIG, ADAPTER_WEIGHTS, OPTIMIZER
from tests.learner.policies import FOUR, Policies, apart, config, family, group, rollout, weights

IDS = [(7 * i + 3) % 500 for i in range(130)]
GROUPS = [group(*FOUR), group(rollout((20, 21), 0.2), rollout((22,), 0.9), prompt=(30, 31, 32))]


@pytest.fixture(scope="module")
def policies(tiny_base: Path) -> Policies:
    return Policies(tiny_base)


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def effect(scores: list[float], base: list[float]) -> float:
    moved = [a - b for a, b in zip(scores, base, strict=True)]
    return math.sqrt(sum(d * d for d in moved) / len(moved))


def peft_scores(base: Path, adapter: Path, ids: list[int]) -> list[float]:
    model = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter
    )
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()  # type: ignore[no-any-return]


def test_peft_loads_what_the_policy_writes(policies: Policies, tiny_base: Path, tmp_path: Path) -> None:
    policy = policies(moved=True)
    folder = write(tmp_path, policy.adapter_files())
    scores = policy.score(IDS, adapter=True)
    assert len(scores) == len(IDS) - 1
    assert scores == pytest.approx(peft_scores(tiny_base, folder, IDS), abs=1e-5)
    assert scores != pytest.approx(policy.score(IDS, adapter=False), abs=1e-2)


def test_the_files_are_plain_peft_and_equal_for_equal_weights(policies: Policies) -> None:
    policy = policies(moved=True)
    files = policy.adapter_files()
    assert files == policy.adapter_files()
    found = json.loads(files[ADAPTER_CONFIG])
    assert (found["peft_type"], found["bias"], found["modules_to_save"]) == ("LORA", "none", None)
    assert not any(found[name] for name in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out"))
    assert (found["r"], found["lora_alpha"], found["base_model_name_or_path"]) == (4, 8, "base")
    assert found["target_modules"] == policy.lora_targets == sorted(policy.lora_targets)
    tensors = safetensors.torch.load(files[ADAPTER_WEIGHTS])
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert policy.num_adapter_bytes == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_version_is_scored_while_training_goes_on(
    tiny_base: Path, monkeypatch: pytest.MonkeyPatch, checkpointing: bool
) -> None:
    if checkpointing:  # as for a model whose activations would not fit
        monkeypatch.setattr("grpod.learner.model._free_bytes", lambda device: 0.0)
    policy, alone = [Policy.load(config(), tiny_base, seed=0) for _ in range(2)]
    assert policy._model.causal.is_gradient_checkpointing is checkpointing
    for one in (policy, alone):
        one.step(GROUPS)
    files, scores = policy.adapter_files(), policy.score(IDS, adapter=True)
    with ThreadPoolExecutor() as pool:
        steps = pool.submit(lambda: [policy.step(GROUPS) for _ in range(5)])
        meanwhile = [policy.score_files(files, IDS)]
        while not steps.done():
            meanwhile.append(policy.score_files(files, IDS))
        assert not any(report.skipped for report in steps.result())
    assert len(meanwhile) > 1
    assert all(one == pytest.approx(scores, abs=1e-6) for one in meanwhile), "its own weights, and not those of the moment"
    assert policy.score(IDS, adapter=True) != pytest.approx(scores, abs=1e-6)
    for _ in range(5):
        alone.step(GROUPS)
    assert apart(weights(alone), weights(policy)) == 0.0, "and training does not notice"
    assert policy.score_files(policy.adapter_files(), IDS) == pytest.approx(policy.score(IDS, adapter=True), abs=1e-6)


def test_an_untrained_adapter_changes_nothing(policies: Policies) -> None:
    policy = policies()
    assert policy.score(IDS, adapter=True) == policy.score(IDS, adapter=False)


def test_the_canary_moves_the_log_probs_and_leaves_the_policy(tmp_path: Path) -> None:
    base = family(tmp_path / "base", "qwen2")
    policy, ids = Policies(base)(moved=True), [i % 64 for i in IDS]
    before, base_scores = weights(policy), policy.score(ids, adapter=False)
    files = policy.canary_files(ids)
    assert apart(before, weights(policy)) == 0.0
    assert effect(peft_scores(base, write(tmp_path, files), ids), base_scores) >= 1.0
    assert files == policy.canary_files(ids)


def test_a_model_that_hardly_can_be_moved_has_the_canary_that_moves_it_most(
    policies: Policies, tiny_base: Path, tmp_path: Path
) -> None:
    policy = policies()
    scores = peft_scores(tiny_base, write(tmp_path, policy.canary_files(IDS)), IDS)
    assert effect(scores, policy.score(IDS, adapter=False)) > 0.1


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_restored_policy_goes_on_bit_for_bit(tiny_base: Path, tmp_path: Path, dropout: float) -> None:
    raw = config(schedule="cosine", steps=6, warmup_steps=1, weight_decay=0.01).model_dump(by_alias=True)
    raw["lora"]["dropout"] = dropout
    whole = Policy.load(Config.model_validate(raw), tiny_base, seed=5)
    reports = [whole.step(GROUPS).metrics for _ in range(2)]
    snapshot = whole.snapshot()
    kept = {name: bytes(data) for name, data in snapshot.files.items()}
    reports += [whole.step(GROUPS).metrics for _ in range(2)]
    assert dict(snapshot.files) == kept  # training has gone on; what was handed out has not

    folder = write(tmp_path, snapshot.files)
    trainer = Trainer.decode(
        Trainer(step=2, version=2, pos=2, scheduler=snapshot.scheduler, rng=snapshot.rng).encode(), "trainer"
    )
    resumed = Policy.load(Config.model_validate(raw), tiny_base, seed=99)
    resumed.restore({name: folder / name for name in snapshot.files}, trainer)
    again = [resumed.step(GROUPS).metrics for _ in range(2)]
    assert apart(weights(whole), weights(resumed)) == 0.0
    assert resumed.snapshot().optimizer == whole.snapshot().optimizer
    for name in ("loss", "grad_norm", "learning_rate", "entropy"):
        assert [m[name] for m in again] == [m[name] for m in reports[2:]]


def test_a_snapshot_before_the_first_step_can_be_restored(policies: Policies, tmp_path: Path) -> None:
    policy = policies()
    snapshot = policy.snapshot()
    policy.step(GROUPS)
    trained = weights(policy)
    folder = write(tmp_path, snapshot.files)
    policy.restore(
        {name: folder / name for name in snapshot.files},
        Trainer(step=0, version=0, pos=0, scheduler=snapshot.scheduler, rng=snapshot.rng),
    )
    assert policy.num_steps == 0
    policy.step(GROUPS)
    assert apart(trained, weights(policy)) == 0.0


def test_files_of_another_shape_are_refused_by_name(policies: Policies, tmp_path: Path) -> None:
    policy = policies()
    good = safetensors.torch.load(policy.adapter_files()[ADAPTER_WEIGHTS])
    name = next(iter(good))
    path = tmp_path / ADAPTER_WEIGHTS
    for spoilt, message in (
        ({n: t for n, t in good.items() if n != name}, f"{name} is missing"),
        ({**good, name: good[name][:1].contiguous()}, f"{name} has shape"),
        ({**good, "model.extra": good[name].clone()}, "model.extra has no place"),
    ):
        path.write_bytes(safetensors.torch.save(spoilt))
        with pytest.raises(ConfigError, match=message):
            policy.load_adapter(path)
    path.write_bytes(b"torn")
    with pytest.raises(ConfigError, match="no whole safetensors file"):
        policy.load_adapter(path)
    snapshot = policy.snapshot()
    (tmp_path / ADAPTER_WEIGHTS).write_bytes(snapshot.files[ADAPTER_WEIGHTS])
    (tmp_path / OPTIMIZER).write_bytes(safetensors.torch.save({f"exp_avg.{name}": good[name]}))
    with pytest.raises(ConfigError, match="exp_avg"):
        policy.restore(
            {ADAPTER_WEIGHTS: tmp_path / ADAPTER_WEIGHTS, OPTIMIZER: tmp_path / OPTIMIZER}, Trainer(step=0, version=0, pos=0)
        )
