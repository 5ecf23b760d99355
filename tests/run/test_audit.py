from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpod.bucket.memory import MemoryBucket
from grpod.errors import ConfigError
from grpod.run.audit import audit, render
from grpod.run.tally import Known, faults, tally
from grpod.wire import keys
from grpod.wire.adapter import file_ref
from grpod.wire.tables import End
from tests.run.made import ADAPTER_FILES, MadeRun, dropped, group, shipment, trained

pytestmark = pytest.mark.anyio


@pytest.fixture
async def run(request: pytest.FixtureRequest) -> MadeRun:
    """Eight groups of g1, in two objects; the first of a second generator. One step is checkpointed."""
    made = await MadeRun(MemoryBucket(f"memory://{request.node.nodeid}")).begin()
    await made.claim(1)
    await made.adapter(0)
    await made.rollouts("g1", 0, "g1/0", "g1/1", drops={"g1/2": "reward_timeout"})
    await made.rollouts("g1", 1, "g1/3", "g1/4", "g1/5")
    await made.generator("g1", 8, open=["g1/6", "g1/7"])
    await made.rollouts("g2", 0, "g2/0")
    first = await made.ledger(
        1, [*trained("g1/0", "g1/1"), *dropped("reward_timeout", "g1/2"), *dropped("zero_spread", "g1/3")]
    )
    await made.checkpoint(1, [first])
    return made


async def test_an_unfinished_run_has_groups_that_are_pending(run: MadeRun) -> None:
    found = await audit(run.bucket)
    assert found.violations == []
    assert not found.ended
    assert found.groups.as_json() == {
        "generated": 9,
        "trained": 2,
        "dropped": {"reward_timeout": 1, "zero_spread": 1},
        "lost": 0,
        "pending": 5,
    }
    assert "5\n" in render(found).split("pending")[1]


async def test_after_the_end_nothing_is_pending(run: MadeRun) -> None:
    await run.generator("g3", 2)  # what it had begun when it vanished
    second = await run.ledger(2, [*trained("g1/4", step=2), *dropped("lost", "g3/0", "g3/1"), *dropped("quarantined", "g4/0")])
    await run.final(2, [keys.ledger(1, 1), second])
    found = await audit(run.bucket, deep=True)
    assert found.violations == []
    assert found.ended
    assert found.groups.as_json() == {
        "generated": 12,
        "trained": 3,
        "dropped": {"reward_timeout": 1, "zero_spread": 1, "quarantined": 1, "run_ended": 4},
        "lost": 2,
        "pending": 0,
    }
    json = found.as_json()
    assert json["ok"]
    assert json["groups"]["dropped"]["run_ended"] == 4
    assert "every group ends once" in render(found)


async def test_a_segment_that_no_manifest_lists_never_happened(run: MadeRun) -> None:
    await run.ledger(2, trained("g1/0", "g1/1", "g1/4", step=2))
    found = await audit(run.bucket)
    assert (found.violations, found.groups.trained) == ([], 2)


async def test_a_group_that_ended_twice_is_named(run: MadeRun) -> None:
    second = await run.ledger(2, [*trained("g1/4", step=2), *dropped("stale", "g1/1", step=2)])
    await run.final(2, [keys.ledger(1, 1), second])
    found = await audit(run.bucket)
    assert found.violations == ["group g1/1 ended twice: trained at step 1, and dropped at step 2 as stale"]
    assert "violation" in render(found)


async def test_a_group_that_nobody_has_begun_is_named(run: MadeRun) -> None:
    await run.final(2, [await run.ledger(2, [*trained("g1/8", "g9/0"), *dropped("stale", "g1/7"), *dropped("lost", "g9/1")])])
    found = await audit(run.bucket)
    assert [v.partition(" is in")[0] for v in found.violations] == ["group g1/8", "group g9/0"]


async def test_a_group_that_its_generator_dropped_is_not_trained(run: MadeRun) -> None:
    await run.final(2, [await run.ledger(2, trained("g1/2"))])
    assert (await audit(run.bucket)).violations == ["group g1/2 was trained at step 1, and its generator had dropped it"]


async def test_rollouts_that_were_collected_are_no_fault(run: MadeRun) -> None:
    await run.bucket.delete([keys.rollout("g1", 0)])
    assert (await audit(run.bucket)).violations == []


