"""The report at the end of a run, made from a bucket that was written by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from grpod.bucket.base import Bucket
from grpod.bucket.file import FileBucket
from grpod.bucket.memory import MemoryBucket
from grpod.config import Config
from grpod.run.report import before_and_after, report
from grpod.wire import keys
from grpod.wire.rollout import Group, Rollout, Sampling, Shipment, encode_shipment
from grpod.wire.run import Final
from grpod.wire.tables import Metric, encode_metrics


def group(n: int, version: int, says: dict[str, int], *, prompt: str = "1+2=", right: str = "3", row: int = 0) -> Group:
    """`says`: text -> how often. Ids are the characters' codes: the tiny tokenizer is not needed to choose."""
    rollouts = tuple(
        Rollout(
            completion_ids=tuple(map(ord, text)),
            generator_logprobs=(-1.0,) * len(text),
            loss_mask=(1,) * len(text),
            reward=float(text == right),
            finish_reason="stop",
            seed=0,
        )
        for text, times in says.items()
        for _ in range(times)
    )
    return Group(
        run_id="r",
        group_id=f"g/{n}",
        group_size=len(rollouts),
        prompt_id="p",
        data_epoch=0,
        prompt_row=row,
        prompt_ids=tuple(map(ord, prompt)),
        policy_version=version,
        policy_epoch=1,
        adapter_sha256="0",
        sampling=Sampling(temperature=1.0),
        generator="g",
        created_at=0.0,
        rollouts=rollouts,
    )


async def write_run(bucket: Bucket, *, ended: bool = True) -> None:
    def metrics(values: dict[int, float]) -> bytes:
        return encode_metrics([Metric(time=0.0, step=s, name="reward", value=v) for s, v in values.items()])

    shipments = [group(0, 0, {"9": 3, "3": 1}), group(1, 7, {"3": 4})]
    items = {
        keys.metrics("learner-e2", 0): metrics({1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}),
        keys.metrics("g", 0): metrics({1: 0.77}),
        keys.metrics("learner-e2", 1): b"torn",
        **{keys.rollout("g", i): encode_shipment(Shipment(base_fingerprint="f", groups=(g,))) for i, g in enumerate(shipments)},
        keys.rollout("g", 2): b"torn",
    }
    if ended:
        final = Final(
            run_id="r", epoch=2, step=4, version=9, base_fingerprint="f", files={}, ledger=[], reason="steps", created_at=0.0
        )
        items[keys.FINAL_MANIFEST] = final.encode()
    await bucket.put(items)


@pytest.mark.anyio
async def test_a_run_in_a_folder_is_told_with_a_picture_and_a_pandas_line(tmp_path: Path, tiny_base: Path) -> None:
    bucket = FileBucket(tmp_path / "run")
    await write_run(bucket)
    before = {meta.key async for meta in bucket.list("")}
    text = await report(bucket, Config.model_validate({"model": {"base": str(tiny_base)}}), tmp_path)
    assert "ended (steps): 4 steps, policy version 9" in text
    assert f"final adapter  {tmp_path}/run/final\n" in text
    assert "0.25 in the first 5 steps, 0.25 in the last 5" in text
    (line,) = [line for line in text.splitlines() if "pandas" in line]
    assert "(3 of 4, mean reward 0.25)" in text
    assert "(4 of 4, mean reward 1.00)" in text
    assert text.index("version 0 ") < text.index("version 7 ")
    assert (tmp_path / "run-reward.png").read_bytes().startswith(b"\x89PNG")
    assert {meta.key async for meta in bucket.list("")} == before  # the run's own folder is only read
    await bucket.delete([keys.rollout("g", 2)])  # the torn one: pandas reads a folder whole or not at all
    shown = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout  # noqa: ASYNC221
    assert "policy_version" in shown


@pytest.mark.anyio
async def test_without_matplotlib_tokenizer_or_end_the_rest_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    bucket = FileBucket(tmp_path / "run")
    await write_run(bucket, ended=False)
    text = await report(bucket, Config.model_validate({"model": {"base": "./gone"}}), tmp_path)
    assert text.startswith("the run has not ended")
    assert "pip install matplotlib" in text
    assert "no tokenizer" in text
    assert "0.25 in the first" in text


@pytest.mark.anyio
async def test_an_empty_run_is_told() -> None:
    text = await report(MemoryBucket("memory://report-empty"), Config(), Path())
    assert "no step was trained" in text


def test_prompts_asked_furthest_apart_come_first_and_once_asked_ones_are_left_out() -> None:
    groups = [
        group(0, 2, {"a": 1, "b": 2}, prompt="late"),
        group(1, 9, {"3": 3}, prompt="late"),
        group(2, 0, {"a": 3}, prompt="early", row=1),
        group(3, 4, {"b": 3}, prompt="early", row=1),
        group(4, 8, {"3": 2, "c": 1}, prompt="early", row=1),
        group(5, 0, {"a": 3}, prompt="once"),
        group(6, 5, {"a": 3}, prompt="same"),
        group(7, 5, {"b": 3}, prompt="same"),
    ]
    pairs = before_and_after(groups)
    assert ["".join(map(chr, pair.prompt_ids)) for pair in pairs] == ["early", "late"]
    assert (pairs[0].before.version, pairs[0].after.version, pairs[0].after.times) == (0, 8, 2)
    assert pairs[1].before.ids == (ord("b"),)
    assert len(before_and_after(groups, count=1)) == 1
