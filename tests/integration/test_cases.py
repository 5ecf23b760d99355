"""Data that cannot be asked, rewards that never work or never end, objects that others put there: `grpod` in processes of its
own, judged by exit codes, messages, the bucket, and what is left of it afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.integration import runs
from tests.integration.fleet import Fleet, Grpod, check_groups, check_whole, ends, fleet, waited
from tests.models import make_tiny_base
from tests.small import make_small_run

pytestmark = pytest.mark.integration
ALTERNATE = "def reward(completions, **_):\n    return [float(i % 2) for i, _ in enumerate(completions)]\n"


@pytest.fixture
def on(tmp_path: Path, tiny_base: Path) -> Iterator[Fleet]:
    """Rows, reward and base are files in `tmp_path`, which a test may write anew."""
    config = make_small_run(tmp_path, tiny_base)
    (tmp_path / "reward.py").write_text(ALTERNATE)
    config.write_text(
        config.read_text().replace("reward.py:fours", "reward.py:reward").replace("group_size: 8", "group_size: 4")
    )
    with fleet(tmp_path, config) as found:
        yield found


def rows(folder: Path, prompts: Sequence[Any]) -> None:
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def failure(process: Grpod) -> dict[str, Any]:
    """The one that it ended with, and nothing crashed."""
    assert process.events("crashed") == []
    (found,) = process.events("failed")
    return found


MESSAGES = [{"role": "user", "content": "1+1="}]


@pytest.mark.parametrize(
    ("prompts", "template", "words"),
    [
        (["1+1=", MESSAGES], True, ["row 0", "row 1", "a text", "a list of messages"]),
        ([MESSAGES], False, ["chat_template", "'prompt'"]),
        (["", None, "7 " * 400], True, ["prompt_empty 1", "prompt_null 1", "prompt_too_long 1"]),
    ],
    ids=["two kinds", "no template", "none can be asked"],
)
def test_data_that_cannot_be_asked_ends_with_2_before_anything_is_begun(
    on: Fleet, tmp_path: Path, prompts: list[Any], template: bool, words: list[str]
) -> None:
    rows(tmp_path, prompts)
    if not template:
        make_tiny_base(tmp_path / "base", chat_template=False)
        (tmp_path / "base" / "chat_template.jinja").unlink(missing_ok=True)
    process = on.start("all")
    assert process.end() == 2
    message = failure(process)["message"]
    assert all(word in message for word in words), message
    assert process.events("policy_loaded") == []
    assert not (on.run / "run.json").exists(), "with the fault mended, the same bucket will do"


def test_a_reward_that_needs_what_is_no_column_ends_with_2_and_names_both(on: Fleet, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def reward(completions, no_such_column, **_):\n    return [1.0] * 4\n")
    process = on.start("all")
    assert process.end() == 2
    message = failure(process)["message"]
    assert "reward.py:reward" in message
    assert "'no_such_column'" in message


def test_a_reward_that_always_raises_ends_every_process_of_the_run(on: Fleet, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def reward(completions, **_):\n    raise ValueError('bad row')\n")
    learner, generator = on.start("learner"), on.start("generator")
    assert generator.end() == 75
    assert learner.end() == 75
    for process in (learner, generator):
        message = failure(process)["message"]
        assert "reward_error in all of the first 16 groups" in message
        assert "ValueError: bad row" in message
    assert len(generator.events("reward_failed")) == 1
    _, drops = runs.rollouts(on.run)
    assert set(drops.values()) <= {"reward_error", "interrupted"}
    found = check_groups(on.run)
    assert {row["reason"] for row in found.values()} <= {"reward_error", "interrupted"}
    assert found, "and the ledger has it"
    check_whole(on.run)


HANGS = """
import collections, itertools, signal, time


def reward(prompts, completions, **_):
    if "HANG 0" in prompts[0]:
        while True:
            pass
    if "HANG 1" in prompts[0]:
        collections.deque(itertools.repeat(0), maxlen=0)
    if "HANG 2" in prompts[0]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(10**6)
    while "HANG 3" in prompts[0]:
        try:
            time.sleep(3600)
        except BaseException:
            pass
    return [float(i % 2) for i, _ in enumerate(completions)]
