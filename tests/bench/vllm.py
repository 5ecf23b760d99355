"""VLLM_EXECUTABLE=… python -m tests.bench.vllm: recipe A through a real vLLM, and the way of a version to its first answer.

Recipe A is the quickstart with steps of exactly 128 rollouts (`learner.zero_spread: keep`), a publish at every step. Twice:
under training (max_lag 2), where the way is walked beside groups in flight and the learner's next step; and idle (max_lag 0),
where nothing else goes on. Start-up is not counted. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from datetime import datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pyarrow.parquet as pq

from tests.integration import runs

CONFIG = runs.ROOT / "examples/quickstart/grpod.yaml"
PARTS = ("upload", "notice", "fetch", "load", "attest", "answer")


def trained(folder: Path, executable: str, *, steps: int, max_lag: int) -> tuple[Path, list[dict[str, Any]]]:
    """The run's folder, and what was logged, each with its `time`."""
    run = folder / "run"
    sets = [f"run.bucket=file://{run}", f"run.max_lag={max_lag}", f"learner.steps={steps}", "learner.zero_spread=keep"]
    sets += ["generator.engine=vllm", f"generator.vllm.executable={executable}"]
    sets += ["telemetry.log_level=debug", "telemetry.log_format=json"]
    args = ["--role", "all", "--config", str(CONFIG), *(word for value in sets for word in ("--set", value))]
    done = subprocess.run(runs.command(*args), capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    events = [json.loads(line) for line in (done.stdout + done.stderr).splitlines() if line.startswith("{")]
    return run, [{**event, "time": datetime.fromisoformat(event["timestamp"]).timestamp()} for event in events]


def split(run: Path, events: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds from the learner's snapshot to the first whole answer under the version, by part: medians over versions."""
    first: dict[int, float] = {}
    for rows in runs.rollouts(run)[0].values():
        answered, version = rows[0]["created_at"] + rows[0]["timing"]["generate_s"], rows[0]["policy_version"]
        first[version] = min(answered, first.get(version, answered))
    published = {event["version"]: event for event in events if event["event"] == "adapter_published"}
    found: dict[str, list[float]] = {part: [] for part in PARTS}
    for served in (event for event in events if event["event"] == "version_served"):
        version = served["version"]
        if version in published and version in first:
            own = {part: served[f"{part}_s"] for part in ("fetch", "load", "attest")}
            own["upload"] = published[version]["seconds"]
            own["notice"] = served["time"] - sum(own[part] for part in ("fetch", "load", "attest")) - published[version]["time"]
            own["answer"] = first[version] - served["time"]
            for part in PARTS:
                found[part].append(own[part])
    parts = {part: round(median(values), 4) for part, values in found.items()}
    return {**parts, "all": round(sum(parts.values()), 4)}


def figures(run: Path, events: list[dict[str, Any]]) -> dict[str, float]:
    steps = [event["time"] for event in events if event["event"] == "step"]
    wall = steps[-1] - steps[0]
    status = runs.grpod_json("status", "--json", f"file://{run}")
    groups = status["groups"]
    lost = groups["lost"] + sum(n for why, n in groups["dropped"].items() if why.startswith("stale"))
    rows = [row for path in run.glob("metrics/learner-*/*.parquet") for row in pq.read_table(path).to_pylist()]
    values = {name: [row["value"] for row in rows if row["name"] == name] for name in ("publish/blocked_s", "ratio_outside")}
    return {
        "training_s": round(wall, 1),
        "reward_first": round(status["reward"]["first"], 3),
        "reward_last": round(status["reward"]["last"], 3),
        "generated_groups": groups["generated"],
        "stale_and_lost": round(lost / groups["generated"], 4),
        "blocked_by_publishing": round(sum(values["publish/blocked_s"]) / wall, 4),
        "outside_0.9_1.1": round(fmean(values["ratio_outside"]), 4),
        "exit_s": round(events[-1]["time"] - steps[-1], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    args = parser.parse_args()
    executable = os.environ["VLLM_EXECUTABLE"]
    with tempfile.TemporaryDirectory() as training, tempfile.TemporaryDirectory() as quiet:
        run, events = trained(Path(training), executable, steps=args.steps, max_lag=2)
        recipe, under = figures(run, events), split(run, events)
        idle = split(*trained(Path(quiet), executable, steps=min(args.steps, 30), max_lag=0))
    for name, value in recipe.items():
        print(f"{name:<24} {value:>8}")
    print(f"\n{'seconds to first answer':<24} {'idle':>8} {'training':>8}")
    for part in (*PARTS, "all"):
        print(f"{part:<24} {idle[part]:>8} {under[part]:>8}")
    ratio = round(under["all"] / idle["all"], 2)
    print(json.dumps({"bench": "vllm", **recipe, "idle": idle, "training": under, "training_to_idle": ratio}))


if __name__ == "__main__":
    main()
