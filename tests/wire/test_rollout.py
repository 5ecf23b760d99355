from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from grpod.errors import WireError
from grpod.wire.reasons import REASONS
from grpod.wire.rollout import Drop, Group, Rollout, Shipment, decode_ids, decode_shipment, encode_shipment
from grpod.wire.tables import End, encode_ledger
from tests.wire.examples import GROUP, SHIPMENT
from tests.wire.strategies import shipments


@given(shipments())
@settings(max_examples=25)
def test_a_shipment_comes_back_as_it_was(shipment: Shipment) -> None:
    data = encode_shipment(shipment)
    assert decode_shipment(data, "key") == shipment
    assert decode_ids(data, "key") == ({group.group_id for group in shipment.groups}, shipment.drops)


def test_it_is_a_plain_parquet_file_that_others_can_open() -> None:
    file = pq.ParquetFile(io.BytesIO(encode_shipment(SHIPMENT)))
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"

    def kinds(kind: pa.DataType) -> list[pa.DataType]:
        return [kind, *(inner for n in range(kind.num_fields) for inner in kinds(kind.field(n).type))]

    assert not any(pa.types.is_map(kind) for field in file.schema_arrow for kind in kinds(field.type))
    row = file.read().to_pylist()[1]
    assert (row["group_id"], row["group_index"], row["rewards"]) == ("g1/3", 1, {"format": None, "math": 0.0})
    assert row["completion_ids"] == [11, 12, 2]


def test_a_reward_that_one_group_alone_has_is_null_for_the_others() -> None:
    other = replace(GROUP, group_id="g1/4", rollouts=tuple(replace(r, rewards={"length": 0.5}) for r in GROUP.rollouts))
    decoded = decode_shipment(encode_shipment(Shipment(base_fingerprint="f", groups=(GROUP, other))), "key")
    assert decoded.groups[0].rollouts[0].rewards == {"format": 1.0, "length": None, "math": 1.0}
    assert decoded.groups[1].rollouts[0].rewards == {"format": None, "length": 0.5, "math": None}


def test_a_shipment_of_drops_alone() -> None:
    drops = (Drop(group_id="g1/0", reason="reward_timeout"),)
    decoded = decode_shipment(encode_shipment(Shipment(base_fingerprint="f", groups=(), drops=drops)), "key")
    assert (decoded.groups, decoded.drops, decoded.bad) == ((), drops, ())


# ── objects as found


def rewritten(change: Callable[[pa.Table], pa.Table], shipment: Shipment = SHIPMENT) -> bytes:
    table = pq.read_table(io.BytesIO(encode_shipment(shipment)))
    out = io.BytesIO()
    pq.write_table(change(table).replace_schema_metadata(table.schema.metadata), out)
    return out.getvalue()


def cast(name: str, kind: pa.DataType) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.set_column(table.column_names.index(name), name, table[name].cast(kind))


def shuffled(table: pa.Table) -> pa.Table:
    return table.append_column("note", pa.array(["x"] * len(table))).select(["note", *reversed(table.column_names)])


@pytest.mark.parametrize(
    "change",
    [
        shuffled,
        cast("completion_ids", pa.list_(pa.int64())),
        cast("prompt_ids", pa.large_list(pa.int64())),
        cast("generator_logprobs", pa.list_(pa.float64())),
        cast("loss_mask", pa.list_(pa.int64())),
        cast("reward", pa.float64()),
        cast("group_id", pa.large_string()),
        lambda table: table.take(list(reversed(range(len(table))))),
    ],
)
def test_other_columns_orders_and_wider_types_are_read(change: Callable[[pa.Table], pa.Table]) -> None:
    assert decode_shipment(rewritten(change), "key") == SHIPMENT


