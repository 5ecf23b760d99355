"""What a replica is asked for before it may serve a version."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from grpod.bucket.memory import MemoryBucket
from grpod.replica.adapters import Adapters
from grpod.replica.client import ReplicaClient, Unavailable
from grpod.wire.adapter import Probe
from grpod.wire.keys import adapter_name
from grpod.wire.run import Run
from tests.fakes import FakeReplica
from tests.run.made import RUN_ID, MadeRun


class Scores:
    """A replica that answers for every adapter as it does for its base, moved by a tenth."""

    url = "http://replica"

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    async def load_adapter(self, name: str, path: str) -> None: ...

    async def score(self, model: str, token_ids: list[int]) -> list[float]:
        self.asked.append((model, len(token_ids)))
        return scored(model, token_ids)


def scored(model: str, token_ids: Sequence[int]) -> list[float]:
    base = [-float(token) for token in token_ids[1:]]
    return base if model == "base" else [b - 0.1 * (-1) ** i for i, b in enumerate(base)]


def probe(ids: list[int]) -> Probe:
    base = [-float(token) for token in ids[1:]]
    return Probe(token_ids=ids, base_logprobs=base, logprobs=[b - 0.1 * (-1) ** i for i, b in enumerate(base)])


@pytest.mark.anyio
async def test_the_base_is_scored_once_for_each_probe(tmp_path: Path) -> None:
    bucket = MemoryBucket("memory://test-adapters-base")
    made = await MadeRun(bucket).begin()
    for version, ids in enumerate([[1, 2, 3], [1, 2, 3], [4, 5, 6, 7]]):
        await made.adapter(version, probe=probe(ids))
    run, replica = Run(run_id=RUN_ID, config={}, base_fingerprint="f", created_at=0.0), Scores()
    adapters = Adapters(cast(ReplicaClient, cast(Any, replica)), bucket, run, tmp_path)
    for version in range(3):
        await adapters.bring(version, 1)
    assert [asked for asked in replica.asked if asked[0] == "base"] == [("base", 3), ("base", 4)]


@pytest.mark.anyio
async def test_a_name_that_another_one_has_left_there_is_loaded_anew_from_files_of_its_own(tmp_path: Path) -> None:
    """Where the one before had its files, nothing is left: an engine that has to read them again dies of it."""
    bucket = MemoryBucket("memory://test-adapters-left")
    made = await MadeRun(bucket).begin()
    ids = [1, 2, 3]
    await made.adapter(0, probe=probe(ids))
    run = Run(run_id=RUN_ID, config={}, base_fingerprint="f", created_at=0.0)

    async with FakeReplica(score=scored) as replica, ReplicaClient(replica.url) as client:
        name = adapter_name(RUN_ID, 0, 1)
        replica.adapters[name] = "/left/behind"
        await Adapters(client, bucket, run, tmp_path).bring(0, 1)
        assert replica.adapters == {name: str(tmp_path / "v0-e1")}


@pytest.mark.anyio
async def test_a_version_whose_score_never_came_keeps_no_slot(tmp_path: Path) -> None:
    bucket = MemoryBucket("memory://test-adapters-score")
    made = await MadeRun(bucket).begin()
    for version in range(2):
        await made.adapter(version, probe=probe([1, 2, 3]))
    run = Run(run_id=RUN_ID, config={}, base_fingerprint="f", created_at=0.0)

    async with FakeReplica(score=scored) as replica, ReplicaClient(replica.url) as client:
        adapters = Adapters(client, bucket, run, tmp_path)
        replica.spoil("status", (503, "not now"), when=lambda body: body["model"] == adapter_name(RUN_ID, 0, 1))
        with pytest.raises(Unavailable):
            await adapters.bring(0, 1)
        assert list(replica.adapters) == [adapter_name(RUN_ID, 0, 1)]
        await adapters.bring(1, 1)
        assert list(replica.adapters) == [adapter_name(RUN_ID, 1, 1)]
        assert not (tmp_path / "v0-e1").exists()
