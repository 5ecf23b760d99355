"""Whole runs of the examples with `generator.engine=vllm`: the reward rises, and what vLLM says of its tokens is what the
learner says of them under the same version.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.integration import runs
from tests.vllm.logprobs import Agreement, agreement

VLLM = os.environ.get("VLLM_EXECUTABLE", "")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not VLLM, reason="VLLM_EXECUTABLE names no vllm"),
]


def trained(config: Path, tmp_path: Path, *sets: str) -> Path:
    run, log = tmp_path / "run", tmp_path / "all.log"
    served = ["generator.engine=vllm", f"generator.vllm.executable={VLLM}", f"run.bucket=file://{run}"]
    process = runs.start("all", config, [*served, *sets], log)
    with runs.ended([process]):
        runs.wait(process, 600, log)
    assert runs.grpod_json("audit", "--json", f"file://{run}")["violations"] == []
    assert runs.left_over(str(tmp_path)) == []
    return run


def check(found: Agreement, mean: float) -> None:
    print(json.dumps(asdict(found)))
    assert found.mean <= mean, found
    assert abs(found.ratio - 1) <= 0.01, found
    assert found.inside >= 0.99, found


def test_the_quickstart_learns_through_vllm(tmp_path: Path) -> None:
    base = tmp_path / "base"
    run = trained(runs.ROOT / "examples/quickstart/grpod.yaml", tmp_path, f"model.base={base}")
    status = runs.grpod_json("status", "--json", f"file://{run}")
    print(json.dumps({key: status[key] for key in ("reward", "groups")}))
    assert status["reward"]["first"] <= 0.2, status["reward"]
    assert status["reward"]["last"] >= 0.6, status["reward"]
    lost = status["groups"]["lost"] + sum(n for why, n in status["groups"]["dropped"].items() if why.startswith("stale"))
    assert lost <= 0.05 * status["groups"]["generated"], status["groups"]
    check(agreement(run, base), 1e-4)


def test_smollm2_says_the_same_in_vllm_and_in_the_learner(tmp_path: Path, smollm2: Path) -> None:
    config = runs.ROOT / "examples/arithmetic/grpod.yaml"
    run = trained(config, tmp_path, f"model.base={smollm2}", "learner.steps=2", "run.startup_timeout_s=300")
    check(agreement(run, smollm2, versions=2), 1e-3)