@pytest.mark.parametrize("name", ["extra", "timing", "seed", "sampling", "data_epoch", "prompt_row", "prompt_id", "rewards"])
def test_a_column_that_nothing_depends_on_may_be_missing(name: str) -> None:
    decoded = decode_shipment(rewritten(lambda table: table.drop_columns([name])), "key")
    assert [group.group_id for group in decoded.groups] == ["g1/3"]
    assert decoded.groups[0].rollouts[0].completion_ids == GROUP.rollouts[0].completion_ids


@pytest.mark.parametrize("name", ["generator_logprobs", "group_id", "reward", "policy_version", "run_id", "loss_mask"])
def test_a_column_that_is_needed_is_named_when_it_is_missing(name: str) -> None:
    with pytest.raises(WireError, match=f"some/key: column '{name}' is missing") as caught:
        decode_shipment(rewritten(lambda table: table.drop_columns([name])), "some/key")
    assert caught.value.reason == "malformed"


def test_a_column_of_a_type_that_does_not_fit() -> None:
    texts = pa.array([["a"]] * 2, pa.list_(pa.string()))
    data = rewritten(lambda t: t.set_column(t.column_names.index("completion_ids"), "completion_ids", texts))
    with pytest.raises(WireError, match="some/key") as caught:
        decode_shipment(data, "some/key")
    assert caught.value.reason == "malformed"


WHOLE = encode_shipment(SHIPMENT)


def with_metadata(**change: bytes) -> bytes:
    table = pq.read_table(io.BytesIO(WHOLE))
    out = io.BytesIO()
    pq.write_table(
        table.replace_schema_metadata({**table.schema.metadata, **{name.encode(): value for name, value in change.items()}}),
        out,
    )
    return out.getvalue()


@pytest.mark.parametrize("decode", [decode_shipment, decode_ids])
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (WHOLE[: len(WHOLE) * 6 // 10], "truncated"),
        (b"{}", "truncated"),
        (with_metadata(format=b"999.0"), "format"),
    ],
)
def test_an_object_that_cannot_be_read_has_one_reason(decode: Callable[[bytes, str], Any], data: bytes, reason: str) -> None:
    with pytest.raises(WireError, match="some/key: ") as caught:
        decode(data, "some/key")
    assert caught.value.reason == reason


@pytest.mark.parametrize("drops", [b"{", b"[1]", b'[{"group_id": "x"}]', b"7"])
@pytest.mark.parametrize("decode", [decode_shipment, decode_ids])
def test_drops_that_are_none(decode: Callable[[bytes, str], Any], drops: bytes) -> None:
    with pytest.raises(WireError) as caught:
        decode(with_metadata(drops=drops), "key")
    assert caught.value.reason == "malformed"


def first(**change: Any) -> Callable[[Group], Group]:
    return lambda group: replace(group, rollouts=(replace(group.rollouts[0], **change), *group.rollouts[1:]))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda g: replace(g, rollouts=g.rollouts[:1]), "incomplete"),
        (lambda g: replace(g, rollouts=(*g.rollouts, g.rollouts[0])), "incomplete"),
        (lambda g: replace(g, prompt_ids=()), "no_tokens"),
        (lambda g: replace(g, prompt_ids=(-1,)), "malformed"),
        (first(completion_ids=(), generator_logprobs=(), loss_mask=()), "no_tokens"),
        (first(completion_ids=(9, 10, 11, 2)), "length_mismatch"),
        (first(generator_logprobs=(-1.0, -1.0)), "length_mismatch"),
        (first(loss_mask=(1, 1)), "length_mismatch"),
        (first(generator_logprobs=(-1.0, float("nan"), -1.0)), "logprobs_not_finite"),
        (first(generator_logprobs=(-1.0, float("-inf"), -1.0), loss_mask=(1, 0, 1)), "logprobs_not_finite"),
        (first(generator_logprobs=(-1.0, None, -1.0)), "logprobs_not_finite"),
        (first(generator_logprobs=(-1.0, 0.7, -1.0)), "logprobs_positive"),
        (first(reward=float("nan")), "reward_not_finite"),
        (first(reward=float("inf")), "reward_not_finite"),
        (first(finish_reason="abort"), "finish_reason"),
        (first(finish_reason=""), "finish_reason"),
        *(
            (lambda g, t=t: replace(g, sampling=replace(g.sampling, temperature=t)), "temperature")
            for t in (0.0, -1.0, 1e-300, float("nan"), float("inf"))
        ),
        (lambda g: replace(g, group_size=2**31 - 1), "incomplete"),
        (first(loss_mask=(1, 2, 1)), "malformed"),
        (first(completion_ids=(9, None, 2)), "malformed"),
        (first(reward=None), "null"),
        (first(completion_ids=None), "null"),
    ],
)
def test_a_spoilt_group_has_one_reason_and_spoils_no_other(spoil: Callable[[Group], Group], reason: str) -> None:
    good = replace(GROUP, group_id="g1/4")
    decoded = decode_shipment(encode_shipment(Shipment(base_fingerprint="f", groups=(spoil(GROUP), good))), "key")
    assert decoded.bad == (Drop(group_id="g1/3", reason=reason),)
    assert decoded.groups == (good,)


