"""Objects as they are found: whole, cut, twice, late, foreign. Each group ends once, and nothing waits for a missing number."""

from __future__ import annotations

import io
import secrets
from typing import Any

import pyarrow.parquet as pq
import pytest
import structlog

from grpod.bucket.base import Bucket
from grpod.bucket.memory import MemoryBucket
from grpod.errors import BucketError
from grpod.learner.book import Book
from grpod.learner.feed import Feed, Rules
from grpod.learner.pacing import Pacing
from grpod.learner.versions import Versions
from grpod.wire import keys
from grpod.wire.checkpoint import Cursor
from grpod.wire.rollout import Drop
from tests.buckets import FaultyBucket
from tests.learner.helpers import BASE, RUN, group, lineage, manifest, shipped, state

pytestmark = pytest.mark.anyio


class World:
    def __init__(self, *, cursors: dict[str, Cursor] | None = None, bucket: Bucket | None = None, **rules: Any) -> None:
        self.now = 0.0
        self.bucket = bucket or MemoryBucket(f"memory://{secrets.token_hex(4)}")
        self.book = Book()
        self.pacing = Pacing()
        self.versions = Versions(self.bucket, lineage())
        self.versions.note(manifest(0))
        defaults = {"run_id": RUN, "base_fingerprint": BASE, "max_lag": 2, "vocab_size": 100, "max_positions": 64}
        self.feed = Feed(
            self.bucket,
            rules=Rules(**{**defaults, "mask_truncated": True, "ttl_s": 30.0, "list_every_s": 0.0, **rules}),
            book=self.book,
            pacing=self.pacing,
            versions=self.versions,
            cursors=cursors or {},
            clock=lambda: self.now,
        )

    async def put(self, **objects: bytes) -> None:
        await self.bucket.put({key.replace("__", "/"): data for key, data in objects.items()})

    async def ship(self, name: str, seq: int, data: bytes) -> None:
        await self.bucket.put({keys.rollout(name, seq): data})

    async def state(self, name: str, **fields: Any) -> None:
        await self.bucket.put({keys.generator_state(name): state(name, **fields)})

    async def quarantine(self) -> set[str]:
        return {meta.key async for meta in self.bucket.list("quarantine")}


async def test_groups_come_oldest_version_first() -> None:
    world = World()
    world.versions.note(manifest(1))
    await world.ship("g", 0, shipped(group("g/0", version=1)))
    await world.ship("g", 1, shipped(group("g/1", version=0)))
    await world.feed.poll()
    taken = world.feed.take(2)
    assert taken is not None
    assert [pending.group.group_id for pending in taken] == ["g/1", "g/0"]


async def test_a_group_without_a_spread_counts_in_its_step_where_that_is_wanted() -> None:
    for keep in (False, True):
        world = World(keep_zero_spread=keep)
        await world.ship("g", 0, shipped(group("g/0", rewards=(1.0, 1.0))))
        await world.feed.poll()
        assert (world.feed.take(1) is not None) == keep
        assert world.feed.idle_run == 1, "nothing was learnt from it, either way"


async def test_fewer_than_asked_for_are_not_taken() -> None:
    world = World()
    await world.ship("g", 0, shipped(group("g/0")))
    await world.feed.poll()
    assert world.feed.take(2) is None
    assert world.feed.num_pending == 1


async def test_a_cursor_moves_on_only_when_every_group_of_an_object_has_ended() -> None:
    world = World()
    await world.ship("g", 0, shipped(group("g/0"), group("g/1")))
    await world.feed.poll()
    taken = world.feed.take(2)
    assert taken is not None
    world.feed.trained(taken[:1], 1)
    assert world.feed.roster.cursors()["g"] == Cursor(low=0, done=[])
    world.feed.trained(taken[1:], 1)
    assert world.feed.roster.cursors()["g"] == Cursor(low=1, done=[])


