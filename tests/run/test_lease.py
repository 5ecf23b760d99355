from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from grpod.bucket.memory import MemoryBucket
from grpod.errors import AlreadyExists, BucketError, LeaseLost
from grpod.run.claims import place_claim, read_claims
from grpod.run.lease import FencedBucket, Lease, hold
from grpod.run.process import this_holder
from grpod.run.waiting import Clock, RunEnded, read_beat
from grpod.wire import keys
from grpod.wire.lease import Beat, Claim, ResumedFrom
from tests.run.helpers import ELSEWHERE, ManualTime, Stop, TimedBucket, claim, dead_here

pytestmark = pytest.mark.anyio


@pytest.fixture
def time() -> ManualTime:
    return ManualTime()


@pytest.fixture
def bucket(request: pytest.FixtureRequest, time: ManualTime) -> TimedBucket:
    return TimedBucket(f"memory://{request.node.nodeid}", time)


async def fresh(claims: tuple[Claim, ...]) -> tuple[ResumedFrom | None, int]:
    return None, 0


def take(bucket: MemoryBucket, time: ManualTime | None = None, **options: Any) -> AbstractAsyncContextManager[Lease]:
    defaults = {"run_id": "r", "ttl_s": 30.0, "takeover": "wait", "prepare": fresh, "changes": {}, "stop": Stop()}
    return hold(bucket, **{**defaults, "clock": time.clock if time else Clock(), **options})


async def put_claim(bucket: MemoryBucket, made: Claim) -> None:
    await bucket.put({keys.claim(made.epoch): made.encode()}, create=True)


async def put_beat(bucket: MemoryBucket, made: Claim, counter: int, **more: Any) -> None:
    beat = Beat(nonce=made.nonce, epoch=made.epoch, counter=counter, **more)
    await bucket.put({keys.beat(made.epoch): beat.encode()})


async def test_the_first_learner_holds_epoch_1(bucket: TimedBucket, time: ManualTime) -> None:
    async with take(bucket, time, changes={"learner.steps": 7}) as lease:
        assert lease.epoch == 1
        await lease.beat_now()
        (found,) = await read_claims(bucket)
        assert found == lease.claim
        assert (found.run_id, found.first_version, found.resumed_from) == ("r", 0, None)
        assert found.changes == {"learner.steps": 7}
        assert found.holder == this_holder()
        beat = await read_beat(bucket, found)
        assert beat is not None
        assert beat.counter >= 1
        assert not beat.released


async def test_a_released_lease_is_taken_at_once(bucket: TimedBucket, time: ManualTime) -> None:
    async with take(bucket, time) as first:
        pass
    began = time.now

    async def prepare(claims: tuple[Claim, ...]) -> tuple[ResumedFrom, int]:
        assert claims == (first.claim,)
        return ResumedFrom(step=3, version=2, epoch=1, pos=2), 5

    async with take(bucket, time, prepare=prepare) as second:
        assert (second.epoch, second.claim.first_version) == (2, 5)
        assert second.lineage.claims == (first.claim, second.claim)
        assert not second.lineage.canonical(5, 1)
    assert time.now == began
    with pytest.raises(LeaseLost, match="released"):
        first.check()


async def test_first_versions_never_fall(bucket: TimedBucket, time: ManualTime) -> None:
    await put_claim(bucket, claim(1, 9, holder=dead_here()))
    async with take(bucket, time) as lease:  # `fresh` has found no version at all
        assert lease.claim.first_version == 9


async def test_a_holder_whose_process_is_gone_is_replaced_at_once(bucket: TimedBucket, time: ManualTime) -> None:
    await put_claim(bucket, claim(1, holder=dead_here()))
    async with take(bucket, time) as lease:
        assert lease.epoch == 2
        assert time.now == 1000.0


async def test_no_takeover_while_the_beat_changes_and_one_a_ttl_after_it_stops(bucket: TimedBucket, time: ManualTime) -> None:
    holder = claim(1, holder=ELSEWHERE)
    await put_claim(bucket, holder)
    beats = 20

    async def beat_on() -> None:
        nonlocal beats, stopped_at
        if beats:
            await put_beat(bucket, holder, 21 - beats)
            beats -= 1
            stopped_at = time.now

    stopped_at = 0.0
    bucket.on_wait = beat_on
    with capture_logs() as logs:
        async with take(bucket, time, ttl_s=30.0) as lease:
            assert lease.epoch == 2
            assert beats == 0
            assert 30.0 <= time.now - stopped_at <= 30.0 + 2 * 5.0
    assert [log["holder"] for log in logs if log["event"] == "lease_held"] == ["pid 7 on elsewhere"]


