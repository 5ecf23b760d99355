"""One replica of this generator, and which versions it serves right now.

ready ─▶ canary ─▶ newest canonical version ─▶ serving ─┬─ newer version: fetch, load, attest, then current
  ▲                                                     ├─ a version that nothing uses: unloaded
  └───────── gone, or it has forgotten an adapter ◀─────┴─ requests that outlived max_lag: aborted, their group is stale

consumes   the follower's view            unblocks   the loop (`current`), groups that wait for their version (`serve`)
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import anyio

from grpod.bucket.base import Bucket
from grpod.config import Config
from grpod.errors import BucketError, NotReady, WireError
from grpod.generator.engine import Engine, adapter_root, lora_rank
from grpod.generator.token_file import TokenFile
from grpod.replica.adapters import BASE, Adapters, Served, VersionRefused
from grpod.replica.client import Refused, ReplicaClient, ServerInfo, Unavailable, UnknownAdapter, UnusableAnswer
from grpod.run.follow import Follower, View
from grpod.run.notice import Notice
from grpod.telemetry.log import get_logger
from grpod.wire.run import Run

_INFO_TRIES = 10
_UNUSABLE = 4  # turns in a row in which not even the base or the canary could be scored


class Station:
    """`current`, `client` and `incarnation` are None or stale while the replica is away; `in_flight` counts groups."""

    def __init__(
        self, engine: Engine, config: Config, bucket: Bucket, run: Run, follower: Follower, scratch: Path, token: TokenFile
    ) -> None:
        self._engine, self._config, self._bucket, self._run = engine, config, bucket, run
        self._follower, self._scratch, self._token = follower, scratch, token
        self._log = get_logger()
        self._users: Counter[tuple[int, int]] = Counter()
        self._scopes: dict[tuple[int, int], set[anyio.CancelScope]] = {}
        self._forgot = anyio.Event()
        self._life = anyio.CancelScope()
        self._complained: set[tuple[str, str]] = set()
        self._said_waiting: tuple[int, int] | None = None
        self.notice: Notice = follower.notice
        self.current: Served | None = None
        self.adapters: Adapters | None = None
        self.client: ReplicaClient | None = None
        self.refused: dict[tuple[int, int], str] = {}
        self.in_flight = 0
        self.failure: NotReady | None = None

    @property
    def url(self) -> str:
        return self._engine.url

    async def run(self) -> None:
        """Until it is cancelled, or `failure` says why this replica is of no use: given up, or not what the run needs."""
        with self._life:
            try:
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
                await self._serve(client)
            self.current = self.adapters = self.client = None
            self.notice.tell()

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
        base_name = await self._check(client)
        adapters = Adapters(
            client, self._bucket, self._run, self._scratch, base_name=base_name, root=adapter_root(self._config)
        )
        adapters.refused = self.refused
        proven, unusable = False, 0
        while True:
            target = self._target(self._follower.view)
            if target is not None:
                try:
                    if not proven:
                        await adapters.prove(*target)
                        proven = True
                        self.adapters, self.client = adapters, client
                    await self._sync(adapters, target)
                except UnknownAdapter as error:  # loaded a moment ago: it was restarted
                    self._log.warning("adapter_forgotten", version=target[0], error=str(error))
                    self.forgot()
                    await anyio.sleep_forever()
                except Refused as error:
                    raise NotReady(f"replica {client.url} refuses to score the probe: {error}") from error
                except WireError as error:  # of the manifest that the probe is in: another version may have a sound one
                    self.refused[target] = str(error)
                    self._log.error("version_refused", version=target[0], epoch=target[1], error=str(error))
                    continue
                except (Unavailable, BucketError, UnusableAnswer) as error:  # for now: the next turn tries again
                    self._log.warning("sync_failed", version=target[0], error=str(error))
                    unusable = unusable + 1 if isinstance(error, UnusableAnswer) else 0
                    if unusable == _UNUSABLE:
                        raise NotReady(f"replica {client.url} gives no usable answer: {error}") from error
                    await anyio.sleep(1.0)
                    continue
            unusable = 0
            if target == self._target(self._follower.view):
                await self.notice.wait()

    def _target(self, view: View) -> tuple[int, int] | None:
        """The newest version that counts, unless it was refused."""
        if view.state is None or view.state.version is None:
            return None
        key = (view.state.version, view.state.epoch)
        return key if view.lineage.canonical(*key) and key not in self.refused else None

    async def _sync(self, adapters: Adapters, target: tuple[int, int]) -> None:
        if target not in adapters.resident or (self.current is None or self.current.key != target):
            with contextlib.suppress(VersionRefused):  # remembered and told in the generator's state; the one before goes on
                self.current = await adapters.bring(*target)
            self.notice.tell()
        for key in [key for key, count in self._users.items() if count and key not in adapters.resident]:
            if self.lag(key, adapters) is None:  # of groups that were in flight when the replica was lost
                with contextlib.suppress(VersionRefused):
                    await adapters.bring(*key)
                self.notice.tell()
        for served in list(adapters.resident.values()):
            lag = self.lag(served.key, adapters)
            if lag is not None and lag > self._config.run.max_lag:
                for scope in self._scopes.get(served.key, set()):
                    scope.cancel()
            if served is not self.current and not self._users[served.key]:
                await adapters.drop(served)

    def lag(self, key: tuple[int, int], adapters: Adapters | None = None) -> int | None:
        """Positions behind what the learner has announced; None: the version is not resident."""
        adapters = adapters or self.adapters
        served = adapters.resident.get(key) if adapters else None
        view = self._follower.view
        if served is None or view.state is None or view.state.pos is None:
            return None
        return view.state.pos - view.lineage.pos(served.version, served.epoch, served.manifest.pos)

    def ready_version(self) -> Served | None:
        """Under which a new group may begin: the newest, or while that one is refused the last good one until it is too old."""
        view, current = self._follower.view, self.current
        if current is None or view.state is None or view.state.version is None or self.adapters is None:
            return None
        if not view.lineage.canonical(*current.key):
            return None
        lag = self.lag(current.key)
        if lag is None:
            return None
        newest = (view.state.version, view.state.epoch)
        if lag <= 0 or (newest in self.refused and lag <= self._config.run.max_lag):
            return current
        if newest in self.refused and self._said_waiting != newest:
            self._said_waiting = newest
            self._log.error("no_version_to_serve", refused=newest[0], last_good=current.version, lag=lag)
        return None

    @contextlib.contextmanager
    def use(self, served: Served) -> Iterator[anyio.CancelScope]:
        """Holds the version for one group; the scope is cancelled when the version has outlived max_lag."""
        self._users[served.key] += 1
        self.in_flight += 1
        with anyio.CancelScope() as scope:
            self._scopes.setdefault(served.key, set()).add(scope)
            try:
                yield scope
            finally:
                self._scopes[served.key].discard(scope)
                self._users[served.key] -= 1
                self.in_flight -= 1
                self.notice.tell()

    async def holding(self, served: Served) -> ReplicaClient | None:
        """Waits until the replica (again) holds that version. None: it never will: refused, or no longer canonical."""
        while True:
            if self.failure or not self._follower.view.lineage.canonical(*served.key) or served.key in self.refused:
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
        self._complained -= {kind for kind in self._complained if kind[0] != "replica_refused"}  # that is the prompt's fault

    def forgot(self) -> None:
        """The replica no longer knows an adapter: it was restarted, or somebody else unloads there."""
        self._forgot.set()

    async def _ask_settings(self, client: ReplicaClient) -> tuple[ServerInfo, list[str]]:
        for left in reversed(range(_INFO_TRIES)):
            try:
                return await client.server_info(), await client.models()
            except Refused as error:
                raise NotReady(
                    f"replica {client.url} does not tell its settings: {error}; vLLM needs VLLM_SERVER_DEV_MODE=1"
                ) from error
            except (Unavailable, UnusableAnswer) as error:
                if not left:
                    raise NotReady(f"replica {client.url} does not tell its settings: {error}") from error
                await anyio.sleep(1.0)
        raise AssertionError("unreachable")

    async def _check(self, client: ReplicaClient) -> str:
        """The name of its base model. Raises NotReady when it cannot serve this run."""
        info, models = await self._ask_settings(client)
        config = self._config
        slots, rank = config.run.max_lag + 2, lora_rank(config.lora.rank)
        wrong = [] if models else ["it lists no model"]
        if info.max_loras == 0:
            wrong.append("LoRA is off: it needs --enable-lora")
        elif info.max_loras < slots:
            wrong.append(f"--max-loras is {info.max_loras}, run.max_lag {config.run.max_lag} needs {slots}")
        if info.max_loras and info.max_lora_rank < config.lora.rank:
            wrong.append(f"--max-lora-rank is {info.max_lora_rank}, lora.rank {config.lora.rank} needs {rank}")
        if info.logprobs_mode and info.logprobs_mode != "processed_logprobs":
            wrong.append(f"--logprobs-mode is {info.logprobs_mode}, processed_logprobs is needed")
        if info.max_model_len is not None and info.max_model_len < config.model.max_model_len:
            wrong.append(f"--max-model-len is {info.max_model_len}, model.max_model_len is {config.model.max_model_len}")
        if wrong:
            raise NotReady(f"replica {client.url} cannot serve this run: {'; '.join(wrong)}")
        return models[0] if config.generator.engine == "remote" else BASE


def _first(errors: BaseExceptionGroup[NotReady]) -> NotReady:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