async def test_a_missing_number_holds_up_nobody_and_is_read_when_it_comes() -> None:
    world = World()
    await world.ship("g", 1, shipped(group("g/1")))
    await world.feed.poll()
    taken = world.feed.take(1)
    assert taken is not None
    world.feed.trained(taken, 1)
    assert world.feed.roster.cursors()["g"] == Cursor(low=0, done=[1])
    await world.ship("g", 0, shipped(group("g/0")))
    await world.feed.poll()
    assert world.feed.num_pending == 1


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda data: b"", "empty"),
        (lambda data: data[: len(data) * 6 // 10], "truncated"),
        (lambda data: b"x" * 99, "truncated"),
    ],
)
async def test_an_object_that_cannot_be_read_is_quarantined_once(spoil: Any, reason: str) -> None:
    world = World()
    await world.ship("g", 0, spoil(shipped(group("g/0"))))
    await world.ship("g", 1, shipped(group("g/1")))
    await world.feed.poll()
    await world.feed.poll()
    assert world.feed.quarantined == 1
    assert world.feed.num_pending == 1, "the good object is used"
    key = keys.quarantine(keys.rollout("g", 0))
    assert await world.quarantine() == {f"{key}/object", f"{key}/reason.json"}
    found = await world.bucket.get(f"{key}/reason.json")
    assert found is not None
    assert f'"reason": "{reason}"'.encode() in found.data


async def test_a_restart_does_not_look_at_the_quarantined_again() -> None:
    world = World()
    await world.ship("g", 0, b"")
    await world.feed.poll()
    again = World(bucket=world.bucket)
    with structlog.testing.capture_logs() as logs:
        await again.feed.poll()
    assert again.feed.quarantined == 1, "it still counts"
    assert logs == []


async def test_one_bad_group_does_not_spoil_the_others_of_its_object() -> None:
    world = World()
    bad = group("g/1")
    rollouts = (
        bad.rollouts[0].__class__(**{**vars(bad.rollouts[0]), "generator_logprobs": (float("nan"), -1.0)}),
        *bad.rollouts[1:],
    )
    await world.ship("g", 0, shipped(group("g/0"), group("g/1", rollouts=rollouts)))
    await world.feed.poll()
    assert world.feed.num_pending == 1
    assert world.book.dropped == {"quarantined": 1}
    again = World(bucket=world.bucket)
    await again.feed.poll()
    assert again.feed.num_pending == 1, "a restart reads the good group again"


async def test_a_copy_is_a_duplicate_and_no_second_end() -> None:
    world = World()
    await world.ship("g", 0, shipped(group("g/0")))
    await world.ship("g", 1, shipped(group("g/0")))
    await world.ship("other", 0, shipped(group("g/0")))
    await world.feed.poll()
    taken = world.feed.take(1)
    assert taken is not None
    world.feed.trained(taken, 1)
    assert world.feed.duplicates == 2
    assert world.book.trained == 1
    assert world.feed.take(1) is None
    assert world.feed.roster.cursors() == {"g": Cursor(low=2), "other": Cursor(low=1)}


async def test_drops_of_the_generator_end_with_its_reason() -> None:
    world = World()
    await world.ship("g", 0, shipped(group("g/0"), drops=[Drop(group_id="g/1", reason="reward_timeout")]))
    await world.feed.poll()
    assert world.book.dropped == {"reward_timeout": 1}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"run_id": "another"}, "foreign_run"),
        ({"adapter_sha256": "b" * 64}, "adapter_hash"),
        ({"policy_version": 9}, "unknown_version"),
        ({"prompt_ids": (3, 100)}, "token_id"),
        ({"rewards": (1.0, 1.0)}, "zero_spread"),
    ],
)
async def test_what_may_not_be_trained_ends_by_name(fields: dict[str, Any], reason: str) -> None:
    world = World()
    await world.ship("g", 0, shipped(group("g/0", **fields)))
    await world.feed.poll()
    assert world.book.dropped == {reason: 1}
    assert world.feed.num_pending == 0


