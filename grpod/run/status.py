"""How a run is doing, at a glance and from its bucket alone: no process needs to run.

leases/ ─▶ who learns · state/learner.json ─▶ step, version · metrics/ ─▶ reward, lag, backlog
state/generators/ ─▶ who generates, groups begun · the ledger that counts ─▶ how they ended
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group as Lines
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from grpod.bucket.base import Bucket
from grpod.errors import ConfigError
from grpod.run.claims import read_claims
from grpod.run.curve import learner_curves
from grpod.run.join import read_run
from grpod.run.lineage import Lineage
from grpod.run.reading import (
    Checkpoints,
    ledger_that_counts,
    read,
    read_checkpoints,
    read_each,
    read_generators,
    read_ledger,
)
from grpod.run.tally import Groups, Known, tally
from grpod.run.text import ago, counts, to_text
from grpod.wire import keys
from grpod.wire.lease import Beat
from grpod.wire.rollout import decode_ids
from grpod.wire.run import Final, Run
from grpod.wire.state import GeneratorState, LearnerState

MEAN_STEPS = 5  # of the first and the last reward
_EDGE = 64  # metrics segments read at either end of an epoch
_REWARD, _LAG, _BACKLOG = "reward", "lag/mean", "sample/rollout_queue_size"


@dataclass(frozen=True, kw_only=True)
class Generator:
    name: str
    age_s: float  # since its last sign of life, by its own clock and this one
    begun: int
    open: int
    resident: Sequence[str]  # "<version>-<epoch>"
    refused: Sequence[str]
    device: str
    ended: str | None  # why


@dataclass(frozen=True, kw_only=True)
class Status:
    url: str
    run_id: str
    state: str  # waiting (no learner yet), running, stopped (in order), silent (for longer than its lease), ended
    ended: str | None  # why; None: it goes on
    version: int | None  # the newest that counts
    step: int
    steps: int | None  # at which it ends
    epoch: int
    holder: str | None  # of the learner's lease
    updated_s: float | None  # since the learner's last sign of life
    waiting_for: int  # groups that its next step lacks
    reward_first: float | None
    reward_last: float | None
    lag: float | None  # mean of the last step's groups
    backlog: int | None  # groups that waited for a step
    groups: Groups
    generators: Sequence[Generator]

    def as_json(self) -> dict[str, Any]:
        values = {key: value for key, value in vars(self).items() if not key.startswith("reward_")}
        return {
            **values,
            "ended": self.ended is not None,
            "reason": self.ended,
            "reward": {"first": self.reward_first, "last": self.reward_last},
            "groups": self.groups.as_json(),
            "generators": [{**vars(g), "resident": list(g.resident), "refused": list(g.refused)} for g in self.generators],
        }

    def render(self) -> str:
        return to_text(Lines(*_lines(self)))


def render(found: Status) -> str:
    return found.render()


async def status(bucket: Bucket) -> Status:
    """Raises `ConfigError` when there is no run."""
    run = await read_run(bucket)
    if run is None:
        raise ConfigError(f"no run at {bucket.url}: there is no {keys.RUN}")
    now = time.time()
    lineage = Lineage(await read_claims(bucket))
    final = await read(bucket, Final, keys.FINAL_MANIFEST)
    learner = await read(bucket, LearnerState, keys.LEARNER_STATE)
    if learner is not None and learner.epoch < lineage.highest_epoch:
        learner = None  # of a holder that was replaced
    checkpoints = await read_checkpoints(bucket, lineage)
    generators = await read_generators(bucket)
    curves = await learner_curves(bucket, frozenset((_REWARD, _LAG, _BACKLOG)), lineage, edge=_EDGE)
    rewards, backlog = list(curves[_REWARD].values()), _last(curves[_BACKLOG])
    updated_s = max(0.0, now - learner.updated_at) if learner else None
    return Status(
        url=bucket.url,
        run_id=run.run_id,
        state="ended" if final else await _state(bucket, run, lineage, updated_s),
        ended=final.reason if final else None,
        version=final.version if final else await _version(bucket, learner, lineage),
        step=final.step if final else learner.step if learner else _checkpointed(checkpoints),
        steps=learner.steps if learner else None,
        epoch=lineage.highest_epoch,
        holder=str(lineage.holder.holder) if lineage.holder else None,
        updated_s=updated_s,
        waiting_for=learner.waiting_for if learner and not final else 0,
        reward_first=_mean(rewards[:MEAN_STEPS]),
        reward_last=_mean(rewards[-MEAN_STEPS:]),
        lag=_last(curves[_LAG]),
        backlog=None if backlog is None else int(backlog),
        groups=await _groups(bucket, generators, final, checkpoints),
        generators=[_generator(state, now) for state in sorted(generators.values(), key=lambda s: s.started_at)],
    )


async def _state(bucket: Bucket, run: Run, lineage: Lineage, updated_s: float | None) -> str:
    if lineage.holder is None:
        return "waiting"
    beat = await read(bucket, Beat, keys.beat(lineage.highest_epoch))
    if beat is not None and beat.released:
        return "stopped"
    ttl_s = run.config.get("run", {}).get("lease_ttl_s", 30.0)
    return "silent" if updated_s is not None and updated_s > ttl_s else "running"


async def _version(bucket: Bucket, learner: LearnerState | None, lineage: Lineage) -> int | None:
    if learner is not None and learner.version is not None:
        return learner.version
    manifests = [meta.key async for meta in bucket.list(keys.ADAPTERS) if meta.key.endswith(f"/{keys.MANIFEST}")]
    newest = lineage.newest(parsed for key in manifests if (parsed := keys.parse_adapter(key)))
    return newest[0] if newest else None


def _checkpointed(checkpoints: Checkpoints) -> int:
    return checkpoints.newest.step if checkpoints.newest else 0


async def _groups(
    bucket: Bucket, generators: Mapping[str, GeneratorState], final: Final | None, checkpoints: Checkpoints
) -> Groups:
    ends, _ = await read_ledger(bucket, ledger_that_counts(final, checkpoints.newest))
    known = Known(begun={name: state.begun for name, state in generators.items()})
    stateless = [
        meta
        async for meta in bucket.list(keys.ROLLOUTS)
        if (parsed := keys.parse_rollout(meta.key)) and parsed[0] not in generators
    ]
    shipped, _ = await read_each(bucket, stateless, decode_ids)
    for ids, drops in shipped.values():
        known.add(ids)
        known.add(drop.group_id for drop in drops)
    return tally(known, ends, ended=final is not None)


def _generator(state: GeneratorState, now: float) -> Generator:
    return Generator(
        name=state.generator,
        age_s=round(max(0.0, now - state.updated_at), 1),
        begun=state.begun,
        open=len(state.open),
        resident=state.resident,
        refused=state.refused,
        device=state.device,
        ended=state.ended,
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _last(curve: Mapping[int, float]) -> float | None:
    return curve[max(curve)] if curve else None


def _lines(s: Status) -> Iterable[Table | Text]:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    facts.add_row("run", escape(f"{s.run_id}  {s.url}"))
    if s.ended is not None:
        facts.add_row("state", f"[green]ended[/] ({escape(s.ended)})")
    elif s.state == "waiting":
        facts.add_row("state", "[yellow]no learner yet[/]")
    elif s.state == "stopped":
        facts.add_row("state", f"[yellow]stopped[/] at step {s.step}: the same command goes on from there")
    elif s.state == "silent":
        facts.add_row("state", "[red]no learner[/]: it has shown no sign of life for longer than its lease")
    if s.ended is None and s.state != "waiting":
        waits = f", waits for {s.waiting_for} groups" if s.waiting_for and s.state == "running" else ""
        seen = "no sign of life yet" if s.updated_s is None else f"seen {ago(s.updated_s)}"
        facts.add_row("learner", escape(f"{s.holder}, epoch {s.epoch}, {seen}{waits}"))
    facts.add_row("step", f"[bold]{s.step}[/]{'' if s.steps is None else f' of {s.steps}'}")
    facts.add_row("version", "none yet" if s.version is None else str(s.version))
    if s.reward_first is not None:
        facts.add_row(
            "reward", f"[bold]{s.reward_first:.3f} → {s.reward_last:.3f}[/]  means of the first and the last {MEAN_STEPS} steps"
        )
    g = s.groups
    facts.add_row(
        "groups",
        f"{g.generated} generated: {g.trained} trained, dropped {counts(g.dropped)}, {g.lost} lost, {g.pending} pending",
    )
    if s.lag is not None or s.backlog is not None:
        lag = "?" if s.lag is None else f"{s.lag:.1f}"
        facts.add_row("lag", f"{lag} publishes; {s.backlog or 0} groups waited for the last step")
    yield facts
    if not s.generators:
        yield Text("no generator yet", style="dim")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("generator", "device", "begun", "open", "versions", "seen", ""):
        table.add_column(name, justify="right" if name in ("begun", "open") else "left")
    for one in s.generators:
        versions = " ".join(one.resident[-3:])
        note = f"ended: {one.ended}" if one.ended is not None else f"refused {' '.join(one.refused)}" if one.refused else ""
        cells = (one.name, one.device, str(one.begun), str(one.open), versions, ago(one.age_s), note)
        table.add_row(*(escape(cell) for cell in cells), style="dim" if one.ended is not None else "")
    yield table
