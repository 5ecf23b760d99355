"""rollouts/<generator>/<seq>.parquet: whole groups, one row a rollout, readable by pandas, DuckDB and the Hub's viewer.

    encode_shipment(Shipment) -> bytes          what a generator ships
    decode_shipment(bytes)    -> Shipment       what the learner reads; a broken group stands in `bad`, the others are good
    decode_ids(bytes)         -> ids, drops     what an audit counts

An object that cannot be read at all raises `WireError`; its reason names the quarantine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

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
_FINISHED = ("stop", "length")
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
_REWARDS = pa.float32()  # of every field of `rewards`, whatever its name
_LONGEST_NUMBER = 18  # digits of the number in a group id
_TEMPERATURES = (1.1754944e-38, 3.4028234e38)  # positive and normal as float32: the learner divides by it


def encode_shipment(shipment: Shipment, reward_names: Iterable[str] = ()) -> bytes:
    """`reward_names`: of every reward function of the run. All objects then have the same columns, also one of drops alone:
    who reads a whole folder takes the columns of the first object for those of all."""
    found = {name for group in shipment.groups for rollout in group.rollouts for name in rollout.rewards}
    names = sorted(found | set(reward_names))
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
    with _malformed(what):
        missing = [name for name in _NEEDED if name not in table.column_names]
        if missing:
            raise KeyError(f"column {missing[0]!r} is missing")
        drops = _drops(table)
        fingerprint = (table.schema.metadata or {}).get(b"base_fingerprint", b"").decode("utf-8", "replace")
        by_group: dict[str, list[dict[str, Any]]] = {}
        for row in _rows(table):
            by_group.setdefault(_group_id(row["group_id"]), []).append(row)
    groups: list[Group] = []
    bad: list[Drop] = []
    for group_id, members in by_group.items():
        fault = _fault(members)
        if fault:
            bad.append(Drop(group_id=group_id, reason=fault))
        else:
            groups.append(_group(members))
    return Shipment(base_fingerprint=fingerprint, groups=tuple(groups), drops=drops, bad=tuple(bad))


def decode_ids(data: bytes, what: str) -> tuple[set[str], tuple[Drop, ...]]:
    """Only which groups stand in it, sound or not, and which ones its generator ended: cheap. Raises as `decode_shipment`."""
    table = read_parquet(data, what, columns=["group_id"])
    with _malformed(what):
        if "group_id" not in table.column_names:
            raise KeyError("column 'group_id' is missing")
        found = table["group_id"].cast(pa.string()).unique().to_pylist()
        return {_group_id(value) for value in found}, _drops(table)


@contextmanager
def _malformed(what: str) -> Iterator[None]:
    """Whatever an object holds that was never shipped so: a column twice, bytes that are no UTF-8, another type, …"""
    try:
        yield
    except (pa.ArrowException, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise WireError("malformed", f"{what}: {message}") from error


def _drops(table: pa.Table) -> tuple[Drop, ...]:
    text = (table.schema.metadata or {}).get(b"drops", b"[]").decode("utf-8", "replace")
    drops = tuple(Drop(group_id=_group_id(d["group_id"]), reason=str(d["reason"])) for d in json.loads(text))
    for drop in drops:
        drop.reason.encode()  # JSON can spell half of a surrogate pair, which no ledger can hold
    return drops


def _group_id(value: object) -> str:
    text = str(value)
    text.encode()
    if len(text.rpartition("/")[2]) > _LONGEST_NUMBER and text.rpartition("/")[2].isdecimal():
        raise ValueError(f"group id with a number of {len(text.rpartition('/')[2])} digits")
    return text


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    names = [name for name in table.column_names if name in _SCHEMA.names or name == "rewards"]
    columns = {name: _values(table[name], name) for name in names}  # KeyError: it is there twice
    return [{name: values[i] for name, values in columns.items()} for i in range(len(table))]


def _values(column: pa.ChunkedArray, name: str) -> list[Any]:
    """A struct is cast field by field: it may have fewer, or in another order."""
    kind = _REWARDS if name == "rewards" else _SCHEMA.field(name).type
    if kind is not _REWARDS and not pa.types.is_struct(kind):
        return list(column.cast(kind).to_pylist())
    if pa.types.is_null(column.type):
        return [None] * len(column)
    if not pa.types.is_struct(column.type):
        raise TypeError(f"column {name!r} is {column.type}, not a struct")
    there = [field.name for field in column.type]
    if len(set(there)) < len(there):
        raise ValueError(f"column {name!r} has a field twice")
    wanted = dict.fromkeys(there, _REWARDS) if kind is _REWARDS else {field.name: field.type for field in kind}
    parts = {
        field: pc.struct_field(column, [there.index(field)]).cast(wanted[field]).to_pylist()
        for field in wanted
        if field in there
    }
    return [{field: values[i] for field, values in parts.items()} for i in range(len(column))]


def _fault(rows: list[dict[str, Any]]) -> str | None:
    """Why this group cannot be trained on, in one word; None: it is sound."""
    first = rows[0]
    if any(row[name] is None for row in rows for name in _NEEDED):
        return "null"
    if any(row[name] != first[name] for row in rows for name in _GROUP):
        return "inconsistent"
    if len(rows) != first["group_size"] or sorted(row["group_index"] for row in rows) != list(range(len(rows))):
        return "incomplete"
    if not all(_TEMPERATURES[0] <= _temperature(row) <= _TEMPERATURES[1] for row in rows):
        return "temperature"
    if any(_temperature(row) != _temperature(first) for row in rows):
        return "inconsistent"
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
        if row["finish_reason"] not in _FINISHED:
            return "finish_reason"
        if any(i is None or i < 0 for i in (*row["completion_ids"], *row["prompt_ids"])) or any(
            m not in (0, 1) for m in row["loss_mask"]
        ):
            return "malformed"
    return None


def _temperature(row: Mapping[str, Any]) -> float:
    """1 where it is not told."""
    value = (row.get("sampling") or {}).get("temperature")
    return 1.0 if value is None else value


def _group(rows: list[dict[str, Any]]) -> Group:
    rows = sorted(rows, key=lambda row: row["group_index"])
    first = rows[0]
    sampling = {k: v for k, v in (first.get("sampling") or {}).items() if v is not None}
    return Group(
        **{
            name: first[name]
            for name in ("run_id", "group_id", "group_size", "policy_version", "policy_epoch", "adapter_sha256")
        },
        prompt_id=first.get("prompt_id") or "",
        data_epoch=first.get("data_epoch") or 0,
        prompt_row=-1 if first.get("prompt_row") is None else first["prompt_row"],
        prompt_ids=tuple(first["prompt_ids"]),
        sampling=Sampling(**{**sampling, "temperature": _temperature(first)}),
        generator=first["generator"],
        created_at=first["created_at"],
        timing={k: v for k, v in _finite(first.get("timing")).items() if v is not None},
        rollouts=tuple(
            Rollout(
                completion_ids=tuple(row["completion_ids"]),
                generator_logprobs=tuple(row["generator_logprobs"]),
                loss_mask=tuple(row["loss_mask"]),
                reward=row["reward"],
                rewards=_finite(row.get("rewards")),
                finish_reason=row["finish_reason"],
                seed=row.get("seed") or 0,
                extra=row.get("extra") or "{}",
            )
            for row in rows
        ),
    )


def _finite(values: Mapping[str, float | None] | None) -> dict[str, float | None]:
    """For people only: what is no number does not apply."""
    return {k: v if v is not None and math.isfinite(v) else None for k, v in (values or {}).items()}
