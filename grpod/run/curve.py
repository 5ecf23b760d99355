"""The learner's curves, from the segments that each of its epochs has written.

Of a step that two epochs have done, the later one's value counts; steps that a resume has taken back do not.
"""

from __future__ import annotations

from collections.abc import Mapping

from grpod.bucket.base import Bucket, ObjectMeta
from grpod.run.lineage import Lineage
from grpod.run.reading import read_each
from grpod.wire import keys
from grpod.wire.tables import Metric, decode_metrics

Curve = Mapping[int, float]  # step -> value, in order


async def learner_curves(
    bucket: Bucket, names: frozenset[str], lineage: Lineage, *, edge: int | None = None
) -> dict[str, dict[int, float]]:
    """`edge`: of each epoch only so many of the first and of the last segments; None: all. A torn segment leaves a gap."""
    segments: dict[int, list[ObjectMeta]] = {}
    async for meta in bucket.list(keys.METRICS):
        if (epoch := epoch_of(meta.key)) is not None:
            segments.setdefault(epoch, []).append(meta)
    wanted = [meta for metas in segments.values() for meta in _edges(metas, edge)]
    decoded, _ = await read_each(bucket, wanted, decode_metrics)
    found: dict[str, dict[int, tuple[int, float]]] = {name: {} for name in names}
    for key, rows in decoded.items():
        epoch = epoch_of(key)
        assert epoch is not None
        for row in rows:
            if row.name in names and not lineage.undone(row.step, epoch):
                _keep(found[row.name], epoch, row)
    return {name: {step: value for step, (_, value) in sorted(values.items())} for name, values in found.items()}


def epoch_of(key: str) -> int | None:
    """Of a segment of the learner's; None: it is somebody else's."""
    parsed = keys.parse_metrics(key)
    who, _, epoch = parsed[0].rpartition("-e") if parsed else ("", "", "")
    return int(epoch) if who == "learner" and epoch.isdecimal() else None


def _keep(values: dict[int, tuple[int, float]], epoch: int, row: Metric) -> None:
    if row.step not in values or epoch >= values[row.step][0]:
        values[row.step] = (epoch, row.value)


def _edges(metas: list[ObjectMeta], edge: int | None) -> list[ObjectMeta]:
    return metas if edge is None or len(metas) <= 2 * edge else [*metas[:edge], *metas[-edge:]]
