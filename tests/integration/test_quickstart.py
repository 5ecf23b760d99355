"""The README's command as a user gives it, and the same run as four processes: reward, layout, and every group's end."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.integration import runs

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
CONFIG = runs.ROOT / "examples/quickstart/grpod.yaml"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not made here: the first run makes it, as it does for a user; the next ones find it."""
    return tmp_path_factory.mktemp("quickstart") / "base"


def test_one_command_raises_the_reward(tmp_path: Path, base: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "all.log"
    process = runs.start("all", CONFIG, [f"run.bucket=file://{run}", f"model.base={base}"], log)
    with runs.ended([process]):
        runs.wait(process, 600, log)
    status = runs.grpod_json("status", "--json", f"file://{run}")
    assert status["ended"], status
    assert status["step"] == 80
    assert status["reward"]["first"] <= 0.2, status["reward"]
    assert status["reward"]["last"] >= 0.6, status["reward"]
    check_layout(run)
    check_groups(run, steps=80, groups_per_step=16, group_size=8)
    assert runs.left_over(str(tmp_path)) == []
    said = log.read_text()
    assert str(run / "final") in said, "the report names the final adapter"
    assert "pandas.read_parquet" in said
    assert (tmp_path / "run-reward.png").read_bytes().startswith(b"\x89PNG")

    again = tmp_path / "again.log"
    process = runs.start("learner", CONFIG, [f"run.bucket=file://{run}", f"model.base={base}", "learner.steps=99"], again)
    with runs.ended([process]):
        runs.wait(process, 120, again)
    assert "had ended before: nothing was trained now" in again.read_text()
    assert runs.grpod_json("status", "--json", f"file://{run}")["step"] == 80


@pytest.mark.parametrize(
    ("order", "steps"),
    [(("generator", "proxy", "learner", "generator"), 80), (("proxy", "learner", "generator", "generator"), 20)],
    ids=lambda value: "-".join(role[0] for role in value) if isinstance(value, tuple) else str(value),
)
def test_four_processes_in_any_order(tmp_path: Path, base: Path, order: tuple[str, ...], steps: int) -> None:
    run = tmp_path / "run"
    sets = [f"run.bucket=file://{run}", f"model.base={base}", f"learner.steps={steps}"]
    logs = [tmp_path / f"{place}-{role}.log" for place, role in enumerate(order)]
    processes = [runs.start(role, CONFIG, sets, log) for role, log in zip(order, logs, strict=True)]
    with runs.ended(processes):
        for role, process, log in zip(order, processes, logs, strict=True):
            if role != "proxy":
                runs.wait(process, 600, log)
        proxy = order.index("proxy")
        assert processes[proxy].poll() is None, "alone the proxy serves on"
        runs.terminate(processes[proxy], logs[proxy])
    assert len(list(run.glob("rollouts/*"))) == 2, "both generators took part"
    status = runs.grpod_json("status", "--json", f"file://{run}")
    assert status["step"] == steps
    if steps == 80:
        assert status["reward"]["last"] >= 0.6, status["reward"]
    check_layout(run)
    check_groups(run, steps=steps, groups_per_step=16, group_size=8)
    assert runs.left_over(str(tmp_path)) == []


def check_layout(run: Path) -> None:
    found = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    assert sorted(key for key in found if not any(re.fullmatch(pattern, key) for pattern in runs.LAYOUT)) == []
    unused = [pattern for pattern in runs.LAYOUT if not any(re.fullmatch(pattern, key) for key in found)]
    assert unused == []
    assert not list(run.glob("quarantine/*"))
    final = runs.document(run, "final/manifest.json")
    assert set(final["files"]) == {"adapter_model.safetensors", "adapter_config.json", "README.md"}
    for folder in ("final", *(path.parent.relative_to(run).as_posix() for path in run.glob("adapters/v*/manifest.json"))):
        for name, ref in runs.document(run, f"{folder}/manifest.json")["files"].items():
            data = (run / folder / name).read_bytes()
            assert (len(data), hashlib.sha256(data).hexdigest()) == (ref["size"], ref["sha256"]), f"{folder}/{name}"


def check_groups(run: Path, *, steps: int, groups_per_step: int, group_size: int) -> None:
    """Every group that was begun ends once; what was trained was whole, recent, and under weights that the run published."""
    shipped, own_drops = runs.rollouts(run)
    ends = runs.ledger(run)
    known = runs.begun(run)
    adapters = {}
    for path in run.glob("adapters/v*/manifest.json"):
        manifest = runs.document(run, path.relative_to(run).as_posix())
        adapters[manifest["version"], manifest["epoch"]] = manifest

    assert len({end["group_id"] for end in ends}) == len(ends), "an id stands twice in the ledger"
    assert set(shipped) | set(own_drops) | {end["group_id"] for end in ends} <= known
    trained = {end["group_id"]: end["step"] for end in ends if end["end"] == "trained"}
    dropped = {end["group_id"]: end["reason"] for end in ends if end["end"] == "dropped"}
    assert Counter(trained.values()) == dict.fromkeys(range(1, steps + 1), groups_per_step)
    assert all(dropped.values())
    assert set(own_drops).isdisjoint(trained)

    for group_id, rows in shipped.items():
        first = rows[0]
        assert sorted(row["group_index"] for row in rows) == list(range(group_size)), group_id
        assert {row["adapter_sha256"] for row in rows} == {
            adapters[first["policy_version"], first["policy_epoch"]]["files"]["adapter_model.safetensors"]["sha256"]
        }
        for row in rows:
            assert len(row["completion_ids"]) == len(row["generator_logprobs"]) == len(row["loss_mask"]) > 0
    for group_id, step in trained.items():
        rows = shipped[group_id]
        assert len({row["reward"] for row in rows}) > 1, "a group without a spread was trained on"
        assert adapters[rows[0]["policy_version"], rows[0]["policy_epoch"]]["step"] < step
    for group_id, reason in dropped.items():
        if reason == "zero_spread":
            assert len({row["reward"] for row in shipped[group_id]}) == 1, group_id
    audit = runs.grpod_json("audit", "--json", f"file://{run}")
    assert audit["violations"] == []
    assert audit["groups"]["generated"] == len(known)
    assert audit["groups"]["trained"] == steps * groups_per_step
