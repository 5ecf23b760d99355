"""Loads, unloads, pause and resume over the replicas that the proxy owns.

    client ─▶ load / unload / pause / resume: change what is wanted, wait for the quorum ─▶ 200, or rolled back and refused
                                   │ wakes
                                   ▼
                 reconcile, one task a replica: brings its replica to what is wanted, for as long as it takes

So a replica that lags, is late or has restarted needs nothing of its own: it catches up by the same few lines, and until then
routing does not see the version there. Nothing is ever loaded into, or unloaded from, a generator's replica.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import anyio

from grpod.errors import GrpodError
from grpod.proxy.replicas import Attempt, Fleet, Replica
from grpod.proxy.wanted import Live, Mode, content_of, identify
from grpod.replica.client import Refused, ReplicaClient, Unavailable, UnknownAdapter
from grpod.telemetry.log import get_logger

log = get_logger(role="proxy")
ROLLBACK_S = 5.0  # a failed load is answered once its replicas are rid of it, at the latest after this


class BroadcastFailed(GrpodError):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status  # for the client


async def load(fleet: Fleet, name: str, path: str) -> None:
    """Returns when a quorum holds it. The same name with the same content is no second load; with other content it takes over
    from the old one at that moment. A client that leaves before has not loaded anything."""
    if name in fleet.bases():
        raise BroadcastFailed(400, f"{name!r} is the base model's name")
    wanted = fleet.wanted
    async with wanted.lock(name):
        live = await identify(name, path)
        for replica in fleet.owned:
            replica.attempts.pop(live, None)  # what was refused before may be right by now
        wanted.pending.add(live)
        wanted.dismissed.discard(name)
        fleet.changed()
        try:
            await _quorum(
                fleet,
                f"load {name}",
                has=lambda replica: live in replica.loaded,
                refused=lambda replica: replica.attempts.get(live, Attempt()).refused,
            )
            wanted.active.pop(name, None)  # to the end: to_load goes by age
            wanted.active[name] = live
        except BroadcastFailed as failed:
            fleet.tally["broadcasts", "load", "failed"] += 1
            log.warning("load_rolled_back", adapter=name, path=path, why=str(failed))
            if wanted.paused is not None:  # TRL pauses around a load and does not resume after a failed one
                _set_paused(fleet, None)
            raise
        finally:
            wanted.pending.discard(live)
            fleet.changed()
            if wanted.active.get(name) != live:
                await fleet.wait_until(lambda: not any(r.up and live in r.loaded for r in fleet.owned), ROLLBACK_S)
    fleet.tally["broadcasts", "load", "ok"] += 1
    log.info("adapter_loaded", adapter=name, path=path, sha256=live.sha256)


async def unload(fleet: Fleet, name: str) -> None:
    """Gone for new requests; taken from the replicas at once, or when the last request under it has ended."""
    wanted = fleet.wanted
    async with wanted.lock(name):
        live = wanted.active.pop(name, None)
        if live is None:
            if not any(name in replica.foreign for replica in fleet.owned):
                raise BroadcastFailed(404, f"The lora adapter '{name}' cannot be found.")
            wanted.dismissed.add(name)
        fleet.changed()

        def gone(replica: Replica) -> bool:
            return name not in replica.foreign and (live is None or live not in replica.loaded or wanted.keeps(live))

        await fleet.wait_until(lambda: all(gone(r) for r in fleet.owned if r.up), fleet.timing.server_error_s)
    fleet.tally["broadcasts", "unload", "ok"] += 1
    log.info("adapter_unloaded", adapter=name)


async def pause(fleet: Fleet, mode: Mode) -> None:
    await _follow(fleet, mode)


async def resume(fleet: Fleet) -> None:
    await _follow(fleet, None)


async def resume_overdue(fleet: Fleet) -> None:
    """A task: who paused may be dead, and TRL does not resume after an error of its own."""
    while True:
        serial = fleet.wanted.pause_serial
        overdue = fleet.wanted.paused is not None and not await fleet.wait_until(
            lambda: fleet.wanted.pause_serial != serial,  # noqa: B023  (awaited within this turn)
            fleet.timing.pause_s,
        )
        if overdue:
            log.warning("resumed_by_itself", paused_s=fleet.timing.pause_s)
            _set_paused(fleet, None)
        else:
            changes = fleet.changes
            if fleet.wanted.paused is None:
                await changes.wait()


async def reconcile(fleet: Fleet, replica: Replica, client: ReplicaClient) -> float:
    """One pass: pause first, then room is made, then loads, newest first. Wakes who waits for one of them. Returns when to come
    again (a time of `anyio.current_time`), if nothing changes before."""
    wanted = fleet.wanted
    again = math.inf
    if replica.paused_to != wanted.pause_serial:
        again = min(again, await _pause_one(fleet, replica, client))
    unwanted = sorted(replica.foreign & (wanted.active.keys() | wanted.dismissed))
    unwanted += [name for live, name in replica.loaded.items() if not wanted.keeps(live)]
    for name in unwanted:
        again = min(again, await _unload_one(fleet, replica, client, name))
    wanted.dismissed &= {name for other in fleet.owned for name in other.foreign}
    todo = [live for live in wanted.to_load() if live not in replica.loaded]
    replica.attempts = {live: attempt for live, attempt in replica.attempts.items() if live in todo}
    for live in todo:
        attempt = replica.attempts.setdefault(live, Attempt(since=anyio.current_time()))
        if attempt.refused is None and attempt.due <= anyio.current_time():
            await _load_one(fleet, replica, client, live, attempt)
        if attempt.refused is None and live not in replica.loaded:
            again = min(again, attempt.due)
    return again


async def _load_one(fleet: Fleet, replica: Replica, client: ReplicaClient, live: Live, attempt: Attempt) -> None:
    if live.sha256 is not None and await content_of(live.path) != live.sha256:
        attempt.refused = Refused(409, f"{live.path} does not hold any more what was loaded as {live.name}")
        log.warning("adapter_changed_on_disk", adapter=live.name, path=live.path, url=replica.url)
        return fleet.changed()
    name = replica.name_for(live)
    sent_before = replica.used.get(name) == live
    replica.used.setdefault(name, live)
    replica.edits += 1
    try:
        await client.load_adapter(name, live.path)
    except Refused as refused:
        if "already been loaded" in refused.message and (sent_before or name == live.alias()):
            pass  # by an earlier try whose answer was lost, or by a proxy before this one: the same content
        elif "already been loaded" in refused.message:
            replica.used[name] = None  # not by us, and with what content nobody can say: take another name
            return await _load_one(fleet, replica, client, live, attempt)
        elif refused.status == 404:
            return _later(fleet, replica, attempt, f"not there yet: {refused.message}")
        else:
            attempt.refused, attempt.error = refused, str(refused)
            log.warning("load_refused", adapter=live.name, url=replica.url, status=refused.status, message=refused.message)
            return fleet.changed()
    except Unavailable as unavailable:
        overdue = anyio.current_time() - attempt.since > fleet.timing.server_error_s
        if unavailable.status is not None and overdue:
            attempt.refused = Refused(unavailable.status, str(unavailable))
        if unavailable.status is None:
            replica.look.set()  # dead, or only slow? a look tells
        return _later(fleet, replica, attempt, str(unavailable))
    replica.edits += 1
    replica.loaded[live] = name
    replica.foreign.discard(name)
    replica.attempts.pop(live, None)
    fleet.changed()


def _later(fleet: Fleet, replica: Replica, attempt: Attempt, why: str) -> None:
    if attempt.error != why:
        log.info("load_tried_again", url=replica.url, why=why)
    attempt.tries, attempt.error = attempt.tries + 1, why
    attempt.due = anyio.current_time() + min(fleet.timing.retry_max_s, fleet.timing.retry_s * 2 ** min(attempt.tries, 20))
    if attempt.refused:
        fleet.changed()


async def _unload_one(fleet: Fleet, replica: Replica, client: ReplicaClient, name: str) -> float:
    replica.edits += 1
    try:
        await client.unload_adapter(name)
    except Refused as refused:  # it does not hold it
        if not isinstance(refused, UnknownAdapter):
            log.warning("unload_refused", adapter=name, url=replica.url, why=str(refused))
    except Unavailable as unavailable:
        log.info("unload_tried_again", adapter=name, url=replica.url, why=str(unavailable))
        return anyio.current_time() + fleet.timing.retry_max_s
    finally:
        replica.edits += 1
    replica.foreign.discard(name)
    for live in [live for live, there in replica.loaded.items() if there == name]:
        del replica.loaded[live]
    fleet.changed()
    return math.inf


async def _pause_one(fleet: Fleet, replica: Replica, client: ReplicaClient) -> float:
    serial, mode = fleet.wanted.pause_serial, fleet.wanted.paused
    try:
        await (client.resume() if mode is None else client.pause(mode))
    except Refused as refused:
        replica.pause_refused = serial, refused
    except Unavailable as unavailable:
        log.info("pause_or_resume_tried_again", url=replica.url, why=str(unavailable))
        replica.look.set()
        return anyio.current_time() + fleet.timing.retry_s
    replica.paused_to = serial
    fleet.changed()
    return math.inf


async def _follow(fleet: Fleet, mode: Mode | None) -> None:
    call = "resume" if mode is None else "pause"
    serial = _set_paused(fleet, mode)

    def refused(replica: Replica) -> Refused | None:
        return replica.pause_refused[1] if replica.pause_refused and replica.pause_refused[0] >= serial else None

    try:
        await _quorum(fleet, call, has=lambda r: r.paused_to >= serial and not refused(r), refused=refused)
    except BroadcastFailed:
        fleet.tally["broadcasts", call, "failed"] += 1
        if mode is not None and fleet.wanted.pause_serial == serial:
            _set_paused(fleet, None)
        raise
    fleet.tally["broadcasts", call, "ok"] += 1


def _set_paused(fleet: Fleet, mode: Mode | None) -> int:
    fleet.wanted.paused = mode
    fleet.wanted.pause_serial += 1
    fleet.changed()
    return fleet.wanted.pause_serial


async def _quorum(
    fleet: Fleet, what: str, *, has: Callable[[Replica], bool], refused: Callable[[Replica], Refused | None]
) -> None:
    """Waits until the quorum has it. Raises `BroadcastFailed`: too many refuse for good, or it took too long."""
    if not fleet.owned:
        raise BroadcastFailed(503, f"{what}: there is no replica that the proxy owns")

    def state() -> str:
        up = [replica for replica in fleet.owned if replica.up]
        if up and sum(map(has, up)) >= fleet.need():
            return "done"
        refusals = sum(refused(replica) is not None for replica in up)
        return "hopeless" if refusals and len(up) - refusals < fleet.need() else "open"

    await fleet.wait_until(lambda: state() != "open", fleet.timing.broadcast_s)
    if state() == "done":
        return
    words = "; ".join(f"{replica.url}: {_word(replica, has, refused)}" for replica in fleet.owned)
    if state() == "hopeless":
        status = next(r.status for r in map(refused, fleet.owned) if r is not None)
        # a 404 would be read as "this server has no run-time LoRA"
        raise BroadcastFailed(status if status != 404 else 502, f"{what}: refused ({words})")
    raise BroadcastFailed(504, f"{what}: no quorum of {fleet.need()} within {fleet.timing.broadcast_s:g} s ({words})")


def _word(replica: Replica, has: Callable[[Replica], bool], refused: Callable[[Replica], Refused | None]) -> str:
    if has(replica):
        return "has it"
    said = refused(replica)
    last = next((attempt.error for attempt in replica.attempts.values() if attempt.error), "not yet")
    return str(said) if said else last if replica.up else f"down: {replica.error}"
