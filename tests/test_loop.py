"""The whole loop, by the one command on one machine: real model, real replica, real bucket; a reward that rises."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.integration import runs
from tests.small import make_small_run

STEPS = 80  # after 40 the rise is sometimes hardly more than chance


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Path:
    """The folder of a run that has come to its end; beside it base/ and what was said."""
    folder = tmp_path_factory.mktemp("loop")
    config = make_small_run(folder, tiny_base)
    with (folder / "log").open("wb") as log:
        done = subprocess.run(
            runs.command("--role", "all", "--config", str(config), "--set", f"learner.steps={STEPS}"),
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=110,
        )
    assert done.returncode == 0, (folder / "log").read_text()[-4000:]
    return folder / "run"


def test_the_reward_rises(ended: Path) -> None:
    status = runs.grpod_json("status", "--json", f"file://{ended}")
    assert {"version", "step", "reward", "groups", "generators"} <= status.keys()
    assert {"generated", "trained", "dropped", "pending", "lost"} <= status["groups"].keys()
    assert status["ended"]
    assert (status["step"], status["version"] > 0) == (STEPS, True)
    assert status["reward"]["first"] < 0.32
    assert status["reward"]["last"] > status["reward"]["first"] + 0.1
    assert [generator["ended"] for generator in status["generators"]] == ["run ended"]


def test_the_folder_is_laid_out_as_agreed(ended: Path) -> None:
    found = {path.relative_to(ended).as_posix() for path in ended.rglob("*") if path.is_file()}
    assert sorted(key for key in found if not any(re.fullmatch(pattern, key) for pattern in runs.LAYOUT)) == []
    assert [pattern for pattern in runs.LAYOUT if not any(re.fullmatch(pattern, key) for key in found)] == []
    assert runs.document(ended, "final/manifest.json")["reason"] == "steps"


def test_every_group_ends_once_and_is_trained_under_weights_that_were_published(ended: Path) -> None:
    ledger = runs.ledger(ended)
    shipped, drops = runs.rollouts(ended)
    assert len({row["group_id"] for row in ledger}) == len(ledger)
    trained = {row["group_id"]: row["step"] for row in ledger if row["end"] == "trained"}
    assert Counter(trained.values()) == dict.fromkeys(range(1, STEPS + 1), 4)
    published = {(m["version"], m["epoch"]): m for m in map(_document, ended.glob("adapters/v*/manifest.json"))}
    for group_id, step in trained.items():
        rows = shipped[group_id]
        (version,) = {(row["policy_version"], row["policy_epoch"]) for row in rows}
        (sha256,) = {row["adapter_sha256"] for row in rows}
        assert len(rows) == 8
        assert published[version]["files"]["adapter_model.safetensors"]["sha256"] == sha256
        assert published[version]["step"] < step
    stale = [row for row in ledger if row["reason"] in ("stale", "stale_in_flight", "lost")]
    assert len(stale) <= 0.1 * len(set(shipped) | set(drops))
    assert runs.grpod_json("audit", "--json", f"file://{ended}")["violations"] == []


def test_peft_opens_the_final_adapter_and_it_is_the_newest_version(ended: Path) -> None:
    script = (
        "import sys, torch\n"
        "from peft import PeftModel\n"
        "from transformers import AutoModelForCausalLM\n"
        "base = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "tokens = torch.tensor([[5, 6, 7, 8]])\n"
        "before = base(tokens).logits.detach().clone()\n"
        "after = PeftModel.from_pretrained(base, sys.argv[2])(tokens).logits\n"
        "print((before - after).abs().max().item())\n"
    )
    # in its own process: what peft and transformers warn of is not ours
    arguments = [str(ended.parent / "base"), str(ended / "final")]
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0.01
    final = runs.document(ended, "final/manifest.json")
    (newest,) = ended.glob(f"adapters/v{final['version']:08d}-e*/adapter_model.safetensors")
    assert newest.read_bytes() == (ended / "final/adapter_model.safetensors").read_bytes()


def _document(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found