async def test_a_late_retry_of_an_older_beat_is_no_sign_of_life(bucket: TimedBucket, time: ManualTime) -> None:
    holder = claim(1)
    await put_claim(bucket, holder)
    await put_beat(bucket, holder, 5)
    numbers = [3, 2, 1]

    async def late() -> None:
        if numbers:
            await put_beat(bucket, holder, numbers.pop(0))

    bucket.on_wait = late
    async with take(bucket, time, ttl_s=30.0):
        assert time.now - 1000.0 <= 30.0 + 5.0


async def test_a_time_without_the_bucket_proves_nothing(bucket: TimedBucket, time: ManualTime) -> None:
    """The observer was cut off for twice the ttl, the holder was not."""
    holder = claim(1)
    await put_claim(bucket, holder)
    await put_beat(bucket, holder, 1)
    counter = 1
    real_get, away = bucket.get, 60

    async def get(key: str, **more: Any) -> Any:
        if away < 60 and away > 0:
            raise BucketError("away")
        return await real_get(key, **more)

    async def on_wait() -> None:
        nonlocal away, counter
        away -= 1
        if away == 0:
            counter += 1
            await put_beat(bucket, holder, counter)

    bucket.get, bucket.on_wait = get, on_wait  # type: ignore[method-assign]
    async with take(bucket, time, ttl_s=30.0):
        assert time.now - 1000.0 >= 60.0 + 30.0


async def test_exit_names_a_holder_that_lives(bucket: TimedBucket, time: ManualTime) -> None:
    holder = claim(1)
    await put_claim(bucket, holder)
    counter = 0

    async def beat_on() -> None:
        nonlocal counter
        counter += 1
        await put_beat(bucket, holder, counter)

    bucket.on_wait = beat_on
    with pytest.raises(LeaseLost, match="pid 7 on elsewhere"):
        async with take(bucket, time, takeover="exit"):
            pass
    assert time.now - 1000.0 < 30.0

    await put_claim(bucket, claim(2, holder=this_holder()))
    began = time.now
    with pytest.raises(LeaseLost, match="held by pid"):
        async with take(bucket, time, takeover="exit"):
            pass
    assert time.now == began  # its process is there: no need to wait for a beat


async def test_exit_takes_over_from_one_that_is_silent(bucket: TimedBucket, time: ManualTime) -> None:
    await put_claim(bucket, claim(1))
    async with take(bucket, time, takeover="exit") as lease:
        assert lease.epoch == 2


async def test_a_run_that_ends_meanwhile_leaves_nothing_to_hold(bucket: TimedBucket, time: ManualTime) -> None:
    await put_claim(bucket, claim(1))

    async def end() -> None:
        if time.now > 1010.0:
            await bucket.put({keys.FINAL_MANIFEST: b"{}"})

    bucket.on_wait = end
    with pytest.raises(RunEnded, match="final/manifest"):
        async with take(bucket, time):
            pass
    assert len(await read_claims(bucket)) == 1


async def test_a_stop_ends_the_wait(bucket: TimedBucket, time: ManualTime) -> None:
    await put_claim(bucket, claim(1))
    stop = Stop()

    async def on_wait() -> None:
        stop.requested = True

    bucket.on_wait = on_wait
    with pytest.raises(RunEnded, match="stop"):
        async with take(bucket, time, stop=stop):
            pass


class Unreliable(MemoryBucket):
    """Puts go wrong as scripted, one entry a put: "lost" (applied, no reply), "conflict" or "away" (not applied)."""

    script: list[str]

    async def put(self, items: Mapping[str, bytes | Path], *, create: bool = False) -> None:
        fault = self.script.pop(0) if self.script else ""
        if fault in ("", "lost"):
            await super().put(items, create=create)
        if fault:
            raise BucketError(f"{fault}: 409 or a time-out", keys=tuple(items))


