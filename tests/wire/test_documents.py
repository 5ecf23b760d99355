from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from grpod.errors import WireError
from grpod.wire.adapter import Adapter, file_ref
from grpod.wire.checkpoint import Checkpoint, Trainer
from grpod.wire.doc import FORMAT, Document
from grpod.wire.lease import Beat, Claim
from grpod.wire.run import Final, Run, Stop
from grpod.wire.state import GeneratorState, LearnerState, ProxyState, newer, order
from tests.wire.strategies import document

KINDS = [Run, Final, Stop, Adapter, Checkpoint, Trainer, Claim, Beat, LearnerState, GeneratorState, ProxyState]
kinds = pytest.mark.parametrize("kind", KINDS)


def test_every_kind_of_document_is_tested() -> None:
    assert set(KINDS) == set(Document.__subclasses__())


@kinds
@settings(max_examples=20)
@given(data=st.data())
def test_a_document_comes_back_as_it_was(kind: type[Document], data: st.DataObject) -> None:
    made = data.draw(document(kind))
    assert kind.decode(made.encode(), "key") == made


def fields(kind: type[Document]) -> dict[str, object]:
    from tests.wire.examples import DOCUMENTS

    example = next(example for example in DOCUMENTS.values() if type(example) is kind)
    found: dict[str, object] = json.loads(example.encode())
    return found


def encoded(values: object) -> bytes:
    return json.dumps(values).encode()


@kinds
def test_fields_of_a_later_minor_format_are_ignored(kind: type[Document]) -> None:
    old = fields(kind)
    later = kind.decode(encoded({**old, "format": "1.7", "not_yet_thought_of": [1]}), "key")
    assert later == kind.decode(encoded({**old, "format": "1.7"}), "key")


@kinds
@pytest.mark.parametrize("other", ["2.0", "0.9", "10.0", "", None, 1.0, ["1.0"]])
def test_another_major_format_is_refused(kind: type[Document], other: object) -> None:
    with pytest.raises(WireError, match=r"some/key: format .* is not 1\.x") as caught:
        kind.decode(encoded({**fields(kind), "format": other}), "some/key")
    assert caught.value.reason == "format"


@kinds
def test_a_field_of_another_type_is_named(kind: type[Document]) -> None:
    for name in set(fields(kind)) - {"format"}:
        if kind.model_fields[name].annotation is str:
            with pytest.raises(WireError, match=rf"some/key: {name}: ") as caught:
                kind.decode(encoded({**fields(kind), name: [None]}), "some/key")
            assert caught.value.reason == "malformed"


@kinds
def test_a_field_that_is_missing_is_named(kind: type[Document]) -> None:
    for name, field in kind.model_fields.items():
        if field.is_required():
            with pytest.raises(WireError, match=rf"some/key: {name}: .*required"):
                kind.decode(encoded({k: v for k, v in fields(kind).items() if k != name}), "some/key")


REF = {"size": 1, "sha256": "a"}
WEIGHTS, OPTIMIZER, TRAINER = "adapter_model.safetensors", "optimizer.safetensors", "trainer.json"


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (Adapter, {"files": {}}, f"files: .*{WEIGHTS} is missing"),
        (Checkpoint, {"files": {}}, f"files: .*{WEIGHTS} is missing"),
        (Checkpoint, {"files": {WEIGHTS: REF, OPTIMIZER: REF}}, f"files: .*{TRAINER} is missing"),
        (Checkpoint, {"files": {WEIGHTS: REF, TRAINER: REF}}, f"files: .*{OPTIMIZER} is missing"),
        *(
            (kind, {"files": {WEIGHTS: REF, OPTIMIZER: REF, TRAINER: REF, name: REF}}, "no plain file name")
            for kind in (Adapter, Checkpoint, Final)
            for name in ("", ".", "..", "../run.json", "/etc/passwd", "a/b", "a b", "a" * 300, "ä", "a\n")
        ),
        *(
            (kind, {"ledger": [key]}, "no key of a ledger segment")
            for kind in (Checkpoint, Final)
            for key in ("", "../x", "/etc/passwd", "ledger/e1/s1.parquet", "run.json")
        ),
        *(
            (Adapter, {"probe": {"token_ids": ids, "logprobs": adapter, "base_logprobs": base}}, "probe")
            for ids, adapter, base in (
                ([], [], []),
                ([1], [], []),
                ([1, 2], [], []),
                ([1, 2], [-1.0], []),
                ([1, 2], [-1.0], [-1.0, -1.0]),
                ([1, 2, 3], [-1.0], [-1.0]),
                ([1, -2], [-1.0], [-1.0]),
            )
        ),
    ],
)
def test_a_manifest_whose_fields_do_not_fit_each_other(kind: type[Document], change: dict[str, object], message: str) -> None:
    with pytest.raises(WireError, match=f"some/key: .*{message}") as caught:
        kind.decode(encoded({**fields(kind), **change}), "some/key")
    assert caught.value.reason == "malformed"


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[]", b"null", b'"text"', b"1", b'{"format": "1.0"', b"[" * 10**5])
def test_what_is_no_json_object_is_malformed(data: bytes) -> None:
    with pytest.raises(WireError, match="some/key: ") as caught:
        Beat.decode(data, "some/key")
    assert caught.value.reason == "malformed"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_none_are_refused(number: str) -> None:
    """Python's json reads them."""
    text = Stop(created_at=1.5).encode().replace(b"1.5", number.encode())
    with pytest.raises(WireError, match="created_at"):
        Stop.decode(text, "key")
    with pytest.raises(ValidationError):
        Stop(created_at=float(number))


def test_documents_are_frozen() -> None:
    with pytest.raises(ValidationError):
        Beat(nonce="n", epoch=1, counter=1).counter = 2  # type: ignore[misc]


def test_the_format_is_written() -> None:
    assert json.loads(Stop(created_at=0.0).encode())["format"] == FORMAT


def test_a_file_reference_is_size_and_hash() -> None:
    ref = file_ref(b"abc")
    assert (ref.size, ref.sha256[:8]) == (3, "ba7816bf")


@settings(max_examples=20)
@given(st.lists(document(LearnerState), min_size=1, max_size=5))
def test_of_many_states_the_greatest_is_kept_in_whatever_order_they_come(states: list[LearnerState]) -> None:
    known = None
    for found in states:
        known = newer(known, found)
    assert known is not None
    assert order(known) == max((state.epoch, state.counter) for state in states)


def test_a_late_retry_of_the_same_state_does_not_replace_it() -> None:
    known = GeneratorState(generator="g", counter=3, begun=5, open=[], next_seq=1, started_at=0, updated_at=0, period_s=5)
    late = known.model_copy(update={"begun": 4})
    assert newer(known, late) is known
    assert newer(known, late.model_copy(update={"counter": 2})) is known
