"""The replicas behind the proxy: who they are, whether they are up, what they hold. Owner of all of it: the Fleet.

    config, POST /grpod/v1/replicas ─▶ member ─┬─ watch: health, models, server_info; every poll_s, and at a doubt
                                               └─ tend:  brings it to what is wanted (`broadcast.reconcile`); owner "proxy" only
    leave, no heartbeat for ttl_s   ─▶ gone

A replica is "up" only after a look at its models that came after its last fault, so nothing is routed by stale knowledge for
longer than a poll; what a restart in between has lost is noticed by the 404 (`lost`). Every change wakes who waits for one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

import anyio
from anyio.abc import TaskGroup, TaskStatus

from grpod.errors import ConfigError, GrpodError, ReplicaError
from grpod.proxy.routing import View
from grpod.proxy.wanted import Live, Wanted
from grpod.replica.client import Refused, ReplicaClient, ServerInfo, Timeouts
from grpod.telemetry.log import get_logger

Owner = Literal["generator", "proxy"]
Quorum = int | Literal["majority", "all"]


@dataclass(frozen=True, kw_only=True)
class Timing:
    poll_s: float = 2.0
    poll_down_s: float = 0.5
    look_s: float = 30.0  # one look; vLLM's first server_info takes seconds, on two cores more
    misses: int = 3  # looks in a row that fail before a replica counts as down; a refused connection counts at once
    ttl_s: float = 15.0  # without a heartbeat
    strikes: int = 3  # spoilt answers in a row that open its breaker
    rest_s: float = 1.0  # then doubled for each further one, up to rest_max_s
    rest_max_s: float = 30.0
    retry_s: float = 0.1  # first pause before a load is tried again, then doubled up to retry_max_s
    retry_max_s: float = 2.0
    server_error_s: float = 30.0  # a load that is answered with 5xx for this long is refused: vLLM's word for a bad adapter
    broadcast_s: float = 300.0  # until a broadcast has its quorum; a late mount takes tens of seconds
    pause_s: float = 120.0  # then the proxy resumes by itself: who paused may be dead
    patience_s: float = 30.0  # a completion waits so long for a replica that comes back, or catches up


class Conflict(GrpodError):
    """A replica has one adapter owner."""


@dataclass(kw_only=True)
class Attempt:
    """Of loading one adapter into one replica."""

    tries: int = 0
    since: float = 0.0
    due: float = 0.0
    refused: Refused | None = None  # for good: until it restarts
    error: str = ""


@dataclass(kw_only=True, eq=False)
class Replica:
    url: str
    owner: Owner
    static: bool  # from the config: needs no heartbeat
    seen_at: float
    up: bool = False
    misses: int = 0
    error: str = ""
    bases: tuple[str, ...] = ()
    foreign: set[str] = field(default_factory=set)  # adapters there that the proxy did not load
    loaded: dict[Live, str] = field(default_factory=dict)  # -> its name there
    used: dict[str, Live | None] = field(default_factory=dict)  # every adapter name ever seen there; None: foreign
    attempts: dict[Live, Attempt] = field(default_factory=dict)
    paused_to: int = 0  # serial of the last pause or resume that it followed
    pause_refused: tuple[int, Refused] | None = None
    edits: int = 0  # +1 when the proxy changes its adapters: a list of models asked for before is void
    info: ServerInfo | None = None
    outstanding: int = 0  # tokens
    requests: int = 0
    strikes: int = 0
    rest_until: float = 0.0
    look: anyio.Event = field(default_factory=anyio.Event)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    @property
    def owned(self) -> bool:
        return self.owner == "proxy"

    def forget(self) -> None:
        """It may have restarted: what it was told, and how it is set up, no longer holds."""
        self.paused_to, self.pause_refused, self.info = 0, None, None
        self.attempts.clear()

    def names(self, wanted: Wanted) -> frozenset[str]:
        ours = {live.name for live in self.loaded if wanted.find(live.name) == live}
        theirs = {name for name in self.foreign if wanted.find(name) is None and name not in wanted.dismissed}
        return frozenset({*self.bases, *ours, *theirs})

    def name_for(self, live: Live) -> str:
        """Never a name that has stood for other content there."""
        return live.name if self.used.get(live.name, live) == live else live.alias()


class Fleet:
    def __init__(
        self,
        *,
        quorum: Quorum = "majority",
        timing: Timing | None = None,
        tend: Callable[[Fleet, Replica, ReplicaClient], Awaitable[float]],
        connect: Callable[[str], AbstractAsyncContextManager[ReplicaClient]] | None = None,
    ) -> None:
        self.timing = timing or Timing()
        self.replicas: dict[str, Replica] = {}
        self.wanted = Wanted()
        self.tally: Counter[tuple[str, ...]] = Counter()  # metric and labels -> count, see meters.py
        self.changes = anyio.Event()  # replaced at each change
        self._quorum = quorum
        self._tend = tend
        self._connect = connect or (
            lambda url: ReplicaClient(url, timeouts=Timeouts(connect=5.0, control=300.0, query=self.timing.look_s))
        )
        self._tasks: TaskGroup
        self._log = get_logger(role="proxy")

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        async with anyio.create_task_group() as self._tasks:
            task_status.started()
            await anyio.sleep_forever()

    # -- members

    def register(self, url: str, owner: Owner, *, static: bool = False) -> Replica:
        """Also a heartbeat. Raises `Conflict` when it is there under another owner, `ConfigError` when it is no URL."""
        url = checked_url(url)
        replica = self.replicas.get(url)
        if replica is not None and replica.owner != owner:
            raise Conflict(f"replica {url} is registered with owner {replica.owner}; it has to leave before it gets another")
        if replica is None:
            replica = self.replicas[url] = Replica(url=url, owner=owner, static=static, seen_at=anyio.current_time())
            self._tasks.start_soon(self._keep, replica)
            self._log.info("replica_joined", url=url, owner=owner)
            self.changed()
        replica.seen_at = anyio.current_time()
        return replica

    def leave(self, url: str, reason: str) -> bool:
        replica = self.replicas.pop(checked_url(url), None)
        if replica is None:
            return False
        self._log.info("replica_left", url=replica.url, reason=reason)
        replica.scope.cancel()
        self.changed()
        return True

    # -- what is known

    @property
    def owned(self) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica.owned]

    def need(self) -> int:
        """How many of the owned replicas make a quorum. One that is down does not count into a majority: it is given all that
        it missed before it serves again, so there is nothing to wait for."""
        if self._quorum == "all":
            return max(1, len(self.owned))
        return self._quorum if self._quorum != "majority" else sum(replica.up for replica in self.owned) // 2 + 1

    def healthy(self) -> bool:
        if self.owned:
            return sum(replica.up for replica in self.owned) >= self.need()
        return any(replica.up for replica in self.replicas.values())

    def views(self) -> list[View]:
        now = anyio.current_time()
        return [
            View(
                url=replica.url,
                up=replica.up,
                resting=now < replica.rest_until,
                models=replica.names(self.wanted),
                outstanding=replica.outstanding,
            )
            for replica in self.replicas.values()
        ]

    def bases(self) -> list[str]:
        """Names of base models, those of up replicas first."""
        ordered = sorted(self.replicas.values(), key=lambda replica: (not replica.up, replica.url))
        return list(dict.fromkeys(base for replica in ordered for base in replica.bases))

    # -- what changes

    def changed(self) -> None:
        self.changes.set()
        self.changes = anyio.Event()

    async def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        with anyio.move_on_after(timeout_s):
            while not condition():
                await self.changes.wait()
        return condition()

    def lost(self, replica: Replica, name: str, *, edits: int) -> bool:
        """It has answered that it does not know a name that it was thought to hold; `edits` is of the time when it was asked.
        False: something was done there since, so the answer tells nothing of now."""
        if edits != replica.edits:
            return False
        replica.edits += 1
        replica.foreign.discard(name)
        for live in [live for live, there in replica.loaded.items() if there == name]:
            del replica.loaded[live]
            replica.attempts.pop(live, None)
        self._log.warning("replica_lost_adapter", url=replica.url, adapter=name)
        replica.look.set()
        self.changed()
        return True

    def down(self, replica: Replica, why: str) -> None:
        """Nobody listens there, or it has not answered for too long. What it held is unknown until the next look."""
        if replica.up:
            self._log.warning("replica_down", url=replica.url, why=why)
        replica.up, replica.error = False, why
        replica.edits += 1
        replica.forget()
        replica.look.set()
        self.changed()

    def struck(self, replica: Replica, why: str) -> None:
        """It spoilt an answer. Several in a row open its breaker."""
        self.tally["spoilt", replica.url, why] += 1
        replica.strikes += 1
        if (over := replica.strikes - self.timing.strikes) >= 0:
            rest_s = min(self.timing.rest_max_s, self.timing.rest_s * 2**over)
            replica.rest_until = anyio.current_time() + rest_s
            self._log.warning("replica_rests", url=replica.url, strikes=replica.strikes, rest_s=rest_s, why=why)

    # -- tasks of one replica

    async def _keep(self, replica: Replica) -> None:
        with replica.scope:
            async with self._connect(replica.url) as client, anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, replica, client)
                if replica.owned:
                    tasks.start_soon(self._tend_always, replica, client)

    async def _tend_always(self, replica: Replica, client: ReplicaClient) -> None:
        while True:
            changes = self.changes  # taken before: a change in between is not slept over
            again = await self._tend(self, replica, client) if replica.up else math.inf
            with anyio.CancelScope(deadline=again):
                await changes.wait()

    async def _watch(self, replica: Replica, client: ReplicaClient) -> None:
        while True:
            replica.look = anyio.Event()
            await self._look(replica, client)
            if not replica.static and anyio.current_time() - replica.seen_at > self.timing.ttl_s:
                self.leave(replica.url, "no heartbeat")
            with anyio.move_on_after(self.timing.poll_s if replica.up and not replica.misses else self.timing.poll_down_s):
                await replica.look.wait()

    async def _look(self, replica: Replica, client: ReplicaClient) -> None:
        edits = replica.edits
        try:
            with anyio.fail_after(self.timing.look_s):
                if not await client.health():
                    return self._miss(replica, "/health does not answer 200")
                names = await client.models()
                if replica.info is None:
                    replica.info = await _info(client)
        except (ReplicaError, TimeoutError) as error:
            return self._miss(replica, str(error) or "no answer in time")
        if edits != replica.edits:
            replica.look.set()  # the list may be older than what was done meanwhile: look again
        else:
            self._found(replica, names)

    def _miss(self, replica: Replica, why: str) -> None:
        replica.misses += 1
        replica.error = why
        if replica.up and replica.misses >= self.timing.misses:
            self.down(replica, why)
            replica.look = anyio.Event()  # this was the look that `down` asks for

    def _found(self, replica: Replica, names: list[str]) -> None:
        before = replica.up, replica.names(self.wanted)
        adapters = set(names[1:])
        for live in [live for live, there in replica.loaded.items() if there not in adapters]:
            del replica.loaded[live]
            replica.forget()
            self._log.warning("replica_lost_adapter", url=replica.url, adapter=live.name)
        held = set(replica.loaded.values())
        for name in adapters - held:  # ours: a load that was applied though its answer was lost
            ours = replica.used.setdefault(name, None)
            if ours is not None:
                replica.loaded[ours] = name
        replica.bases, replica.foreign = tuple(names[:1]), adapters - set(replica.loaded.values())
        replica.up, replica.misses, replica.error = True, 0, ""
        if not before[0]:
            self._log.info("replica_up", url=replica.url, owner=replica.owner, models=names)
        if before != (True, replica.names(self.wanted)):
            self.changed()


async def _info(client: ReplicaClient) -> ServerInfo | None:
    try:
        return await client.server_info()
    except Refused:  # a server that is not in dev mode serves all the same
        return None


def checked_url(url: str) -> str:
    """Without the trailing slash."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"replica {url!r}: a URL like http://host:port was expected")
    return url.rstrip("/")
