"""The two small tables beside the rollouts, each a write-once Parquet segment (zstd).

ledger    group_id, end ("trained" | "dropped"), step, reason      every group that ended, once
metrics   time, step, name, value                                  one row a value; names as in telemetry/metrics.py
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from grpod.errors import WireError
from grpod.wire.doc import FORMAT, check_format


@dataclass(frozen=True, kw_only=True)
class End:
    group_id: str
    end: Literal["trained", "dropped"]
    step: int  # the step that trained it, or the number of steps done when it was dropped
    reason: str = ""  # of a drop


@dataclass(frozen=True, kw_only=True)
class Metric:
    time: float  # seconds since 1970
    step: int
    name: str
    value: float


LEDGER_SCHEMA = pa.schema([("group_id", pa.string()), ("end", pa.string()), ("step", pa.int64()), ("reason", pa.string())])
METRICS_SCHEMA = pa.schema([("time", pa.float64()), ("step", pa.int64()), ("name", pa.string()), ("value", pa.float64())])


def encode_ledger(ends: Sequence[End]) -> bytes:
    return write_parquet(pa.Table.from_pylist([vars(e) for e in ends], schema=LEDGER_SCHEMA))


def decode_ledger(data: bytes, what: str) -> list[End]:
    return [End(**row) for row in _read(data, LEDGER_SCHEMA, what)]


def encode_metrics(rows: Sequence[Metric]) -> bytes:
    return write_parquet(pa.Table.from_pylist([vars(r) for r in rows], schema=METRICS_SCHEMA))


def decode_metrics(data: bytes, what: str) -> list[Metric]:
    return [Metric(**row) for row in _read(data, METRICS_SCHEMA, what)]


def write_parquet(table: pa.Table, metadata: dict[str, str] | None = None) -> bytes:
    out = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({"format": FORMAT, **(metadata or {})}), out, compression="zstd")
    return out.getvalue()


def read_parquet(data: bytes, what: str, *, columns: Sequence[str] | None = None) -> pa.Table:
    """`columns`: those of them that there are; None: all. Raises `WireError`: "truncated" (no Parquet at all), "format"."""
    if not data:
        raise WireError("empty", f"{what}: zero bytes")
    try:
        table = pq.ParquetFile(io.BytesIO(data)).read(columns=columns)
    except (pa.ArrowException, OSError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise WireError("truncated", f"{what}: not a whole Parquet file: {first[:200]}") from error
    metadata = table.schema.metadata or {}
    check_format(metadata.get(b"format", b"").decode("utf-8", "replace"), what)
    return table


def _read(data: bytes, schema: pa.Schema, what: str) -> list[dict[str, Any]]:
    table = read_parquet(data, what)
    missing = [name for name in schema.names if name not in table.column_names]
    if missing:
        raise WireError("malformed", f"{what}: column {missing[0]!r} is missing")
    try:
        rows: list[dict[str, Any]] = table.select(schema.names).cast(schema).to_pylist()
    except (pa.ArrowException, ValueError, TypeError, KeyError) as error:  # another type, no UTF-8, a column twice
        raise WireError("malformed", f"{what}: {error}") from error
    if any(value is None for row in rows for value in row.values()):
        raise WireError("malformed", f"{what}: a value is null")
    return rows
