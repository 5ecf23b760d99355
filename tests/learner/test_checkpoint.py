"""Which checkpoint is resumed from: the newest whole one, whatever lies beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpod.bucket.memory import MemoryBucket
from grpod.learner.checkpoint import newest_whole
from grpod.run.lineage import Lineage
from grpod.wire import keys
from grpod.wire.adapter import file_ref
from grpod.wire.checkpoint import Checkpoint, Trainer
from grpod.wire.tables import End, encode_ledger
from tests.run.helpers import claim

RUN = "run1"


async def write(bucket: MemoryBucket, step: int, spoil: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
    trainer = Trainer(step=step, version=0, pos=0)
    files = {keys.ADAPTER_WEIGHTS: b"weights", keys.OPTIMIZER: b"moments", keys.TRAINER: trainer.encode()}
    segment = keys.ledger(1, step)
    manifest = Checkpoint(
        run_id=RUN,
        step=step,
        epoch=1,
        version=0,
        version_epoch=1,
        pos=0,
        base_fingerprint="f",
        files={name: file_ref(data) for name, data in files.items()},
        ledger=[segment],
        created_at=0.0,
    )
    await bucket.put({segment: encode_ledger([End(group_id=f"g/{step}", end="trained", step=step)])})
    await bucket.put({keys.checkpoint(step, 1, name): data for name, data in files.items()})
    fields = json.loads(manifest.encode())
    spoil(fields)
    await bucket.put({keys.checkpoint(step, 1, keys.MANIFEST): json.dumps(fields).encode()})


@pytest.mark.anyio
@pytest.mark.parametrize(
    "spoil",
    [
        lambda fields: fields.update(files={}),
        lambda fields: fields["files"].pop(keys.TRAINER),
        lambda fields: fields["files"].update({"../../run.json": {"size": 1, "sha256": "a"}}),
        lambda fields: fields["files"].update({"a//b\n": {"size": 1, "sha256": "a"}}),
        lambda fields: fields.update(ledger=["../../x"]),
        lambda fields: fields.update(ledger=[keys.ledger(1, 99)]),
    ],
)
async def test_a_manifest_that_names_what_cannot_be_is_passed_over(spoil: Callable[[Any], None], tmp_path: Path) -> None:
    bucket = MemoryBucket("memory://checkpoints")
    await write(bucket, 1)
    await write(bucket, 2, spoil)
    found = await newest_whole(bucket, Lineage((claim(1),)), RUN, tmp_path)
    assert found is not None
    assert (found.manifest.step, [end.group_id for end in found.ends]) == (1, ["g/1"])


@pytest.mark.anyio
async def test_a_ledger_segment_of_another_kind_makes_its_checkpoint_unusable(tmp_path: Path) -> None:
    bucket = MemoryBucket("memory://checkpoints-ledger")
    await write(bucket, 1)
    await write(bucket, 2)
    await bucket.delete([keys.ledger(1, 2)])
    await bucket.put({keys.ledger(1, 2): (await bucket.get(keys.checkpoint(1, 1, keys.TRAINER))).data})  # type: ignore[union-attr]
    found = await newest_whole(bucket, Lineage((claim(1),)), RUN, tmp_path)
    assert found is not None
    assert found.manifest.step == 1