async def test_the_same_group_in_two_objects_is_counted_and_ends_once(run: MadeRun) -> None:
    await run.put(keys.rollout("g1", 7), shipment("g1/0", "g1/1"))
    await run.put(keys.rollout("found", 0), shipment("g1/1"))
    found = await audit(run.bucket)
    assert (found.violations, found.duplicates, found.groups.generated) == ([], 2, 9)


@pytest.mark.parametrize("data", [b"", b"PAR1", shipment("g1/5")[:-20]])
async def test_an_object_that_cannot_be_read_is_told_and_no_violation(run: MadeRun, data: bytes) -> None:
    await run.put(keys.rollout("g1", 2), data)
    await run.put(f"{keys.quarantine(keys.rollout('g1', 2))}/object", data)
    await run.put(f"{keys.quarantine(keys.rollout('g1', 2))}/reason.json", b"{}")
    found = await audit(run.bucket)
    assert list(found.unreadable) == [keys.rollout("g1", 2)]
    assert (found.violations, found.quarantined, found.rollout_objects) == ([], 1, 4)


async def test_names_that_do_not_fit_are_somebody_elses(run: MadeRun) -> None:
    before = await audit(run.bucket)
    for name in ("rollouts/g1/0000000014.parquet.tmp", "rollouts/g1/5.parquet", "adapters/v00000001-e00010/manifest.json"):
        await run.put(name, b"x")
    assert await audit(run.bucket) == before


async def spoil_missing(run: MadeRun, folder: str) -> None:
    await run.bucket.delete([f"{folder}/{keys.ADAPTER_WEIGHTS}"])


async def spoil_size(run: MadeRun, folder: str) -> None:
    await run.put(f"{folder}/{keys.ADAPTER_WEIGHTS}", b"weight")


@pytest.mark.parametrize("folder", [keys.adapter_folder(0, 1), keys.FINAL])
@pytest.mark.parametrize(("spoil", "words"), [(spoil_missing, "is missing"), (spoil_size, "6 bytes, its manifest says 7")])
async def test_a_manifest_that_names_a_missing_or_torn_file(run: MadeRun, folder: str, spoil: Any, words: str) -> None:
    await run.final(2, [keys.ledger(1, 1)])
    await spoil(run, folder)
    (violation,) = (await audit(run.bucket)).violations
    assert f"{folder}/{keys.ADAPTER_WEIGHTS} " in violation
    assert words in violation


@pytest.mark.parametrize("folder", [keys.adapter_folder(0, 1), keys.FINAL])
async def test_one_wrong_bit_is_found_when_asked_for(run: MadeRun, folder: str) -> None:
    await run.final(2, [keys.ledger(1, 1)])
    await run.put(f"{folder}/{keys.ADAPTER_WEIGHTS}", b"weighty")
    assert (await audit(run.bucket)).violations == []
    (violation,) = (await audit(run.bucket, deep=True)).violations
    assert violation == f"{folder}/{keys.ADAPTER_WEIGHTS} has another sha256 than its manifest says"


async def test_a_file_that_the_listing_missed_is_looked_for_again(run: MadeRun) -> None:
    """The listing was made before the data was written, and the manifest was read after."""
    real, late = run.bucket.list, keys.adapter(0, 1, keys.ADAPTER_WEIGHTS)

    async def list_without(folder: str, *, after: str | None = None) -> Any:
        async for meta in real(folder, after=after):
            if meta.key != late:
                yield meta

    run.bucket.list = list_without  # type: ignore[method-assign]
    assert (await audit(run.bucket)).violations == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 3}, "says it is version 3 of epoch 1"),
        ({"run_id": "another"}, "is of run another"),
        (
            {"files": {**{n: file_ref(d) for n, d in ADAPTER_FILES.items()}, "gone.safetensors": file_ref(b"")}},
            "gone.safetensors is missing",
        ),
    ],
)
async def test_a_manifest_that_is_not_what_its_name_says(run: MadeRun, change: dict[str, Any], words: str) -> None:
    await run.adapter(1, **change)
    (violation,) = (await audit(run.bucket)).violations
    assert words in violation


async def test_a_manifest_that_is_none_is_a_violation(run: MadeRun) -> None:
    await run.put(keys.adapter(1, 1, keys.MANIFEST), b"")
    (violation,) = (await audit(run.bucket)).violations
    assert "not JSON" in violation


