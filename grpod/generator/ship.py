"""Finished groups -> rollouts/<generator>/<seq>.parquet, and the generator's state, which tells what became of the others.

A finished group is shipped at the latest `ship_every_s` after it was done; at once when the learner waits for groups and has
what it waits for, or nothing else is in flight. The object is written before the state that counts it, so that whoever dies
between the two leaves nothing that is counted twice. The state may wait for what is due: readers look a little beyond it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import anyio
import anyio.to_thread

from grpod.bucket.base import Bucket
from grpod.config import Config
from grpod.errors import AlreadyExists, BucketError
from grpod.run.notice import Notice
from grpod.telemetry.log import get_logger
from grpod.wire import keys
from grpod.wire.rollout import Drop, Group, Shipment, encode_shipment
from grpod.wire.state import GeneratorState

_MAX_BYTES = 8 * 2**20
_BYTES_PER_TOKEN = 9  # ids, log-probs, masks, before compression
_BYTES_PER_DROP = 100
_COMPANIONS_S = 0.01  # a learner that waits: a group's companions finish within milliseconds, and one object is read faster
_AGAIN_S, _LAST_TRIES = 1.0, 3  # after the bucket has failed
_UNSTATED = 2  # objects that may go out before the state that counts them: what the learner's feed looks ahead


@dataclass(frozen=True, kw_only=True)
class _Ready:
    result: Group | Drop
    size: int  # bytes, roughly
    at: float  # when it was done


@dataclass(frozen=True, kw_only=True)
class _Sealed:
    """One object, once it has been tried: what may stand in the bucket already is not put there with other contents."""

    data: bytes
    count: int  # of the first that are ready
    tried: bool = False


class Outbox:
    """One life of a generator: its name, its groups, its objects. `run` ships until it is closed."""

    def __init__(
        self,
        bucket: Bucket,
        config: Config,
        *,
        name: str,
        base_fingerprint: str,
        device: str,
        notice: Notice,
        awaited: Callable[[], int],
        describe: Callable[[], tuple[list[str], list[str]]],
        epoch: Callable[[], int],
        reward_names: Sequence[str] = (),
    ) -> None:
        """`awaited`: groups that somebody waits for. `describe`: (resident versions, refused versions). `epoch`: of the
        learner that is followed: a new one gives credit to who tells it that it lives."""
        self.name = name
        self.begun = 0
        self.open: set[str] = set()  # begun and not shipped
        self.reasons: dict[str, int] = {}
        self._bucket, self._config, self._fingerprint, self._device = bucket, config, base_fingerprint, device
        self._notice, self._awaited, self._describe, self._epoch = notice, awaited, describe, epoch
        self._reward_names = tuple(reward_names)
        self._ready: list[_Ready] = []
        self._sealed: _Sealed | None = None
        self._next_seq = 0
        self._unstated = 0  # objects since the last state
        self._counter = 0
        self._started_at = time.time()
        self._stated_at = float("-inf")
        self._refused: list[str] = []  # versions, as the state tells
        self._told_epoch = -1  # to which the newest state was written
        self._closing: str | None = None
        self._hopeless = False
        self._log = get_logger(generator=name)

    def begin(self) -> str:
        """The id of a new group."""
        group_id = f"{self.name}/{self.begun}"
        self.begun += 1
        self.open.add(group_id)
        return group_id

    def done(self, result: Group | Drop) -> None:
        size = _BYTES_PER_DROP
        if isinstance(result, Group):
            size = _BYTES_PER_TOKEN * sum(len(r.completion_ids) + len(result.prompt_ids) for r in result.rollouts)
        else:
            self.reasons[result.reason] = self.reasons.get(result.reason, 0) + 1
        self._ready.append(_Ready(result=result, size=size, at=anyio.current_time()))
        self._notice.tell()

    def give_up(self, drop: Drop) -> None:
        """A group that was cut off while it was being made."""
        if all(ready.result.group_id != drop.group_id for ready in self._ready):
            self.done(drop)

    @property
    def in_flight(self) -> int:
        return len(self.open) - len(self._ready)

    async def run(self) -> None:
        """Until it is closed and all is shipped. Cancelled, or unable to tell its last state, it says what was not told."""
        try:
            await self._run()
            await self._last_state()
        finally:
            if self._ready:
                self._log.error(
                    "groups_not_shipped",
                    groups=len(self._ready),
                    why="the bucket did not take them in time: they count as lost",
                )

    async def _last_state(self) -> None:
        for left in reversed(range(_LAST_TRIES)):
            try:
                await self._state()
                return
            except BucketError as error:  # the groups are there; that this generator has ended, its silence will tell
                if not left:
                    self._log.warning("last_state_not_written", error=str(error))
                    return
            await anyio.sleep(_AGAIN_S)

    async def _run(self) -> None:
        period = self._config.generator.state_every_s
        failing = False
        while self._closing is None or self._ready:
            now = anyio.current_time()
            due_s = self._due_s(now)
            try:
                if due_s <= 0 and self._unstated < _UNSTATED:
                    await self._ship()
                elif self._unstated or now - self._stated_at >= period or self._news():
                    await self._state()
                else:
                    await self._notice.wait(min(due_s, self._stated_at + period - now))
                    continue
                failing = False
            except BucketError as error:  # nothing is lost: what is ready stays ready
                if not failing:
                    self._log.warning("not_shipped", groups=len(self._ready), error=str(error))
                failing = True
                await anyio.sleep(_AGAIN_S)

    def _news(self) -> bool:
        return self._describe()[1] != self._refused or self._epoch() != self._told_epoch

    def close(self, reason: str, *, hopeless: bool = False) -> None:
        """Ship what is ready, tell why it ended, and be done. `hopeless`: no other generator of this run will do better."""
        self._closing, self._hopeless = reason, hopeless
        self._notice.tell()

    def _due_s(self, now: float) -> float:
        """Seconds until something is to be shipped; infinite when nothing is ready."""
        if not self._ready:
            return math.inf
        if self._closing is not None or sum(ready.size for ready in self._ready) >= _MAX_BYTES:
            return 0.0
        waited_s, awaited = now - self._ready[0].at, self._awaited()
        if not awaited:
            return self._config.generator.ship_every_s - waited_s
        groups = sum(isinstance(ready.result, Group) for ready in self._ready)
        return 0.0 if groups >= awaited or self.in_flight == 0 else _COMPANIONS_S - waited_s

    async def _ship(self) -> None:
        if self._sealed is None:
            self._sealed = await self._seal()
        sealed = self._sealed
        self._sealed = replace(sealed, tried=True)
        try:
            await self._bucket.put({keys.rollout(self.name, self._next_seq): sealed.data}, create=True)
        except AlreadyExists:
            if not sealed.tried:
                raise
            self._log.info("already_shipped", seq=self._next_seq)  # by a try whose answer was lost
        self._next_seq += 1
        self._unstated += 1
        self._sealed = None
        self.open -= {ready.result.group_id for ready in self._ready[: sealed.count]}
        del self._ready[: sealed.count]

    async def _seal(self) -> _Sealed:
        """The first ones that are ready, as many as fit into one object."""
        count = size = 0
        while count < len(self._ready) and (count == 0 or size + self._ready[count].size <= _MAX_BYTES):
            size += self._ready[count].size
            count += 1
        batch = [ready.result for ready in self._ready[:count]]
        shipment = Shipment(
            base_fingerprint=self._fingerprint,
            groups=tuple(item for item in batch if isinstance(item, Group)),
            drops=tuple(item for item in batch if isinstance(item, Drop)),
        )
        return _Sealed(data=await anyio.to_thread.run_sync(encode_shipment, shipment, self._reward_names), count=count)

    async def _state(self) -> None:
        self._counter += 1
        unstated = self._unstated
        resident, refused = self._describe()
        epoch = self._epoch()
        state = GeneratorState(
            generator=self.name,
            counter=self._counter,
            begun=self.begun,
            open=sorted(self.open),
            next_seq=self._next_seq,
            resident=resident,
            refused=refused,
            url=self._config.generator.advertise or None,
            device=self._device,
            ended=self._closing if self._closing is not None and not self._ready else None,
            hopeless=self._hopeless,
            started_at=self._started_at,
            updated_at=time.time(),
            period_s=self._config.generator.state_every_s,
        )
        await self._bucket.put({keys.generator_state(self.name): state.encode()})
        self._stated_at, self._refused, self._told_epoch = anyio.current_time(), refused, epoch
        self._unstated -= unstated