async def test_a_group_becomes_stale_while_it_waits() -> None:
    world = World(max_lag=1)
    await world.ship("g", 0, shipped(group("g/0")))
    await world.feed.poll()
    world.versions.note(manifest(1))
    world.feed.prune()
    assert world.feed.num_pending == 1
    world.versions.note(manifest(2))
    world.feed.prune()
    assert world.book.dropped == {"stale": 1}


async def test_a_silent_generator_is_retired_and_what_it_had_open_is_lost() -> None:
    world = World()
    await world.feed.poll()
    await world.state("g", begun=3, open_=["g/1", "g/2"], next_seq=1)
    await world.ship("g", 0, shipped(group("g/0")))
    await world.feed.poll()
    assert world.feed.roster.live() == ["g"]
    world.now = 31.0
    await world.feed.poll()
    assert world.feed.roster.live() == []
    assert world.feed.roster.retired() == ["g"]
    assert world.book.dropped == {"lost": 2}
    assert world.feed.num_pending == 1, "what it had shipped is still used"


async def test_a_group_that_stands_in_no_readable_object_is_quarantined_not_forgotten() -> None:
    world = World()
    await world.ship("g", 0, b"")
    await world.state("g", begun=2, open_=["g/1"], next_seq=1)
    await world.feed.poll()
    assert world.book.dropped == {"quarantined": 1}
    assert "g/0" in world.book


async def test_an_object_that_comes_after_the_retirement_is_used_if_its_groups_were_not_told_lost() -> None:
    world = World()
    await world.state("g", begun=1, next_seq=1)
    await world.feed.poll()
    world.now = 31.0
    await world.feed.poll()
    assert world.feed.roster.retired() == ["g"]
    await world.ship("g", 0, shipped(group("g/0")))
    await world.feed.poll()
    assert world.feed.num_pending == 1


async def test_an_object_that_never_comes_is_lost_a_ttl_after_the_retirement() -> None:
    world = World()
    await world.state("g", begun=1, next_seq=1)
    for world.now in (0.0, 31.0, 62.0):
        await world.feed.poll()
    assert world.book.dropped == {"lost": 1}


async def test_what_a_retired_generator_tells_of_at_its_end_is_lost_too() -> None:
    world = World()
    await world.state("g", begun=1, open_=["g/0"])
    for world.now in (0.0, 31.0):
        await world.feed.poll()
    assert world.book.dropped == {"lost": 1}
    await world.state("g", begun=3, open_=["g/0", "g/1"], next_seq=1, counter=2, ended="retired")
    await world.ship("g", 0, shipped(group("g/2")))
    await world.feed.poll()
    assert world.book.dropped == {"lost": 2}
    assert world.feed.num_pending == 1, "what it has shipped meanwhile is used"


async def test_reading_goes_on_from_the_cursor() -> None:
    world = World(cursors={"g": Cursor(low=1, done=[2])})
    for seq in range(4):
        await world.ship("g", seq, shipped(group(f"g/{seq}")))
    await world.feed.poll()
    taken = world.feed.take(2)
    assert taken is not None
    assert {pending.group.group_id for pending in taken} == {"g/1", "g/3"}


async def test_every_end_returns_its_credit() -> None:
    world = World()
    await world.feed.poll()
    await world.state("g", begun=2, next_seq=1)
    await world.ship("g", 0, shipped(group("g/0", (1.0, 1.0)), group("g/1")))
    await world.feed.poll()
    assert world.feed.outstanding() == 1
    taken = world.feed.take(1)
    assert taken is not None
    assert world.feed.outstanding() == 1, "in training is not ended"
    world.feed.trained(taken, 1)
    assert world.feed.outstanding() == 0


