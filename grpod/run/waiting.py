"""Waiting for the run's learner to be gone: the observer's half of the lease.

    held ──┬── its process is proven dead (same machine), or it released its lease ──▶ free, at once
           ├── its beat has not changed for a whole ttl on *this* observer's monotonic clock ──▶ free
           └── final/manifest.json stands ──▶ the run is over

No clock is compared with another machine's, and a time in which the bucket could not be read proves nothing: only two
equal looks that lie a ttl apart do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import anyio

from grpod.bucket.base import Bucket
from grpod.context import Takeover
from grpod.errors import BucketError, LeaseLost, NotFound
from grpod.run.claims import read_claims
from grpod.run.lineage import Lineage
from grpod.run.process import is_gone
from grpod.telemetry.log import get_logger
from grpod.wire import keys
from grpod.wire.lease import Beat, Claim

_LOOKS_PER_TTL = 6
_PROCESS_LOOK_S = 1.0  # is its process there? Costs no call to the bucket
_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class RunEnded(Exception):
    """No fault of anybody: there is no run left to learn, or this process was asked to stop before it held one."""


@dataclass(frozen=True, kw_only=True)
class Clock:
    monotonic: Callable[[], float] = time.monotonic
    boottime: Callable[[], float] = lambda: time.clock_gettime(_BOOTTIME)  # goes on while the machine sleeps
    wall: Callable[[], float] = time.time


class StopSignal(Protocol):
    @property
    def requested(self) -> bool: ...


async def until_free(
    bucket: Bucket,
    *,
    nonce: str,
    ttl_s: float,
    takeover: Takeover,
    stop: StopSignal,
    clock: Clock,
    on_wait: Callable[[], None] = lambda: None,
) -> tuple[Claim, ...]:
    """The claims so far, once nobody holds the run (or `nonce` does).

    Raises `RunEnded`; and with takeover "exit" `LeaseLost`, naming the holder, as soon as it is seen to live.
    """
    log = get_logger()
    known: dict[str, Claim] = {}
    seen: tuple[int, str, Beat | None] | None = None
    since = 0.0
    failing = False
    while not stop.requested:
        began = clock.monotonic()
        try:
            claims = await read_claims(bucket, known)
            holder = Lineage(claims).holder
            beat = await read_beat(bucket, holder) if holder else None
            if keys.FINAL_MANIFEST in await bucket.stat([keys.FINAL_MANIFEST]):
                raise RunEnded(f"{bucket.url}: {keys.FINAL_MANIFEST} stands")
        except BucketError as error:
            if not failing:
                log.warning("bucket_unreadable", error=str(error))
            failing = True
            await _pause(bucket, None, ttl_s, stop, clock)
            continue
        failing = False
        if holder is None or holder.nonce == nonce:
            return claims
        gone = is_gone(holder.holder)
        if gone or (beat and beat.released):
            return claims
        if seen and seen[:2] == (holder.epoch, holder.nonce) and _older(beat, seen[2]):
            beat = seen[2]  # a late retry does not move it back
        sight = (holder.epoch, holder.nonce, beat)
        moves = seen is not None and sight != seen
        if takeover == "exit" and (moves or gone is False):
            raise LeaseLost(f"{bucket.url} is held by {holder.holder} (epoch {holder.epoch}), which lives")
        if sight != seen:
            if seen is None or seen[:2] != sight[:2]:
                on_wait()
                log.info("lease_held", holder=str(holder.holder), epoch=holder.epoch, takes_over_after_s=ttl_s)
            seen, since = sight, clock.monotonic()
        elif began - since >= ttl_s:
            log.warning("lease_abandoned", holder=str(holder.holder), epoch=holder.epoch, silent_s=round(began - since, 1))
            return claims
        await _pause(bucket, holder, ttl_s, stop, clock)
    raise RunEnded("a stop was requested")


async def read_beat(bucket: Bucket, claim: Claim) -> Beat | None:
    """The newest beat of the claim's holder; None: it has not beaten yet."""
    key = keys.beat(claim.epoch)
    try:
        found = await bucket.get(key)
    except NotFound:
        return None
    assert found is not None
    beat = Beat.decode(found.data, key)
    return beat if beat.nonce == claim.nonce else None


def _older(found: Beat | None, known: Beat | None) -> bool:
    return known is not None and (found is None or found.counter < known.counter)


async def _pause(bucket: Bucket, holder: Claim | None, ttl_s: float, stop: StopSignal, clock: Clock) -> None:
    """Until the next look: a part of the ttl, or earlier: the bucket tells of a change, the holder is gone, or a stop."""
    began = clock.monotonic()
    wait_s = ttl_s / _LOOKS_PER_TTL
    told = False
    while (left_s := began + wait_s - clock.monotonic()) > 0 and not stop.requested and not (holder and is_gone(holder.holder)):
        step_began, step_s = clock.monotonic(), min(left_s, _PROCESS_LOOK_S)
        if told:
            await anyio.sleep(step_s)
            continue
        await bucket.changed(step_s)
        if clock.monotonic() - step_began < 0.9 * step_s:
            told, wait_s = True, wait_s / 10  # a busy run tells all the time: not at once
