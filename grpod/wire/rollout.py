"""rollouts/<generator>/<seq>.parquet: whole groups, one row a rollout, readable by pandas, DuckDB and the Hub's viewer.

    encode_shipment(Shipment) -> bytes          what a generator ships
    decode_shipment(bytes)    -> Shipment       what the learner reads; a broken group stands in `bad`, the others are good
    decode_ids(bytes)         -> ids, drops     what an audit counts

An object that cannot be read at all raises `WireError`; its reason names the quarantine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from grpod.errors import WireError
from grpod.wire.tables import read_parquet, write_parquet


@dataclass(frozen=True, kw_only=True)
class Rollout:
    completion_ids: tuple[int, ...]
    generator_logprobs: tuple[float, ...]  # processed (after temperature, top_p, top_k); 0.0 where masked
    loss_mask: tuple[int, ...]  # 1: trained on
    reward: float
    rewards: Mapping[str, float | None] = field(default_factory=dict)  # per function, unweighted; None: did not apply
    finish_reason: str  # "stop" | "length"
    seed: int
    extra: str = "{}"  # JSON text, free for users

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    temperature: float
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    max_new_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Group:
    run_id: str
    group_id: str  # "<generator>/<n>"
    group_size: int
    prompt_id: str
    data_epoch: int
    prompt_row: int
    prompt_ids: tuple[int, ...]
    policy_version: int
    policy_epoch: int
    adapter_sha256: str
    sampling: Sampling
    generator: str
    created_at: float  # seconds since 1970, when the group was begun
    timing: Mapping[str, float] = field(default_factory=dict)  # seconds: generate_s, score_s
    rollouts: tuple[Rollout, ...]  # in order of group_index


@dataclass(frozen=True, kw_only=True)
class Drop:
    """A group that the generator itself ended."""

    group_id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Shipment:
    base_fingerprint: str
    groups: tuple[Group, ...]
    drops: tuple[Drop, ...] = ()
    bad: tuple[Drop, ...] = ()  # only from decode: groups of the object that cannot be used


TIMING = ("generate_s", "score_s")
_SCHEMA = pa.schema(
    [
        ("run_id", pa.string()),
        ("group_id", pa.string()),
        ("group_index", pa.int32()),
        ("group_size", pa.int32()),
        ("prompt_id", pa.string()),
        ("data_epoch", pa.int32()),
        ("prompt_row", pa.int64()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),
        ("generator_logprobs", pa.list_(pa.float32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("reward", pa.float32()),
        ("finish_reason", pa.string()),
        ("policy_version", pa.int64()),
        ("policy_epoch", pa.int64()),
        ("adapter_sha256", pa.string()),
        (
            "sampling",
            pa.struct(
                [("temperature", pa.float64()), ("top_p", pa.float64()), ("top_k", pa.int64()), ("max_new_tokens", pa.int64())]
            ),
        ),
        ("seed", pa.int64()),
        ("generator", pa.string()),
        ("created_at", pa.float64()),
        ("timing", pa.struct([(name, pa.float64()) for name in TIMING])),
        ("extra", pa.string()),
    ]
)
_NEEDED = tuple(
    name
    for name in _SCHEMA.names
    if name not in ("extra", "timing", "seed", "sampling", "data_epoch", "prompt_row", "prompt_id")
)
_GROUP = ("run_id", "group_size", "prompt_ids", "policy_version", "policy_epoch", "adapter_sha256")


def encode_shipment(shipment: Shipment) -> bytes:
    names = sorted({name for group in shipment.groups for rollout in group.rollouts for name in rollout.rewards})
    schema = _SCHEMA.insert(12, pa.field("rewards", pa.struct([(name, pa.float32()) for name in names or ["reward"]])))
    rows = [_row(group, index, rollout) for group in shipment.groups for index, rollout in enumerate(group.rollouts)]
    table = pa.Table.from_pylist(rows, schema=schema)
    drops = json.dumps([vars(drop) for drop in shipment.drops])
    return write_parquet(table, {"base_fingerprint": shipment.base_fingerprint, "drops": drops})


def _row(group: Group, index: int, rollout: Rollout) -> dict[str, Any]:
    row = {**vars(group), **vars(rollout), "group_index": index, "sampling": vars(group.sampling), "timing": dict(group.timing)}
    row["rewards"] = dict(rollout.rewards)
    del row["rollouts"]
    return row


def decode_shipment(data: bytes, what: str) -> Shipment:
    """Raises `WireError`: empty, truncated, format, malformed (a column is missing or of a type that cannot be cast)."""
    table = read_parquet(data, what)
    missing = [name for name in _NEEDED if name not in table.column_names]
    if missing:
        raise WireError("malformed", f"{what}: column {missing[0]!r} is missing")
    metadata = {k.decode(): v.decode("utf-8", "replace") for k, v in table.schema.metadata.items()}
    known = [name for name in _SCHEMA.names if name in table.column_names]
    try:
        for name in known:
            if not pa.types.is_struct(table.schema.field(name).type):
                table = table.set_column(table.column_names.index(name), name, table[name].cast(_SCHEMA.field(name).type))
        drops = _drops(table)
    except (pa.ArrowException, ValueError, TypeError, KeyError) as error:
        raise WireError("malformed", f"{what}: {error}") from error
    rows = table.select([*known, *(n for n in ("rewards",) if n in table.column_names)]).to_pylist()
    by_group: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_group.setdefault(str(row["group_id"]), []).append(row)
    groups: list[Group] = []
    bad: list[Drop] = []
    for group_id, members in by_group.items():
        fault = _fault(members)
        if fault:
            bad.append(Drop(group_id=group_id, reason=fault))
        else:
            groups.append(_group(members))
    return Shipment(base_fingerprint=metadata.get("base_fingerprint", ""), groups=tuple(groups), drops=drops, bad=tuple(bad))


def decode_ids(data: bytes, what: str) -> tuple[set[str], tuple[Drop, ...]]:
    """Only which groups stand in it, sound or not, and which ones its generator ended: cheap. Raises as `decode_shipment`."""
    table = read_parquet(data, what, columns=["group_id"])
    if "group_id" not in table.column_names:
        raise WireError("malformed", f"{what}: column 'group_id' is missing")
    try:
        drops = _drops(table)
    except (ValueError, TypeError, KeyError) as error:
        raise WireError("malformed", f"{what}: {error}") from error
    return {str(value) for value in table["group_id"].unique().to_pylist()}, drops


def _drops(table: pa.Table) -> tuple[Drop, ...]:
    text = (table.schema.metadata or {}).get(b"drops", b"[]").decode("utf-8", "replace")
    return tuple(Drop(group_id=str(d["group_id"]), reason=str(d["reason"])) for d in json.loads(text))


def _fault(rows: list[dict[str, Any]]) -> str | None:
    """Why this group cannot be trained on, in one word; None: it is sound."""
    first = rows[0]
    if any(row[name] is None for row in rows for name in _NEEDED):
        return "null"
    if any(row[name] != first[name] for row in rows for name in _GROUP):
        return "inconsistent"
    if sorted(row["group_index"] for row in rows) != list(range(first["group_size"])):
        return "incomplete"
    for row in rows:
        length = len(row["completion_ids"])
        if not length or not row["prompt_ids"]:
            return "no_tokens"
        if len(row["generator_logprobs"]) != length or len(row["loss_mask"]) != length:
            return "length_mismatch"
        if not all(value is not None and math.isfinite(value) for value in row["generator_logprobs"]):
            return "logprobs_not_finite"
        if any(value > 1e-3 for value in row["generator_logprobs"]):
            return "logprobs_positive"
        if not math.isfinite(row["reward"]):
            return "reward_not_finite"
        if any(i is None or i < 0 for i in (*row["completion_ids"], *row["prompt_ids"])) or any(
            m not in (0, 1) for m in row["loss_mask"]
        ):
            return "malformed"
    return None


def _group(rows: list[dict[str, Any]]) -> Group:
    rows = sorted(rows, key=lambda row: row["group_index"])
    first = rows[0]
    sampling = {k: v for k, v in (first.get("sampling") or {}).items() if v is not None and k in Sampling.__dataclass_fields__}
    return Group(
        **{
            name: first[name]
            for name in ("run_id", "group_id", "group_size", "policy_version", "policy_epoch", "adapter_sha256")
        },
        prompt_id=first.get("prompt_id") or "",
        data_epoch=first.get("data_epoch") or 0,
        prompt_row=-1 if first.get("prompt_row") is None else first["prompt_row"],
        prompt_ids=tuple(first["prompt_ids"]),
        sampling=Sampling(**{"temperature": 1.0, **sampling}),
        generator=first["generator"],
        created_at=first["created_at"],
        timing={k: v for k, v in (first.get("timing") or {}).items() if v is not None},
        rollouts=tuple(
            Rollout(
                completion_ids=tuple(row["completion_ids"]),
                generator_logprobs=tuple(row["generator_logprobs"]),
                loss_mask=tuple(row["loss_mask"]),
                reward=row["reward"],
                rewards=row.get("rewards") or {},
                finish_reason=row["finish_reason"],
                seed=row.get("seed") or 0,
                extra=row.get("extra") or "{}",
            )
            for row in rows
        ),
    )