@pytest.mark.parametrize("script", [["lost"], ["conflict", "conflict"], ["conflict", "lost"]])
async def test_a_claim_whose_reply_is_lost_is_settled_by_its_nonce(request: pytest.FixtureRequest, script: list[str]) -> None:
    bucket = Unreliable(f"memory://{request.node.nodeid}")
    bucket.script = list(script)
    with anyio.fail_after(5):
        assert await place_claim(bucket, claim(1))
    assert not bucket.script
    assert not await place_claim(bucket, claim(1, nonce="another"))


async def test_a_rival_that_was_faster_is_met_although_the_reply_was_lost(request: pytest.FixtureRequest) -> None:
    bucket = Unreliable(f"memory://{request.node.nodeid}")
    bucket.script = []
    await put_claim(bucket, claim(1, nonce="faster"))
    bucket.script = ["away"]
    assert not await place_claim(bucket, claim(1, nonce="slower"))


async def test_of_two_that_race_one_holds_and_the_other_waits(bucket: TimedBucket, time: ManualTime) -> None:
    async def rival_was_faster(claims: tuple[Claim, ...]) -> tuple[ResumedFrom | None, int]:
        if not claims:
            await put_claim(bucket, claim(1))
        return None, 0

    async with take(bucket, time, prepare=rival_was_faster) as lease:
        assert lease.epoch == 2
        assert time.now >= 1030.0


class NotAtomic(TimedBucket):
    atomic_create = False


async def test_where_creates_are_not_atomic_the_least_server_time_wins(
    request: pytest.FixtureRequest, time: ManualTime
) -> None:
    bucket = NotAtomic(f"memory://{request.node.nodeid}", time)
    results: dict[str, bool] = {}

    async def rival(nonce: str) -> None:
        results[nonce] = await place_claim(bucket, claim(1, nonce=nonce), settle_s=0.2)

    with capture_logs() as logs:
        async with anyio.create_task_group() as tasks:
            for nonce in ("bb", "aa", "cc"):
                tasks.start_soon(rival, nonce)
    (winner,) = await read_claims(bucket)
    assert results == {nonce: nonce == winner.nonce for nonce in results}
    modified = {meta.key: meta.modified async for meta in bucket.list(keys.LEASES)}
    assert min(modified, key=lambda key: (modified[key] or 0, key)) == keys.claim(1, winner.nonce)
    assert {log["event"] for log in logs} == {"lease_not_atomic"}
    # who comes later reads the same, and so does a late claim for the same epoch
    assert not await place_claim(bucket, claim(1, nonce="0late"), settle_s=0.0)


def stopped_for(time: ManualTime, seconds: float) -> None:
    """SIGSTOP, in effect: time goes on and nothing else."""
    time.now += seconds


async def test_a_holder_that_was_stopped_for_twice_the_ttl_writes_nothing_more(bucket: TimedBucket, time: ManualTime) -> None:
    with pytest.raises(LeaseLost, match="ttl 30 s"):
        async with take(bucket, time) as lease:
            fenced = FencedBucket(bucket, lease)
            await fenced.put({"metrics/a": b"1"})
            stopped_for(time, 29.0)
            await lease.beat_now()
            stopped_for(time, 29.0)
            await fenced.put({"metrics/b": b"1"})  # counted from the last beat
            stopped_for(time, 31.0)
            with pytest.raises(LeaseLost):
                await lease.beat_now()  # it cannot beat itself back to life
            with pytest.raises(LeaseLost):
                await fenced.put({"metrics/c": b"1"})
            with pytest.raises(LeaseLost):
                await fenced.delete(["metrics/a"])
            lease.check()
    assert [meta.key async for meta in bucket.list("metrics")] == ["metrics/a", "metrics/b"]
    (only,) = await read_claims(bucket)
    beat = await read_beat(bucket, only)
    assert beat is not None
    assert not beat.released


async def test_a_beat_counts_from_when_it_was_sent(bucket: TimedBucket, time: ManualTime) -> None:
    with pytest.raises(LeaseLost):
        async with take(bucket, time, beat_every_s=1000.0) as lease:
            await anyio.wait_all_tasks_blocked()  # its own first beat
            real_put = bucket.put

            async def slow_put(items: Mapping[str, bytes | Path], *, create: bool = False) -> None:
                time.now += 20.0
                await real_put(items, create=create)

            bucket.put = slow_put  # type: ignore[method-assign]
            await lease.beat_now()
            time.now += 11.0
            lease.check()