def test_rows_of_one_group_that_contradict_each_other() -> None:
    versions = pa.array([7, 8], pa.int64())
    data = rewritten(lambda t: t.set_column(t.column_names.index("policy_version"), "policy_version", versions))
    assert decode_shipment(data, "key").bad == (Drop(group_id="g1/3", reason="inconsistent"),)


def put(name: str, values: Any) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.set_column(table.column_names.index(name), name, pa.array(values))


@pytest.mark.parametrize(
    "change",
    [
        put("rewards", ["good", "bad"]),
        put("rewards", [{"math": "good"}, {"math": "bad"}]),
        put("sampling", [{"temperature": "hot"}] * 2),
        put("sampling", ["hot"] * 2),
        put("timing", [[1.0]] * 2),
        put("group_id", [["g1/3"]] * 2),
        put("group_id", [b"\xff"] * 2),
        put("group_id", ["g1/" + "9" * 5000] * 2),
        lambda table: table.append_column("reward", table["reward"]),
    ],
)
def test_what_does_not_fit_its_column_makes_the_object_malformed(change: Callable[[pa.Table], pa.Table]) -> None:
    with pytest.raises(WireError, match="some/key") as caught:
        decode_shipment(rewritten(change), "some/key")
    assert caught.value.reason == "malformed"


def test_a_part_of_a_reward_that_is_no_number_does_not_apply() -> None:
    change = put("rewards", [{"math": float("nan"), "format": 1}, {"math": 1e300, "format": None}])
    (group,) = decode_shipment(rewritten(change), "key").groups
    assert [rollout.rewards for rollout in group.rollouts] == [{"math": None, "format": 1.0}, {"math": None, "format": None}]


def test_metadata_of_others_need_not_be_text() -> None:
    table = pq.read_table(io.BytesIO(WHOLE))
    out = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, b"\xff": b"\xfe"}), out)
    assert decode_shipment(out.getvalue(), "key") == SHIPMENT


