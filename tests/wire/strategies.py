"""Any value of a wire format, for hypothesis: of a document from its annotations, so that a new field is covered at once."""

from __future__ import annotations

import types
from typing import Any, Literal, Union, get_args, get_origin

from hypothesis import strategies as st
from pydantic import BaseModel

from grpod.wire import keys
from grpod.wire.adapter import Adapter, FileRef, Probe
from grpod.wire.checkpoint import Checkpoint
from grpod.wire.doc import FORMAT
from grpod.wire.rollout import TIMING, Drop, Group, Rollout, Sampling, Shipment
from grpod.wire.run import Final
from grpod.wire.tables import End, Metric

INT = st.integers(-(2**63), 2**63 - 1)
FLOAT = st.floats(allow_nan=False, allow_infinity=False)
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
TOKEN = st.integers(0, 2**31 - 1)
NAME = st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True)
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: INT,
    float: FLOAT,
    str: st.text(),
    bool: st.booleans(),
    type(None): st.none(),
}
JSON = st.recursive(
    st.one_of(*SCALARS.values()), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)


def document(kind: type[BaseModel]) -> st.SearchStrategy[Any]:
    fields = {name: of_type(field.annotation) for name, field in kind.model_fields.items() if name not in BOUND.get(kind, {})}
    fields |= BOUND.get(kind, {})
    if "format" in fields:
        fields["format"] = st.just(FORMAT)
    return st.builds(kind, **fields)


def files(*needed: str) -> st.SearchStrategy[dict[str, FileRef]]:
    plain = st.from_regex(keys.NAME, fullmatch=True)
    more = st.dictionaries(plain, document(FileRef), max_size=2)
    return st.builds(lambda must, more: more | must, st.fixed_dictionaries(dict.fromkeys(needed, document(FileRef))), more)


@st.composite
def probes(draw: st.DrawFn) -> Probe:
    length = draw(st.integers(2, 5))
    one_less = st.lists(FLOAT, min_size=length - 1, max_size=length - 1)
    ids = draw(st.lists(TOKEN, min_size=length, max_size=length))
    return Probe(token_ids=ids, logprobs=draw(one_less), base_logprobs=draw(one_less))


SEGMENTS = st.lists(st.builds(keys.ledger, st.integers(0, 999_999), st.integers(0, 99_999_999)), max_size=3)
# fields that a validator binds: not any value of their type will do
BOUND: dict[type[BaseModel], dict[str, st.SearchStrategy[Any]]] = {}


def of_type(annotation: Any) -> st.SearchStrategy[Any]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return JSON
    if origin in (Union, types.UnionType):
        return st.one_of(*map(of_type, arguments))
    if origin is list:
        return st.lists(of_type(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(of_type(arguments[0]), of_type(arguments[1]), max_size=3)
    if origin is Literal:
        return st.sampled_from(arguments)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return document(annotation)
    return SCALARS[annotation]


ends = st.builds(End, group_id=st.text(), end=st.sampled_from(["trained", "dropped"]), step=INT, reason=st.text())
metrics = st.builds(Metric, time=FLOAT, step=INT, name=st.text(), value=FLOAT)


@st.composite
def rollouts(draw: st.DrawFn, reward_names: list[str]) -> Rollout:
    length = draw(st.integers(1, 4))
    return Rollout(
        completion_ids=tuple(draw(st.lists(TOKEN, min_size=length, max_size=length))),
        generator_logprobs=tuple(
            draw(st.lists(st.floats(-100, 0, width=32, allow_nan=False), min_size=length, max_size=length))
        ),
        loss_mask=tuple(draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))),
        reward=draw(FLOAT32),
        rewards={name: draw(st.none() | FLOAT32) for name in reward_names},
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        seed=draw(INT),
        extra=draw(st.text(min_size=1)),
    )


@st.composite
def groups(draw: st.DrawFn, generator: str, number: int, reward_names: list[str]) -> Group:
    size = draw(st.integers(1, 3))
    return Group(
        run_id=draw(NAME),
        group_id=f"{generator}/{number}",
        group_size=size,
        prompt_id=draw(st.text()),
        data_epoch=draw(st.integers(0, 2**31 - 1)),
        prompt_row=draw(INT),
        prompt_ids=tuple(draw(st.lists(TOKEN, min_size=1, max_size=4))),
        policy_version=draw(INT),
        policy_epoch=draw(INT),
        adapter_sha256=draw(NAME),
        sampling=Sampling(
            temperature=draw(st.floats(1e-3, 1e3)),
            top_p=draw(FLOAT),
            top_k=draw(INT),
            max_new_tokens=draw(INT),
        ),
        generator=generator,
        created_at=draw(FLOAT),
        timing=draw(st.dictionaries(st.sampled_from(TIMING), FLOAT)),
        rollouts=tuple(draw(rollouts(reward_names)) for _ in range(size)),
    )


@st.composite
def shipments(draw: st.DrawFn) -> Shipment:
    generator, names = draw(NAME), sorted(draw(st.sets(NAME, min_size=1, max_size=3)))
    count = draw(st.integers(0, 3))
    return Shipment(
        base_fingerprint=draw(st.text(st.characters(codec="utf-8", exclude_characters="\0"))),
        groups=tuple(draw(groups(generator, number, names)) for number in range(count)),
        drops=tuple(draw(st.lists(st.builds(Drop, group_id=st.text(), reason=st.text()), max_size=2))),
    )


BOUND |= {
    Adapter: {"files": files(keys.ADAPTER_WEIGHTS), "probe": probes()},
    Checkpoint: {"files": files(keys.ADAPTER_WEIGHTS, keys.OPTIMIZER, keys.TRAINER), "ledger": SEGMENTS},
    Final: {"files": files(), "ledger": SEGMENTS},
}
