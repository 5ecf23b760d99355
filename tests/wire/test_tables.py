from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpod.errors import WireError
from grpod.wire.tables import (
    End,
    Metric,
    decode_ledger,
    decode_metrics,
    encode_ledger,
    encode_metrics,
    read_parquet,
    write_parquet,
)
from tests.wire import strategies


@given(st.lists(strategies.ends, max_size=5))
def test_a_ledger_segment_comes_back_as_it_was(ends: list[End]) -> None:
    assert decode_ledger(encode_ledger(ends), "key") == ends


@given(st.lists(strategies.metrics, max_size=5))
def test_a_metrics_segment_comes_back_as_it_was(rows: list[Metric]) -> None:
    assert decode_metrics(encode_metrics(rows), "key") == rows


def test_unknown_columns_are_ignored() -> None:
    table = pa.table({"note": ["x"], "group_id": ["g/0"], "step": [3], "reason": [""], "end": ["trained"]})
    assert decode_ledger(write_parquet(table), "key") == [End(group_id="g/0", end="trained", step=3)]


def test_a_missing_column_is_named() -> None:
    with pytest.raises(WireError, match="some/key: column 'end' is missing") as caught:
        decode_ledger(write_parquet(pa.table({"group_id": ["g/0"]})), "some/key")
    assert caught.value.reason == "malformed"


@pytest.mark.parametrize(
    "change",
    [{"step": ["first"]}, {"step": [None]}, {"group_id": [b"\xff"]}, {"group_id": [["g/0"]]}],
)
def test_a_segment_with_other_values_than_its_own_is_malformed(change: dict[str, list[object]]) -> None:
    table = pa.table({"group_id": ["g/0"], "end": ["trained"], "step": [1], "reason": [""], **change})
    with pytest.raises(WireError, match="some/key") as caught:
        decode_ledger(write_parquet(table), "some/key")
    assert caught.value.reason == "malformed"


@pytest.mark.parametrize("decode", [decode_ledger, decode_metrics])
@pytest.mark.parametrize(
    ("data", "reason"), [(b"", "empty"), (b"PAR1", "truncated"), (write_parquet(pa.table({"a": [1]}))[:-9], "truncated")]
)
def test_what_is_no_segment_has_one_reason(decode: object, data: bytes, reason: str) -> None:
    with pytest.raises(WireError) as caught:
        decode(data, "key")  # type: ignore[operator]
    assert caught.value.reason == reason


@pytest.mark.parametrize("metadata", [{}, {"format": "2.0"}])
def test_a_parquet_file_of_somebody_else_is_refused(metadata: dict[str, str]) -> None:
    out = io.BytesIO()
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata(metadata), out)
    with pytest.raises(WireError) as caught:
        read_parquet(out.getvalue(), "key")
    assert caught.value.reason == "format"


def test_only_the_columns_that_are_asked_for_are_read() -> None:
    data = write_parquet(pa.table({"a": [1], "b": [2]}))
    assert read_parquet(data, "key", columns=["b", "c"]).column_names == ["b"]