async def test_a_version_without_a_manifest_was_never_published(run: MadeRun) -> None:
    await run.put(keys.adapter(1, 1, keys.ADAPTER_WEIGHTS), b"weights")
    assert (await audit(run.bucket)).violations == []


async def test_a_zombies_versions_are_no_violation_and_a_number_counts_once(run: MadeRun) -> None:
    await run.claim(2, 1, (1, 0, 1, 0))
    await run.adapter(1, 1)  # after the claim
    await run.adapter(1, 2, pos=0)
    assert (await audit(run.bucket)).violations == []
    await run.adapter(0, 2)  # below its own first_version
    assert (await audit(run.bucket)).violations == ["version 0 counts in epochs [1, 2]"]


@pytest.mark.parametrize("data", [None, b"", b"PAR1"])
async def test_a_ledger_segment_that_counts_must_be_there(run: MadeRun, data: bytes | None) -> None:
    if data is None:
        await run.bucket.delete([keys.ledger(1, 1)])
    else:
        await run.put(keys.ledger(1, 1), data)
    (violation,) = (await audit(run.bucket)).violations
    assert violation.startswith(f"ledger segment {keys.ledger(1, 1)}: ")


async def test_checkpoints_that_are_not_whole_are_passed_over(run: MadeRun) -> None:
    second = await run.ledger(2, trained("g1/4", step=2))
    segments = [keys.ledger(1, 1), second]
    await run.bucket.delete([f"{await run.checkpoint(2, segments)}/{keys.MANIFEST}"])
    await run.put(f"{await run.checkpoint(3, segments)}/{keys.OPTIMIZER}", b"mome")
    await run.bucket.delete([f"{await run.checkpoint(4, segments)}/{keys.OPTIMIZER}"])
    await run.put(f"{await run.checkpoint(5, segments)}/{keys.MANIFEST}", b"")
    found = await audit(run.bucket)
    assert [folder.rpartition("/")[2] for folder in found.damaged] == [f"s0000000{n}-e000001" for n in (5, 4, 3, 2)]
    assert (found.violations, found.groups.trained) == ([], 2)
    assert render(found).count("passed over") == 4


async def test_a_zombies_checkpoint_does_not_count(run: MadeRun) -> None:
    await run.claim(2, 1, (1, 0, 1, 0))
    await run.checkpoint(9, [await run.ledger(9, trained("g1/4"))], version=1)
    assert (await audit(run.bucket)).groups.trained == 2
    await run.checkpoint(2, [keys.ledger(1, 1), await run.ledger(2, trained("g1/4", "g1/5"), 2)], epoch=2, version=1)
    assert (await audit(run.bucket)).groups.trained == 4


async def test_where_there_is_no_run(request: pytest.FixtureRequest) -> None:
    with pytest.raises(ConfigError, match=r"no run at memory:.*run\.json"):
        await audit(MemoryBucket(f"memory://{request.node.nodeid}"))


ids = st.builds(lambda g, n: f"{g}/{n}", st.sampled_from(["a", "b-1"]), st.integers(0, 12))


@given(
    begun=st.dictionaries(st.sampled_from(["a", "b-1"]), st.integers(0, 10)),
    shipped=st.lists(ids),
    ends=st.lists(
        st.builds(End, group_id=ids, end=st.sampled_from(["trained", "dropped"]), step=st.just(1), reason=st.just("lost"))
    ),
    ended=st.booleans(),
)
def test_a_tally_adds_up(begun: dict[str, int], shipped: list[str], ends: list[End], ended: bool) -> None:
    known = Known(begun=begun)
    known.add(shipped)
    everything = {f"{g}/{n}" for g, count in begun.items() for n in range(count)} | set(shipped)
    assert len(known) == len(everything)
    assert all(group_id in known for group_id in everything)
    groups = tally(known, ends, ended=ended)
    assert groups.generated == len(everything | {end.group_id for end in ends})
    assert groups.trained + sum(groups.dropped.values()) + groups.lost + groups.pending == groups.generated
    assert groups.pending == 0 or not ended
    twice = len(ends) - len({end.group_id for end in ends})
    assert sum("ended twice" in fault for fault in faults(known, ends)) == twice


def test_a_number_with_another_spelling_is_another_group() -> None:
    known = Known(begun={"a": 3})
    assert "a/2" in known
    for other in ("a/3", "a/-1", "a/²", "a", "a/2/0", "b/0"):
        assert other not in known


def test_made_groups_are_sound() -> None:
    assert group("g1/0").group_size == 2