async def test_a_higher_epoch_is_met_and_the_body_is_cancelled(request: pytest.FixtureRequest) -> None:
    bucket = MemoryBucket(f"memory://{request.node.nodeid}")
    with pytest.raises(LeaseLost, match="epoch 2 is held by pid 7 on elsewhere"):
        async with take(bucket, ttl_s=0.6):
            await put_claim(bucket, claim(2))
            await anyio.sleep_forever()
    assert not (await bucket.stat([keys.beat(2)]))


async def test_verify_looks_at_the_claims(bucket: TimedBucket, time: ManualTime) -> None:
    with pytest.raises(LeaseLost, match="elsewhere"):
        async with take(bucket, time, beat_every_s=1000.0) as lease:
            await anyio.wait_all_tasks_blocked()
            await lease.verify()
            await put_claim(bucket, claim(2))
            lease.check()
            await lease.verify()


async def test_beats_that_fail_are_tried_again(request: pytest.FixtureRequest) -> None:
    bucket = Unreliable(f"memory://{request.node.nodeid}")
    bucket.script = ["", "away", "lost", "away"]  # the claim goes well, then three beats do not
    with capture_logs() as logs:
        async with take(bucket, ttl_s=60.0, beat_every_s=0.02) as lease:
            with anyio.fail_after(30):
                while (beat := await read_beat(bucket, lease.claim)) is None or beat.counter < 5:
                    await bucket.changed(1.0)
            lease.check()
    assert sum(log["event"] == "beat_failed" for log in logs) == 1


async def test_a_bucket_that_stays_away_for_a_ttl_ends_the_lease(request: pytest.FixtureRequest) -> None:
    bucket = Unreliable(f"memory://{request.node.nodeid}")
    bucket.script = ["", *["away"] * 10_000]
    with pytest.raises(LeaseLost, match="no beat was acknowledged"):
        async with take(bucket, ttl_s=0.4):
            await anyio.sleep_forever()


async def test_a_beat_that_hangs_does_not_hide_that_the_ttl_is_over(bucket: TimedBucket) -> None:
    body_gone = anyio.Event()

    async def hang(items: Mapping[str, bytes | Path], *, create: bool = False) -> None:
        with anyio.CancelScope(shield=True):
            await body_gone.wait()

    with pytest.raises(LeaseLost, match="no beat was acknowledged"):
        async with take(bucket, ttl_s=0.3):
            bucket.put = hang  # type: ignore[method-assign]
            try:
                await anyio.sleep_forever()
            finally:
                body_gone.set()


async def test_an_error_of_the_body_comes_out_as_itself(bucket: TimedBucket, time: ManualTime) -> None:
    with pytest.raises(ZeroDivisionError):
        async with take(bucket, time):
            raise ZeroDivisionError
    async with take(bucket, time) as lease:  # and it was released
        assert lease.epoch == 2


async def test_a_cancelled_body_releases_too(bucket: TimedBucket, time: ManualTime) -> None:
    with anyio.CancelScope() as scope:
        async with take(bucket, time) as lease:
            scope.cancel()
            await anyio.sleep_forever()
    beat = await read_beat(bucket, lease.claim)
    assert beat is not None
    assert beat.released


async def test_a_fenced_bucket_reads_as_the_bucket_does(bucket: TimedBucket, time: ManualTime, tmp_path: Path) -> None:
    async with take(bucket, time) as lease:
        fenced = FencedBucket(bucket, lease)
        await fenced.put({"metrics/a": b"1"}, create=True)
        with pytest.raises(AlreadyExists):
            await fenced.put({"metrics/a": b"2"}, create=True)
        found = await fenced.get("metrics/a")
        assert found is not None
        assert await fenced.get("metrics/a", if_changed_from=found.meta) is None
        assert set(await fenced.stat(["metrics/a", "metrics/b"])) == {"metrics/a"}
        assert [m.key async for m in fenced.list("metrics")] == ["metrics/a"]
        await fenced.fetch({found.meta: tmp_path / "a"})
        assert (tmp_path / "a").read_bytes() == b"1"
        await fenced.delete(["metrics/a"])
        await fenced.changed(0.0)
        assert (fenced.url, fenced.atomic_create) == (bucket.url, True)
