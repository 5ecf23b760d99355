"""A generator's folder as it may be found, read by the whole learner: what is sound is used, what is not is put aside once."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import structlog

from grpod.bucket.file import FileBucket
from grpod.bucket.memory import MemoryBucket
from grpod.run.audit import audit
from grpod.wire import keys
from tests.learner.alone import Learning, learning

pytestmark = pytest.mark.anyio
Table = Callable[[pa.Table], pa.Table]


def spoilt(data: bytes, change: Table) -> bytes:
    table = pq.read_table(io.BytesIO(data))
    changed, out = change(table), io.BytesIO()
    metadata = {**table.schema.metadata, **(changed.schema.metadata or {})}
    pq.write_table(changed.replace_schema_metadata(metadata), out, compression="zstd")
    return out.getvalue()


def extra_column_and_reversed(table: pa.Table) -> pa.Table:
    more = table.append_column("note", pa.array(["x"] * len(table)))
    return more.select(list(reversed(more.column_names)))


def widened(table: pa.Table) -> pa.Table:
    for name, kind in (("prompt_ids", pa.int64()), ("completion_ids", pa.int64()), ("generator_logprobs", pa.float64())):
        table = table.set_column(table.column_names.index(name), name, table[name].cast(pa.list_(kind)))
    return table


def changed(name: str, change: Callable[[list[Any]], list[Any]]) -> Table:
    """Of the first row."""

    def apply(table: pa.Table) -> pa.Table:
        values = table[name].to_pylist()
        column = pa.array([change(values[0]), *values[1:]], type=table.schema.field(name).type)
        return table.set_column(table.column_names.index(name), name, column)

    return apply


SPOILT: dict[int, Callable[[bytes], bytes]] = {
    1: lambda data: b"",
    2: lambda data: data[: len(data) * 6 // 10],
    3: lambda data: spoilt(data, extra_column_and_reversed),
    4: lambda data: spoilt(data, lambda table: table.drop_columns(["generator_logprobs"])),
    5: lambda data: spoilt(data, widened),
    6: lambda data: spoilt(data, lambda table: table.slice(1)),
    8: lambda data: spoilt(data, changed("generator_logprobs", lambda values: [math.nan, *values[1:]])),
    9: lambda data: spoilt(data, lambda table: table.replace_schema_metadata({"format": "999.0"})),
    12: lambda data: spoilt(data, changed("completion_ids", lambda values: [*values, 3])),
}
REASONS = {
    1: "empty",
    2: "truncated",
    4: "malformed",
    6: "incomplete",
    8: "logprobs_not_finite",
    9: "format",
    12: "length_mismatch",
}
USED, LATE = (0, 3, 5, 11, 13), 10


async def fill(run: Learning, folder: Path) -> bytes:
    """Everything but number 10, whose bytes are returned. Group ids name another generator than their folder does."""
    late = b""
    for n in range(14):
        if n == 7:
            data = await run.read(keys.rollout("found", 0))
        else:
            data = await run.ship("found", n, [await run.group(f"found-{n}-g/0")])
        if n == LATE:
            late = data
            await run.bucket.delete([keys.rollout("found", n)])
        elif n in SPOILT:
            await run.bucket.put({keys.rollout("found", n): SPOILT[n](data)})
    await run.bucket.put({keys.rollout("other", 0): await run.read(keys.rollout("found", 0))})
    for name in ("0000000014.parquet.tmp", ".DS_Store"):
        (folder / "rollouts" / "found" / name).write_bytes(b"x")
    return late


async def test_what_is_found_is_used_or_put_aside_once_and_a_restart_looks_at_none_of_it_again(
    tmp_path: Path, tiny_base: Path
) -> None:
    bucket, goal = FileBucket(tmp_path / "run"), {"steps": 6, "run": {"max_lag": 10}}
    async with learning(bucket, tiny_base, **goal) as first:
        await first.manifest()
        first_folder = tmp_path / "run"
        late = await fill(first, first_folder)
        await first.reached(len(USED))  # 11 and 13 did not wait for 10
        first.stop.request("restart")
        assert await first.end() is None
    aside = {keys.rollout("found", n): reason for n, reason in REASONS.items()}
    assert await first.quarantine() == aside

    with structlog.testing.capture_logs() as logs:
        async with learning(bucket, tiny_base, **goal) as again:
            while not any("-e000002/" in key for key in await again.listed("adapters")):
                await bucket.changed(0.2)
            await bucket.put({keys.rollout("found", LATE): late})
            assert await again.end() is None
    assert [line for line in logs if line["event"] in ("quarantined", "groups_seen_before")] == []
    assert await again.quarantine() == aside
    ends = await again.ends()
    assert {group for group, end in ends.items() if end.end == "trained"} == {f"found-{n}-g/0" for n in (*USED, LATE)}
    assert {group for group, end in ends.items() if end.reason == "quarantined"} == {f"found-{n}-g/0" for n in (4, 6, 8, 12)}
    told = {row.name: row.value for row in await again.metrics()}
    assert told["quarantine_total"] == len(REASONS)
    found = await audit(bucket)
    assert found.violations == []
    assert (found.groups.pending, found.duplicates, found.quarantined) == (0, 1, len(REASONS))


async def test_a_copy_under_another_name_is_told_and_not_trained_twice(tiny_base: Path) -> None:
    async with learning(MemoryBucket("memory://copies"), tiny_base, steps=2) as run:
        data = await run.ship("found", 0, [await run.group("found/0")])
        await run.bucket.put({keys.rollout("found", 1): data, keys.rollout("other", 0): data})
        await run.reached(1)
        await run.ship("found", 2, [await run.group("found/1")])
        assert await run.end() is None
        assert len(await run.ends()) == 2
        assert max(row.value for row in await run.metrics() if row.name == "groups/duplicates_total") == 2


async def test_objects_that_nobody_announced_are_found_within_moments(tiny_base: Path) -> None:
    """No generator's state tells of them; a bucket on this machine is listed every second."""
    async with learning(MemoryBucket("memory://moments"), tiny_base, steps=3, run={"max_lag": 4}, timeout_s=30) as run:
        for n in range(3):
            await run.ship("found", n, [await run.group(f"found/{n}")])
            await run.reached(n + 1)
        assert await run.end() is None
        waits = [row.value for row in await run.metrics() if row.name == "perf/rollout_wait_s"]
        assert len(waits) == 3
