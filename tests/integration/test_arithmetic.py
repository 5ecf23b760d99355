"""A real instruct model learns to answer sums: SmolLM2-135M on two CPU cores, `examples/arithmetic`."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.integration import runs

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]
CONFIG = runs.ROOT / "examples/arithmetic/grpod.yaml"
WITHIN_S = 360 if os.environ.get("CI") else 1000  # CI has its machine to itself; elsewhere others may want the cores, too


def test_smollm2_learns_sums(tmp_path: Path, smollm2: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "all.log"
    begun = time.monotonic()
    process = runs.start("all", CONFIG, [f"run.bucket=file://{run}", f"model.base={smollm2}"], log)
    with runs.ended([process]):
        runs.wait(process, WITHIN_S, log)
    took_s = time.monotonic() - begun
    rewards = reward_by_step(run)
    print(f"{took_s:.0f} s, reward by step: {[round(value, 2) for value in rewards]}")
    assert sum(rewards[:1]) <= 0.5, rewards
    assert sum(rewards[-4:]) / 4 >= 0.8, rewards
    assert runs.grpod_json("audit", "--json", f"file://{run}")["violations"] == []
    assert runs.left_over(str(tmp_path)) == []


def reward_by_step(run: Path) -> list[float]:
    rows = [row for path in sorted(run.glob("metrics/learner-e*/*.parquet")) for row in pq.read_table(path).to_pylist()]
    values = {row["step"]: row["value"] for row in rows if row["name"] == "reward"}
    return [values[step] for step in sorted(values)]
