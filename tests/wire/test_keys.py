from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpod.bucket.base import check_key
from grpod.wire import keys

names = st.from_regex(keys.NAME, fullmatch=True)
seq, number, epochs = st.integers(0, 10**10 - 1), st.integers(0, 10**8 - 1), st.integers(0, 10**6 - 1)


@given(names, seq, number, epochs, st.from_regex(r"[a-z0-9]{1,16}", fullmatch=True))
def test_what_is_built_is_parsed_back(name: str, n: int, v: int, e: int, nonce: str) -> None:
    built = {
        keys.rollout(name, n): keys.parse_rollout,
        keys.metrics(name, n): keys.parse_metrics,
        keys.adapter_folder(v, e): keys.parse_adapter,
        keys.checkpoint_folder(v, e): keys.parse_checkpoint,
        keys.generator_state(name): keys.parse_generator_state,
        keys.beat(e): keys.parse_lease,
        keys.claim(e): keys.parse_lease,
        keys.claim(e, nonce): keys.parse_lease,
        keys.stop(nonce): keys.parse_stop,
    }
    assert keys.parse_rollout(keys.rollout(name, n)) == (name, n)
    assert keys.parse_metrics(keys.metrics(name, n)) == (name, n)
    assert keys.parse_adapter(keys.adapter(v, e, keys.MANIFEST)) == keys.parse_adapter(keys.adapter_folder(v, e)) == (v, e)
    assert keys.parse_checkpoint(keys.checkpoint(v, e, keys.TRAINER)) == (v, e)
    assert keys.parse_ledger(keys.ledger(e, v)) == (e, v)
    assert keys.parse_generator_state(keys.generator_state(name)) == name
    assert keys.parse_lease(keys.beat(e)) == (e, "beat")
    assert keys.parse_lease(keys.claim(e)) == (e, "claim")
    assert keys.parse_lease(keys.claim(e, nonce)) == (e, nonce)
    assert keys.parse_stop(keys.stop(nonce)) == nonce
    for key in [*built, keys.quarantine(keys.rollout(name, n))]:
        assert check_key(key) == key


@given(st.lists(st.tuples(epochs, number), min_size=2))
def test_keys_sort_as_their_numbers_do(pairs: list[tuple[int, int]]) -> None:
    assert sorted(keys.ledger(e, s) for e, s in pairs) == [keys.ledger(e, s) for e, s in sorted(pairs)]


PARSERS = [
    keys.parse_rollout,
    keys.parse_metrics,
    keys.parse_adapter,
    keys.parse_checkpoint,
    keys.parse_ledger,
    keys.parse_generator_state,
    keys.parse_lease,
    keys.parse_stop,
]


@pytest.mark.parametrize(
    "name",
    [
        "rollouts/g1/0000000014.parquet.tmp",
        "rollouts/g1/14.parquet",
        "rollouts/g1/00000000014.parquet",
        "rollouts/g1/deep/0000000014.parquet",
        "rollouts/.hidden/0000000014.parquet",
        "rollouts/g 1/0000000014.parquet",
        "rollouts/g1/0000000014.parquet\n",
        "rollouts/g1/٠٠٠٠٠٠٠٠١٤.parquet",  # digits, but not ASCII ones
        "rollouts/" + "g" * 65 + "/0000000014.parquet",
        "x/rollouts/g1/0000000014.parquet",
        "adapters/v00000001-e00010",
        "adapters/v00000001-e000010x",
        "adapters/canary/adapter_model.safetensors",
        "checkpoints/s00000001-e000001.tmp/manifest.json",
        "ledger/e000001/s00000001.parquet/x",
        "leases/learner/1/claim.json",
        "leases/learner/000001/.claim.json.tmp/x",
        "state/generators/g1.json.tmp",
        "state/generators/.g1.json",
        "control/stop-.json",
        ".DS_Store",
        "",
    ],
)
def test_a_name_that_does_not_fit_exactly_is_somebody_elses(name: str) -> None:
    assert [parse(name) for parse in PARSERS] == [None] * len(PARSERS)


def test_an_adapters_name_is_of_its_run_version_and_epoch() -> None:
    assert keys.adapter_name("0123456789ab", 7, 2) == "grpod-0123456789ab-v7-e2"