"""


def hang(on: Fleet, tmp_path: Path, timeout_s: float) -> tuple[str, ...]:
    """One sound row after each that hangs; 2 workers."""
    (tmp_path / "reward.py").write_text(HANGS)
    rows(tmp_path, [text for n in range(4) for text in (f"HANG {n}", f"good {n}")])
    rewards = f'[{{"function": "reward.py:reward", "timeout_s": {timeout_s}}}]'
    return (
        "generator.reward_workers=2",
        f"rewards={rewards}",
        "data.order=epoch",
        "run.max_lag=0",
        "learner.groups_per_step=1",
    )


def test_scoring_that_hangs_costs_its_group_and_its_worker_and_nothing_else(on: Fleet, tmp_path: Path) -> None:
    process = on.start("all", sets=(*hang(on, tmp_path, 2.0), "learner.steps=8"))
    assert process.end() == 0
    found = check_groups(on.run)
    assert sum(row["end"] == "trained" for row in found.values()) == 8
    groups, drops = runs.rollouts(on.run)
    assert set(drops.values()) == {"reward_timeout"}
    assert len(drops) >= 7, "two data epochs, but for what the last step did not wait for"
    assert {row["reward"] for members in groups.values() for row in members} == {0.0, 1.0}
    assert len(process.events("reward_failed")) == 1
    check_whole(on.run)


def test_sigterm_while_scoring_hangs_is_exit_0_within_the_grace_period(on: Fleet, tmp_path: Path) -> None:
    process = on.start("all", sets=(*hang(on, tmp_path, 3600.0), "run.grace_s=10"))
    waited(lambda: sum(on.begun().values()) >= 1, "a group in scoring", failure=on.tails)
    process.until("ready")
    process.terminate()
    _, drops = runs.rollouts(on.run)
    assert set(drops.values()) <= {"interrupted"}
    check_whole(on.run)


def test_objects_that_others_put_there_are_used_or_put_aside_by_a_learner_alone(on: Fleet) -> None:
    """The same folder twice: a restart looks at none of it again."""
    learner = on.start("learner", sets=("learner.groups_per_step=1", "run.max_lag=9", "learner.steps=3"))
    manifest = on.run / "adapters/v00000000-e000001/manifest.json"
    waited(manifest.exists, "version 0", failure=on.tails)
    version = json.loads(manifest.read_text())
    found = on.run / "rollouts/found"
    found.mkdir(parents=True)
    write_group(found / "0000000000.parquet", version, "found/0")
    (found / "0000000001.parquet").write_bytes(b"")
    write_group(found / "0000000002.parquet", version, "found/2", logprob=float("nan"))
    write_group(found / "0000000004.parquet", version, "found/4")
    (found / ".DS_Store").write_bytes(b"x")
    waited(lambda: on.state().get("step") == 2, "step 2", failure=on.tails)
    assert sorted(event["reason"] for event in learner.events("quarantined")) == ["empty", "logprobs_not_finite"]
    learner.terminate()

    again = on.start("learner", sets=("learner.groups_per_step=1", "run.max_lag=9", "learner.steps=3"))
    write_group(found / "0000000003.parquet", version, "found/3")  # late
    assert again.end() == 0
    assert again.events("quarantined") == []
    assert {name: row["end"] for name, row in ends(on.run).items()} == {
        "found/0": "trained",
        "found/2": "dropped",
        "found/3": "trained",
        "found/4": "trained",
    }
    assert runs.grpod_json("audit", on.url, "--json")["ok"]


def write_group(path: Path, version: dict[str, Any], group_id: str, *, logprob: float = -1.0) -> None:
    """As anybody may, with pyarrow alone: plain Python types, no struct that grpod knows."""
    import pyarrow as pa

    members = [
        {
            "run_id": version["run_id"],
            "group_id": group_id,
            "group_index": i,
            "group_size": 4,
            "prompt_ids": [5, 6, 7],
            "completion_ids": [9 + i, 2],
            "generator_logprobs": [logprob, -1.0],
            "loss_mask": [1, 1],
            "reward": float(i % 2),
            "finish_reason": "stop",
            "policy_version": version["version"],
            "policy_epoch": version["epoch"],
            "adapter_sha256": version["files"]["adapter_model.safetensors"]["sha256"],
            "generator": "found",
            "created_at": 0.0,
        }
        for i in range(4)
    ]
    metadata = {"format": "1.0", "base_fingerprint": version["base_fingerprint"], "drops": "[]"}
    pq.write_table(pa.Table.from_pylist(members).replace_schema_metadata(metadata), path)