async def test_what_one_was_credited_whose_replica_is_away_holds_up_nobody() -> None:
    """Else nothing is left for the others when it was the faster one, and the learner stands still until it is back."""
    world = World()
    await world.feed.poll()
    world.pacing.granted = {"slow": 3, "fast": 9}
    await world.state("slow", begun=0)
    for counter, (resident, outstanding) in enumerate(((["0-1"], 12), ([], 3), (["0-1"], 12))):
        await world.state("fast", begun=0, counter=counter, resident=resident)
        await world.feed.poll()
        assert world.feed.outstanding() == outstanding
        assert ("fast" in world.feed.roster.serving()) == bool(resident)


async def test_groups_of_one_that_is_gone_are_outstanding_until_they_are_trained() -> None:
    world = World()
    await world.ship("gone", 0, shipped(group("gone/0")))
    await world.feed.poll()
    assert world.feed.outstanding() == 1
    taken = world.feed.take(1)
    assert taken is not None
    assert world.feed.outstanding() == 1
    world.feed.trained(taken, 1)
    assert world.feed.outstanding() == 0


async def test_a_state_that_stood_there_before_is_given_credit_only_when_it_beats_again() -> None:
    world = World()
    await world.state("dead", begun=4, next_seq=0)
    await world.state("alive", begun=2, next_seq=0)
    await world.feed.poll()
    assert world.feed.roster.live() == []
    await world.state("alive", begun=2, next_seq=0, counter=2)
    await world.state("new", begun=0)
    await world.feed.poll()
    assert sorted(world.feed.roster.live()) == ["alive", "new"]
    world.now = 31.0
    await world.feed.poll()
    assert "dead" in world.feed.roster.retired()


async def test_a_bucket_that_fails_while_an_object_is_read_loses_no_group_of_it() -> None:
    bucket = FaultyBucket(MemoryBucket(f"memory://{secrets.token_hex(4)}"))
    world = World(bucket=bucket)
    old = manifest(0, epoch=1, sha256="b" * 64).model_copy(update={"version": 7, "pos": 0})
    await bucket.put({keys.adapter(7, 1, keys.MANIFEST): old.encode()})
    await world.ship("g", 0, shipped(group("g/0"), group("g/1", version=7, adapter_sha256="b" * 64)))
    bucket.spoil("get", r"adapters/.*", times=1)
    with pytest.raises(BucketError):
        await world.feed.poll()
    await world.feed.poll()
    assert world.feed.num_pending == 2


async def test_an_object_that_cannot_be_put_into_quarantine_holds_up_no_other_and_is_told_once() -> None:
    bucket = FaultyBucket(MemoryBucket(f"memory://{secrets.token_hex(4)}"))
    world = World(bucket=bucket)
    await world.ship("g", 0, b"")
    await world.ship("g", 1, shipped(group("g/1")))
    bucket.spoil("put", r"quarantine/.*", times=2)
    for _ in range(2):
        with pytest.raises(BucketError):
            await world.feed.poll()
    assert world.feed.num_pending == 1
    assert world.feed.quarantined == 0
    await world.feed.poll()
    assert world.feed.quarantined == 1


async def test_a_broken_copy_in_a_foreign_folder_ends_nobody_elses_groups() -> None:
    world = World()
    good = shipped(group("g/0"))
    table = pq.read_table(io.BytesIO(good))
    out = io.BytesIO()
    pq.write_table(table.drop_columns(["generator_logprobs"]), out)
    await world.ship("a", 0, out.getvalue())
    await world.ship("g", 0, good)
    await world.feed.poll()
    assert world.feed.num_pending == 1


async def test_nothing_is_trained_before_all_that_stood_there_has_been_read() -> None:
    world = World()
    await world.ship("g", 0, shipped(group("g/0")))
    await world.ship("g", 1, shipped(group("g/1")))
    read, taken_meanwhile = world.bucket.get, []

    async def get(key: str, **options: Any) -> Any:
        taken_meanwhile.append(world.feed.take(1))
        return await read(key, **options)

    world.bucket.get = get  # type: ignore[method-assign]
    await world.feed.poll()
    assert taken_meanwhile == [None, None]
    assert world.feed.take(2) is not None
