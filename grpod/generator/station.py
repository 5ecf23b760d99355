"""One replica of this generator, and which versions it serves right now.

ready ─▶ canary ─▶ newest canonical version ─▶ serving ─┬─ newer version: fetch, load, attest, then current
  ▲                                                     ├─ a version that nothing uses: unloaded
  └───────── gone, or it has forgotten an adapter ◀─────┴─ requests that outlived max_lag: aborted, their group is stale

consumes   the follower's view            unblocks   the loop (`current`), groups that wait for their version (`serve`)
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from pathlib import Path

import anyio

from grpod.bucket.base import Bucket
from grpod.config import Config
from grpod.errors import BucketError, NotFound, NotReady, WireError
from grpod.generator.crowd import HUNG_S, CrowdWatch
from grpod.generator.engine import Engine, adapter_root
from grpod.generator.patience import Patience
from grpod.generator.settings import base_name
from grpod.generator.token_file import TokenFile
from grpod.replica.adapters import Adapters, Served, VersionRefused
from grpod.replica.client import Refused, ReplicaClient, Unavailable, UnknownAdapter, UnusableAnswer
from grpod.run.follow import Follower, View
from grpod.run.notice import Notice
from grpod.telemetry.log import get_logger
from grpod.wire.run import Run

# A version that was just published is mostly here in milliseconds, and a group that begins under it is a lag younger; but no
# replica idles for as long as a large adapter, or a slow bucket, may take.
PATIENCE_S = 1.0
FORGOTTEN = 10  # times in a row that its adapters were gone, without a sound group between
_FORGOTTEN_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0  # before the third incarnation in such a row; doubled each time
_AGAIN_S = 1.0  # after a turn that failed
_UNUSABLE = 4  # turns in a row in which not even the base or the canary could be scored


class Station:
    """`current`, `client` and `incarnation` are None or stale while the replica is away; `in_flight`, `ended` count groups."""

    def __init__(
        self, engine: Engine, config: Config, bucket: Bucket, run: Run, follower: Follower, scratch: Path, token: TokenFile
    ) -> None:
        self._engine, self._config, self._bucket, self._run = engine, config, bucket, run
        self._follower, self._scratch, self._token = follower, scratch, token
        self._log = get_logger()
        self._users: Counter[tuple[int, int]] = Counter()
        self._scopes: dict[tuple[int, int], set[anyio.CancelScope]] = {}
        self._held: dict[tuple[int, int], Served] = {}  # of the groups in flight
        self._good: dict[tuple[int, int], Served] = {}  # the last ones that were current, over all incarnations
        self._deleted: set[tuple[int, int]] = set()
        self._bringing_since: float | None = None  # when the way to the version that is to be current began
        self._forgot = anyio.Event()
        self._times_forgotten = 0  # in a row
        self._lost_at: float | None = None
        self._life = anyio.CancelScope()
        self._complained: set[tuple[str, str]] = set()
        self._said_waiting: tuple[int, int] | None = None
        self.notice: Notice = follower.notice
        self.current: Served | None = None
        self.adapters: Adapters | None = None
        self.client: ReplicaClient | None = None
        self.refused: dict[tuple[int, int], str] = {}
        self.brought: deque[Mapping[str, float]] = deque(maxlen=64)  # what the versions since the last look took
        self.unproven: set[tuple[int, int]] = set()  # accepted on the canary's word
        self.in_flight = 0
        self.ended = 0  # groups, however
        limit, group_size = config.generator.max_in_flight, config.generator.group_size
        self.crowd = CrowdWatch(fixed=None if limit == "auto" else limit, group_size=group_size)
        self.patience = Patience(config.run.startup_timeout_s)
        self.failure: NotReady | None = None

    @property
    def url(self) -> str:
        return self._engine.url

    @property
    def trouble(self) -> str:
        """Why its replica is not ready, in words; empty when it is."""
        return self._engine.trouble

    async def run(self) -> None:
        """Until it is cancelled, or `failure` says why this replica is of no use: given up, or not what the run needs."""
        with self._life:
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._abort_stale)
                    await self._live()
            except* NotReady as errors:
                self.give_up(_first(errors))

    def give_up(self, failure: NotReady) -> None:
        """Nothing is begun here any more; what waits for this replica ends."""
        self._log.error("replica_given_up", replica=self.url, error=str(failure))
        self.failure = failure
        self.current = self.adapters = self.client = None
        self._life.cancel()
        self.notice.tell()

    async def _live(self) -> None:
        while True:
            incarnation = await self._engine.ready()
            self._forgot = anyio.Event()
            client = ReplicaClient(self._engine.url, token=self._token)
            async with client, anyio.create_task_group() as tasks:
                tasks.start_soon(self._end_when_lost, incarnation, tasks.cancel_scope)
                tasks.start_soon(self._restart_when_hung, incarnation, client)
                await self._serve(client)
            self._lost_at = anyio.current_time()
            self.current = self.adapters = self.client = self._bringing_since = None
            self.notice.tell()
            if self._forgot.is_set():
                await self._rest()

    async def _restart_when_hung(self, incarnation: int, client: ReplicaClient) -> None:
        while True:  # one that is not ours to restart is watched on
            await self.crowd.watch(client, in_flight=lambda: self.in_flight, ended=lambda: self.ended)
            self._log.error("replica_hung", replica=client.url, in_flight=self.in_flight, seconds=HUNG_S)
            self._engine.restart(incarnation, f"produced nothing for {HUNG_S:g} s")

    async def _rest(self) -> None:
        """Before a server that has forgotten its adapters is given them again."""
        self._times_forgotten += 1
        if self._times_forgotten >= FORGOTTEN:
            raise NotReady(
                f"replica {self.url} forgot its adapters {self._times_forgotten} times in a row, with no group between: "
                "it is restarted again and again, or several servers stand behind one URL; each needs its own, or grpod's proxy"
            )
        if self._times_forgotten > 1:
            await anyio.sleep(min(_LONGEST_PAUSE_S, _FORGOTTEN_PAUSE_S * 2 ** (self._times_forgotten - 2)))

    async def _end_when_lost(self, incarnation: int, scope: anyio.CancelScope) -> None:
        async with anyio.create_task_group() as tasks:

            async def forgot() -> None:
                await self._forgot.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(forgot)
            await self._engine.lost(incarnation)
            tasks.cancel_scope.cancel()
        self._log.warning("replica_lost", incarnation=incarnation, in_flight=self.in_flight)
        scope.cancel()

    async def _serve(self, client: ReplicaClient) -> None:
        base = await base_name(client, self._config)
        adapters = Adapters(client, self._bucket, self._run, self._scratch, base_name=base, root=adapter_root(self._config))
        adapters.refused = self.refused
        proven, unusable = False, 0
        while True:
            await self._unload(adapters)
            target = self._target(self._follower.view)
            try:
                if target is not None:
                    if not proven:
                        await adapters.prove(*target)
                        proven = True
                        self.adapters, self.client = adapters, client
                    await self._sync(adapters, target)
            except UnknownAdapter as error:  # loaded a moment ago: it was restarted
                self._log.warning("adapter_forgotten", replica=self.url, error=str(error))
                self.forgot()
                await anyio.sleep_forever()
            except Refused as error:
                raise NotReady(f"replica {client.url} refuses to score the probe: {error}") from error
            except WireError as error:  # of the manifest that the probe is in: another version may have a sound one
                assert target is not None
                self.refused[target] = str(error)
                self._log.error("version_refused", version=target[0], epoch=target[1], error=str(error))
                self.notice.tell()
                continue
            except (Unavailable, BucketError, UnusableAnswer) as error:  # for now: the next turn tries again
                self.complain("sync_failed", reason=type(error).__name__, error=str(error))
                if isinstance(error, NotFound) and target is not None and target != self._newest(self._follower.view):
                    self._good.pop(target, None)  # the learner has deleted it
                unusable = unusable + 1 if isinstance(error, UnusableAnswer) else 0
                if unusable == _UNUSABLE:
                    raise NotReady(f"replica {client.url} gives no usable answer: {error}") from error
                await anyio.sleep(_AGAIN_S)
                continue
            if target is not None:
                unusable = 0
                self._forgive("sync_failed")
            await self._unload(adapters)
            if target == self._target(self._follower.view):
                await self.notice.wait()

    def _newest(self, view: View) -> tuple[int, int] | None:
        return None if view.state is None or view.state.version is None else (view.state.version, view.state.epoch)

    def _target(self, view: View) -> tuple[int, int] | None:
        """The newest version that counts; while it is refused the newest good one that is not too old yet."""
        newest = self._newest(view)
        if newest is None or not view.lineage.canonical(*newest):
            return None
        if newest not in self.refused:
            return newest
        good = [key for key, served in self._good.items() if key not in self.refused and not self._beyond_use(served)]
        return max(good, key=lambda key: (key[1], key[0]), default=None)

    async def _sync(self, adapters: Adapters, target: tuple[int, int]) -> None:
        if self.current is None or self.current.key != target or target not in adapters.resident:
            if self._bringing_since is None:
                self._bringing_since = anyio.current_time()
            with contextlib.suppress(VersionRefused):  # remembered and told in the generator's state; the one before goes on
                self.current = await self._bring(adapters, target)
                self._good[target] = self.current
                if self._lost_at is not None:
                    self._log.info("replica_back", replica=self.url, seconds=round(anyio.current_time() - self._lost_at, 1))
                    self._lost_at = None
                while len(self._good) > self._config.run.max_lag + 2:
                    del self._good[next(iter(self._good))]
            self._bringing_since = None
            self.notice.tell()
        for key in [key for key, count in self._users.items() if count and key not in adapters.resident]:
            try:  # of groups that were in flight when the replica was lost
                await self._bring(adapters, key)
            except VersionRefused:
                pass
            except NotFound:
                self._deleted.add(key)
            self.notice.tell()

    async def _bring(self, adapters: Adapters, key: tuple[int, int]) -> Served:
        unproven = adapters.unproven
        new = key not in adapters.resident
        served = await adapters.bring(*key)
        if new:
            self.brought.append(served.took)
        if adapters.unproven > unproven:
            self.unproven.add(key)
        return served

    async def _unload(self, adapters: Adapters) -> None:
        for served in list(adapters.resident.values()):
            if served is not self.current and not self._users[served.key]:
                await adapters.drop(served)

    async def _abort_stale(self) -> None:
        """Whatever the replica does meanwhile, and also while it is away."""
        while True:
            for key, scopes in self._scopes.items():
                lag = self._lag(self._held[key]) if scopes else None
                if lag is not None and lag > self._config.run.max_lag:
                    for scope in scopes:
                        scope.cancel()
            await self.notice.wait()

    def _lag(self, served: Served) -> int | None:
        """Positions behind what the learner has announced."""
        view = self._follower.view
        if view.state is None or view.state.pos is None:
            return None
        return view.state.pos - view.lineage.pos(served.version, served.epoch, served.manifest.pos)

    def _beyond_use(self, served: Served) -> bool:
        """Nothing that is made under it is trained: it is too old, or of another lineage."""
        lag = self._lag(served)
        return not self._follower.view.lineage.canonical(*served.key) or (lag is not None and lag > self._config.run.max_lag)

    def ready_version(self) -> Served | None:
        """Under which a new group may begin: the newest; the one before while the newest is refused, or is long in coming."""
        view, current = self._follower.view, self.current
        newest = self._newest(view)
        if current is None or newest is None or self.adapters is None or not view.lineage.canonical(*current.key):
            return None
        lag, most = self._lag(current), self._config.run.max_lag
        if lag is None:
            return None
        if lag <= 0:
            return current
        if newest in self.refused:
            if lag <= most:
                return current
            if self._said_waiting != newest:
                self._said_waiting = newest
                self._log.error("no_version_to_serve", refused=newest[0], last_good=current.version, lag=lag)
        elif lag < most and self._bringing_since is not None and anyio.current_time() - self._bringing_since >= PATIENCE_S:
            return current
        return None

    @contextlib.contextmanager
    def use(self, served: Served) -> Iterator[anyio.CancelScope]:
        """Holds the version for one group; the scope is cancelled when the version has outlived max_lag."""
        self._users[served.key] += 1
        self._held[served.key] = served
        self.in_flight += 1
        with anyio.CancelScope() as scope:
            self._scopes.setdefault(served.key, set()).add(scope)
            try:
                yield scope
            finally:
                self._scopes[served.key].discard(scope)
                self._users[served.key] -= 1
                if not self._users[served.key]:
                    del self._users[served.key], self._scopes[served.key], self._held[served.key]
                self.in_flight -= 1
                self.ended += 1
                self.notice.tell()

    async def holding(self, served: Served) -> ReplicaClient | None:
        """Waits until the replica (again) holds that version. None: it never will: refused, deleted, or no longer canonical."""
        while True:
            canonical = self._follower.view.lineage.canonical(*served.key)
            if self.failure or not canonical or served.key in self.refused or served.key in self._deleted:
                return None
            if self.adapters is not None and served.key in self.adapters.resident:
                return self.client
            await self.notice.wait()

    def complain(self, event: str, *, reason: str, **fields: object) -> None:
        """A warning for the first of its kind, until groups succeed again; a stumbling replica must not fill the log."""
        kind = (event, reason)
        (self._log.debug if kind in self._complained else self._log.warning)(event, replica=self.url, reason=reason, **fields)
        self._complained.add(kind)

    def praise(self) -> None:
        """A sound group came."""
        self._times_forgotten = 0
        self._complained = {
            kind for kind in self._complained if kind[0] in ("replica_refused", "sync_failed")
        }  # other's faults

    def _forgive(self, event: str) -> None:
        self._complained = {kind for kind in self._complained if kind[0] != event}

    def forgot(self) -> None:
        """The replica no longer knows an adapter: it was restarted, or somebody else unloads there."""
        self._forgot.set()


def _first(errors: BaseExceptionGroup[NotReady]) -> NotReady:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
