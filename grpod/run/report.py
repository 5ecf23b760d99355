"""What a run leaves behind, told in a few lines when it has ended.

    metrics/   ─▶ reward by step ─▶ first and last, reward.png (matplotlib, where it is installed)
    rollouts/  ─▶ the first and the newest objects ─▶ three prompts, answered by the first version and by one of the last
    final/     ─▶ where the adapter is

It only reads the bucket, so it can be made at any time. Pictures are drawn for `file://` buckets, beside the run's folder.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio.to_thread

from grpod.bucket.base import Bucket, ObjectMeta
from grpod.config import Config
from grpod.errors import GrpodError
from grpod.run.base_model import resolve_base
from grpod.run.claims import read_claims
from grpod.run.curve import learner_curves
from grpod.run.lineage import Lineage
from grpod.run.reading import read, read_each
from grpod.wire import keys
from grpod.wire.rollout import Group, decode_shipment
from grpod.wire.run import Final

_REWARD = "reward"
_EDGE = 12  # objects of each generator that are read, at either end
_MEAN = 5  # steps
_SHOWN = 60  # characters of a text


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a group said most often."""

    version: int
    ids: tuple[int, ...]
    times: int
    of: int
    reward: float  # mean of the group


@dataclass(frozen=True, kw_only=True)
class Pair:
    prompt_ids: tuple[int, ...]
    before: Said
    after: Said


async def report(bucket: Bucket, config: Config, folder: Path) -> str:
    """`folder`: of the config file. Objects that cannot be read leave gaps; a manifest that cannot raises `WireError`."""
    lines = [*await _end(bucket)]
    lineage = Lineage(await read_claims(bucket))
    curve = list((await learner_curves(bucket, frozenset((_REWARD,)), lineage))[_REWARD].items())
    lines += _rewards(curve)
    local = Path(bucket.url.removeprefix("file://")) if bucket.url.startswith("file://") else None
    if local is not None and curve:
        lines.append(await anyio.to_thread.run_sync(draw, curve, local.with_name(f"{local.name}-reward.png")))
    where = f"{local if local else bucket.url}/{keys.ROLLOUTS}"
    lines.append(f"  rollouts       {where}")
    if local is not None:
        columns = json.dumps(["prompt_row", "policy_version", "reward", "finish_reason", "completion_ids"])
        read = f"pandas.read_parquet({json.dumps(where)}, columns={columns})"
        lines.append(f"                 {sys.executable} -c 'import pandas; print({read})'")
    pairs = before_and_after(await _edge_groups(bucket))
    if pairs:
        try:
            base = await anyio.to_thread.run_sync(resolve_base, config, folder)
            tokenizer = await anyio.to_thread.run_sync(_tokenizer, base)
        except (GrpodError, OSError, ValueError) as error:
            lines.append(f"  before, after  (no tokenizer: {error})")
        else:
            lines += _shown(pairs, tokenizer)
    return "\n".join(lines)


def before_and_after(groups: Iterable[Group], count: int = 3) -> list[Pair]:
    """Prompts that were asked under two versions, furthest apart first."""
    by_prompt: dict[tuple[int, ...], list[Group]] = {}
    for group in groups:
        by_prompt.setdefault(group.prompt_ids, []).append(group)
    pairs = []
    for prompt_ids, asked in by_prompt.items():
        first, last = (choose(asked, key=lambda g: (g.policy_epoch, g.policy_version)) for choose in (min, max))
        if first.policy_version != last.policy_version:
            pairs.append((first, last, Pair(prompt_ids=prompt_ids, before=_said(first), after=_said(last))))
    pairs.sort(key=lambda found: (found[0].policy_version, -found[1].policy_version, found[0].prompt_row))
    return [pair for _, _, pair in pairs[:count]]


def draw(curve: Sequence[tuple[int, float]], path: Path) -> str:
    """Writes a PNG and returns the report's line about it."""
    try:
        from matplotlib.figure import Figure  # not pyplot: that has global state, and looks for a screen
    except ImportError:
        return "  reward curve   (no picture: pip install matplotlib)"
    steps, values = zip(*curve, strict=True)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, values, color="0.75", linewidth=1, label="each step")
    axes.plot(steps, _smooth(values), color="tab:blue", linewidth=2, label=f"mean of {_MEAN} steps")
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward of all rollouts")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120, format="png")
    return f"  reward curve   {path}"


def _smooth(values: Sequence[float]) -> list[float]:
    windows = (values[max(0, i + 1 - _MEAN) : i + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _said(group: Group) -> Said:
    counts = Counter(rollout.completion_ids for rollout in group.rollouts)
    ids, times = counts.most_common(1)[0]
    reward = sum(rollout.reward for rollout in group.rollouts) / group.group_size
    return Said(version=group.policy_version, ids=ids, times=times, of=group.group_size, reward=reward)


async def _end(bucket: Bucket) -> list[str]:
    """The first lines: how the run has ended, and the adapter."""
    final = await read(bucket, Final, keys.FINAL_MANIFEST)
    if final is None:
        return ["the run has not ended: the same command goes on from its last checkpoint"]
    return [
        f"the run has ended ({final.reason}): {final.step} steps, policy version {final.version}",
        f"  final adapter  {bucket.url.removeprefix('file://')}/{keys.FINAL}",
    ]


def _rewards(curve: Sequence[tuple[int, float]]) -> list[str]:
    values = [value for _, value in curve]
    if not values:
        return ["  reward         (no step was trained)"]
    first, last = (sum(part) / len(part) for part in (values[:_MEAN], values[-_MEAN:]))
    return [f"  reward         {first:.2f} in the first {_MEAN} steps, {last:.2f} in the last {_MEAN}"]


async def _edge_groups(bucket: Bucket) -> list[Group]:
    objects: dict[str, list[ObjectMeta]] = {}
    async for meta in bucket.list(keys.ROLLOUTS):
        if (parsed := keys.parse_rollout(meta.key)) is not None:
            objects.setdefault(parsed[0], []).append(meta)
    wanted = {meta.key: meta for metas in objects.values() for meta in (*metas[:_EDGE], *metas[-_EDGE:])}
    shipments, _ = await read_each(bucket, list(wanted.values()), decode_shipment)
    return [group for shipment in shipments.values() for group in shipment.groups]


def _tokenizer(base: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(base), local_files_only=True)


def _shown(pairs: Sequence[Pair], tokenizer: Any) -> list[str]:
    def text(ids: Sequence[int]) -> str:
        plain = " ".join(tokenizer.decode(list(ids), skip_special_tokens=True).split())
        return plain if len(plain) <= _SHOWN else "…" + plain[-_SHOWN:]

    lines = ["  before, after  (what a group said most often)"]
    for pair in pairs:
        lines.append(f"    {text(pair.prompt_ids)}")
        for said in (pair.before, pair.after):
            counted = f"{said.times} of {said.of}, mean reward {said.reward:.2f}"
            lines.append(f"      version {said.version:<4} {json.dumps(text(said.ids), ensure_ascii=False)}  ({counted})")
    return lines