CELLS: list[Any] = [
    *(None, True, 0, -1, 1, 2**31, 2**63 - 1, 0.5, float("nan"), float("inf"), 1e300, "", "hot", "1", "g1/9", b"\xff"),
    *([], [1], [None], [1, 0, 1], [-0.5, float("nan"), 0.1], ["a"], [[1]], {"temperature": 0.0}, {"temperature": "hot"}),
    *({"math": "1"}, {"math": [1]}, {"math": float("inf")}, {"generate_s": None}),
]
METADATA = st.binary(max_size=6) | st.sampled_from(
    [b'[{"group_id": "\\ud800/1", "reason": "x"}]', b'[{"group_id": "g/1", "reason": "\\udfff"}]', b"[" * 5000, b"1.0", b"{}"]
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    table = pq.read_table(io.BytesIO(WHOLE))
    metadata = dict(table.schema.metadata)
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(table.column_names))
        place = table.column_names.index(name)
        match draw(st.sampled_from(["cells", "one", "null", "twice", "drop", "rows", "metadata"])):
            case "cells":  # a column of another type
                table = table.set_column(place, name, pa.array([draw(st.sampled_from(CELLS))] * len(table)))
            case "one":  # a value that still has its column's type
                values = table[name].to_pylist() or [None]
                try:
                    values[0] = draw(st.sampled_from(CELLS))
                    table = table.set_column(place, name, pa.array(values, table[name].type))
                except (pa.ArrowException, ValueError, TypeError, OverflowError):
                    assume(False)
            case "null":
                values = [draw(st.sampled_from([None, value])) for value in table[name].to_pylist()]
                table = table.set_column(place, name, pa.array(values, table[name].type))
            case "twice":
                table = table.append_column(name, table[name])
                break
            case "drop":
                table = table.drop_columns([name])
            case "rows" if len(table) == 2:
                table = table.take(pa.array(draw(st.lists(st.integers(0, 1), max_size=3)), pa.int64()))
            case "metadata":
                key = draw(st.sampled_from([b"format", b"drops", b"base_fingerprint"]) | st.binary(min_size=1, max_size=4))
                metadata[key] = draw(METADATA)
    out = io.BytesIO()
    try:
        pq.write_table(table.replace_schema_metadata(metadata), out)
    except (pa.ArrowException, ValueError):  # no Parquet file holds it
        assume(False)
    return out.getvalue()


@contextmanager
def found(words: set[tuple[str, str]]) -> Iterator[None]:
    reason = None
    try:
        yield
    except WireError as error:
        reason = error.reason
    assert reason is None or ("object", reason) in words


@given(mutated())
@settings(max_examples=150, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow], deadline=None)
def test_whatever_stands_in_an_object_is_sound_or_bad_or_has_a_reason(data: bytes) -> None:
    words: set[tuple[str, str]] = {(reason.what, reason.word) for reason in REASONS}
    with found(words):
        decode_ids(data, "key")
    shipment = Shipment(base_fingerprint="", groups=())
    with found(words):
        shipment = decode_shipment(data, "key")
    assert all(("part", bad.reason) in words for bad in shipment.bad)
    for group in shipment.groups:
        assert len(group.rollouts) == group.group_size
        assert 0 < np.float32(group.sampling.temperature) < np.inf
        for rollout in group.rollouts:
            assert rollout.finish_reason in ("stop", "length")
            assert len(rollout.completion_ids) == len(rollout.generator_logprobs) == len(rollout.loss_mask) > 0
            assert np.isfinite([rollout.reward, *rollout.generator_logprobs]).all()
            assert np.isfinite([value for value in rollout.rewards.values() if value is not None]).all()
    encode_ledger([End(group_id=d.group_id, end="dropped", step=0, reason=d.reason) for d in (*shipment.drops, *shipment.bad)])
    again = decode_shipment(encode_shipment(replace(shipment, bad=())), "key")
    assert ([group.group_id for group in again.groups], again.bad) == ([group.group_id for group in shipment.groups], ())


def test_only_length_is_truncated() -> None:
    stop, length = GROUP.rollouts
    assert isinstance(stop, Rollout)
    assert (stop.truncated, length.truncated) == (False, True)


def test_a_folder_is_read_whole_whichever_object_comes_first(tmp_path: Path) -> None:
    drops = Shipment(base_fingerprint="f", groups=(), drops=(Drop(group_id="g/9", reason="reward_timeout"),))
    names = sorted({name for rollout in GROUP.rollouts for name in rollout.rewards})
    (tmp_path / "0.parquet").write_bytes(encode_shipment(drops, names))
    (tmp_path / "1.parquet").write_bytes(encode_shipment(SHIPMENT, names))
    rows = pads.dataset(tmp_path).to_table().to_pylist()
    assert [row["rewards"] for row in rows] == [
        pytest.approx({name: rollout.rewards.get(name) for name in names})
        for group in SHIPMENT.groups
        for rollout in group.rollouts
    ]
