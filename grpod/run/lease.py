"""The learner's lease: at most one process writes the run, and one that may have been replaced writes nothing more.

    hold ── wait until free ── prepare ── claim epoch N+1 ── body … ── release
                                             └─ a beat every ttl/6, each followed by a look at the claims

`check()` stands before every put and delete. It raises `LeaseLost`, for ever, once a ttl has passed on CLOCK_BOOTTIME since
the last *acknowledged* beat was sent (an observer counts from later), or a higher epoch or another nonce was met. The clock
is looked at before a beat is sent, too: a holder that was stopped for longer cannot beat itself back to life.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from grpod.bucket.base import Bucket, Object, ObjectMeta
from grpod.context import Takeover
from grpod.errors import BucketError, LeaseLost
from grpod.run.claims import SETTLE_S, place_claim, read_claims
from grpod.run.lineage import Lineage
from grpod.run.process import this_holder
from grpod.run.waiting import Clock, RunEnded, StopSignal, read_beat, until_free
from grpod.telemetry.log import get_logger
from grpod.wire import keys
from grpod.wire.lease import Beat, Claim, ResumedFrom

__all__ = ["Clock", "FencedBucket", "Lease", "RunEnded", "hold", "place_claim", "read_beat", "read_claims"]

Prepare = Callable[[tuple[Claim, ...]], Awaitable[tuple[ResumedFrom | None, int]]]
_RELEASE_S = 5.0


class Lease:
    """Owned by `hold`; everybody else only checks, verifies and asks for a beat."""

    def __init__(
        self, bucket: Bucket, claims: tuple[Claim, ...], *, ttl_s: float, beat_every_s: float, sent: float, clock: Clock
    ) -> None:
        """`sent`: on the boot clock, before the claim was sent: the first sign of life that others can have seen."""
        self.claim = claims[-1]
        self.lineage = Lineage(claims)
        self.ttl_s = ttl_s
        self._bucket = bucket
        self._beat_every_s = beat_every_s
        self._clock = clock
        self._acknowledged = sent
        self._counter = 0
        self._beating = anyio.Lock()
        self._known: dict[str, Claim] = {}
        self._lost: str | None = None

    @property
    def epoch(self) -> int:
        return self.claim.epoch

    def check(self) -> None:
        """Raises `LeaseLost`. Cheap: no call to the bucket."""
        silent_s = self._clock.boottime() - self._acknowledged
        if self._lost is None and silent_s > self.ttl_s:
            self._lost = (
                f"no beat was acknowledged for {silent_s:.1f} s (ttl {self.ttl_s:g} s), another learner may hold the run"
            )
        if self._lost is not None:
            raise LeaseLost(f"epoch {self.epoch} of {self._bucket.url} is lost: {self._lost}")

    async def verify(self) -> None:
        """Look at the claims. Raises `LeaseLost`, or `BucketError` when they cannot be read."""
        self.check()
        highest = Lineage(await read_claims(self._bucket, self._known)).holder
        if highest is not None and highest.epoch >= self.epoch and highest.nonce != self.claim.nonce:
            self._lost = self._lost or f"epoch {highest.epoch} is held by {highest.holder}"
        self.check()

    async def beat_now(self) -> None:
        """Raises `LeaseLost`, or `BucketError` when the beat was not acknowledged."""
        await self._beat()

    async def _beat(self, *, released: bool = False) -> None:
        async with self._beating:
            self.check()
            self._counter += 1
            beat = Beat(nonce=self.claim.nonce, epoch=self.epoch, counter=self._counter, released=released)
            sent = self._clock.boottime()
            await self._bucket.put({keys.beat(self.epoch): beat.encode()})
            self._acknowledged = sent

    async def _keep(self, body: anyio.CancelScope) -> None:
        """Beat until cancelled; cancels the body when the lease is lost."""
        failing = False
        try:
            while True:
                try:
                    with anyio.move_on_after(self.ttl_s / 2):
                        await self._beat()
                        await self.verify()
                    failing = False
                except BucketError as error:  # tried again until the ttl is over: then check() says so
                    if not failing:
                        get_logger().warning("beat_failed", epoch=self.epoch, error=str(error))
                    failing = True
                await anyio.sleep(self._beat_every_s)
        except LeaseLost:
            body.cancel()

    async def _watch(self, body: anyio.CancelScope) -> None:
        """A beat that hangs must not hide that the ttl is over."""
        try:
            while True:
                self.check()
                await anyio.sleep(max(0.01, self._acknowledged + self.ttl_s - self._clock.boottime()))
        except LeaseLost:
            body.cancel()

    async def _release(self) -> None:
        """Nothing is written under this lease any more, so that the next learner need not wait for the ttl."""
        with anyio.move_on_after(_RELEASE_S, shield=True):
            try:
                await self._beat(released=True)
            except (BucketError, LeaseLost) as error:
                get_logger().warning("lease_not_released", error=str(error), help="the next learner waits for the ttl")
        self._lost = self._lost or "it was released"


@asynccontextmanager
async def hold(
    bucket: Bucket,
    *,
    run_id: str,
    ttl_s: float,
    takeover: Takeover,
    prepare: Prepare,
    changes: Mapping[str, Any],
    stop: StopSignal,
    clock: Clock | None = None,
    settle_s: float = SETTLE_S,
    beat_every_s: float | None = None,
    on_wait: Callable[[], None] = lambda: None,
) -> AsyncIterator[Lease]:
    """Yields the lease once it is held. Raises `RunEnded` when there is nothing to do any more: the run is over, or a stop
    was requested while waiting; `LeaseLost` with takeover "exit" when another holds the run.

    `prepare(claims)` says what the next epoch resumes from, and its first version; it writes nothing. When the lease is lost
    the body is cancelled and `LeaseLost` raised. `beat_every_s` is a sixth of the ttl unless given.
    `on_wait` is called once another is seen to hold the run.
    """
    clock = clock or Clock()
    claims, sent = await _acquire(
        bucket,
        run_id=run_id,
        ttl_s=ttl_s,
        takeover=takeover,
        prepare=prepare,
        changes=dict(changes),
        stop=stop,
        clock=clock,
        settle_s=settle_s,
        on_wait=on_wait,
    )
    lease = Lease(bucket, claims, ttl_s=ttl_s, beat_every_s=beat_every_s or ttl_s / 6, sent=sent, clock=clock)
    failure: Exception | None = None
    done = False
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lease._keep, tasks.cancel_scope)
            tasks.start_soon(lease._watch, tasks.cancel_scope)
            try:
                yield lease
                done = not tasks.cancel_scope.cancel_called
            except Exception as error:  # raised again below, as itself: the group would wrap it
                failure = error
            tasks.cancel_scope.cancel()
    finally:
        if lease._lost is None:
            await lease._release()
    if failure is not None:
        raise failure
    if not done:
        lease.check()


async def _acquire(
    bucket: Bucket,
    *,
    run_id: str,
    ttl_s: float,
    takeover: Takeover,
    prepare: Prepare,
    changes: dict[str, Any],
    stop: StopSignal,
    clock: Clock,
    settle_s: float,
    on_wait: Callable[[], None],
) -> tuple[tuple[Claim, ...], float]:
    """(claims, the last is its own; when that was sent, on the boot clock)"""
    log = get_logger()
    nonce = secrets.token_hex(8)
    while True:
        claims = await until_free(bucket, nonce=nonce, ttl_s=ttl_s, takeover=takeover, stop=stop, clock=clock, on_wait=on_wait)
        resumed_from, first_version = await prepare(claims)
        if stop.requested:
            raise RunEnded("a stop was requested")
        claim = Claim(
            run_id=run_id,
            epoch=Lineage(claims).highest_epoch + 1,
            nonce=nonce,
            holder=this_holder(),
            resumed_from=resumed_from,
            # numbers only rise, even where a listing has missed the newest
            first_version=max([first_version, *(earlier.first_version for earlier in claims)]),
            changes=changes,
            created_at=clock.wall(),
        )
        sent = clock.boottime()
        if not await place_claim(bucket, claim, settle_s=settle_s):
            log.info("lease_race_lost", epoch=claim.epoch)
        elif clock.boottime() - sent <= ttl_s:
            if keys.FINAL_MANIFEST in await bucket.stat([keys.FINAL_MANIFEST]):  # written while this one prepared
                raise RunEnded(f"{bucket.url}: {keys.FINAL_MANIFEST} stands")
            log.info(
                "lease_held_by_this",
                epoch=claim.epoch,
                first_version=claim.first_version,
                from_step=resumed_from.step if resumed_from else 0,
            )
            return (*claims, claim), sent


class FencedBucket:
    """A bucket that writes only while the lease holds."""

    def __init__(self, bucket: Bucket, lease: Lease) -> None:
        self._bucket = bucket
        self._lease = lease
        self.url = bucket.url
        self.atomic_create = bucket.atomic_create

    async def put(self, items: Mapping[str, bytes | Path], *, create: bool = False) -> None:
        self._lease.check()
        await self._bucket.put(items, create=create)

    async def delete(self, keys: Iterable[str]) -> None:
        self._lease.check()
        await self._bucket.delete(keys)

    async def get(self, key: str, *, if_changed_from: ObjectMeta | None = None) -> Object | None:
        return await self._bucket.get(key, if_changed_from=if_changed_from)

    async def fetch(self, items: Mapping[str | ObjectMeta, Path]) -> None:
        await self._bucket.fetch(items)

    async def stat(self, keys: Iterable[str]) -> dict[str, ObjectMeta]:
        return await self._bucket.stat(keys)

    def list(self, folder: str, *, after: str | None = None) -> AsyncIterator[ObjectMeta]:
        return self._bucket.list(folder, after=after)

    async def changed(self, timeout_s: float) -> None:
        await self._bucket.changed(timeout_s)

    async def close(self) -> None:
        await self._bucket.close()
