"""Finished groups -> rollouts/<generator>/<seq>.parquet, and the generator's state, which tells what became of the others.

A finished group is shipped at the latest `ship_every_s` after it was done; at once when the learner waits for groups, or when
nothing else is in flight and no credit is left. The object is written before the state that counts it, so that whoever dies
between the two leaves nothing that is counted twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable

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
        hurry: Callable[[], bool],
        describe: Callable[[], tuple[list[str], list[str]]],
    ) -> None:
        """`hurry`: ship now. `describe`: (resident versions, refused versions)."""
        self.name = name
        self.begun = 0
        self.open: set[str] = set()  # begun and not shipped
        self.reasons: dict[str, int] = {}
        self._bucket, self._config, self._fingerprint, self._device = bucket, config, base_fingerprint, device
        self._notice, self._hurry, self._describe = notice, hurry, describe
        self._ready: list[Group | Drop] = []
        self._size = 0
        self._oldest = 0.0  # when the first of `_ready` was done
        self._next_seq = 0
        self._counter = 0
        self._started_at = time.time()
        self._stated_at = float("-inf")
        self._refused: list[str] = []  # versions, as the state tells
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
        if not self._ready:
            self._oldest = anyio.current_time()
        self._ready.append(result)
        if isinstance(result, Group):
            self._size += _BYTES_PER_TOKEN * sum(len(r.completion_ids) + len(result.prompt_ids) for r in result.rollouts)
        else:
            self.reasons[result.reason] = self.reasons.get(result.reason, 0) + 1
        self._notice.tell()

    def give_up(self, drop: Drop) -> None:
        """A group that was cut off while it was being made."""
        if all(item.group_id != drop.group_id for item in self._ready):
            self.done(drop)

    @property
    def in_flight(self) -> int:
        return len(self.open) - len(self._ready)

    async def run(self) -> None:
        period = self._config.generator.state_every_s
        failing = False
        while self._closing is None or self._ready:
            now = anyio.current_time()
            try:
                if self._ready and self._due(now):
                    await self._ship()
                elif now - self._stated_at >= period or self._describe()[1] != self._refused:
                    await self._state()
                else:
                    await self._notice.wait(min(period, self._config.generator.ship_every_s) / 2)
                    continue
                failing = False
            except BucketError as error:  # nothing is lost: what is ready stays ready
                if not failing:
                    self._log.warning("not_shipped", groups=len(self._ready), error=str(error))
                failing = True
                await anyio.sleep(1.0)
        await self._state()

    def close(self, reason: str, *, hopeless: bool = False) -> None:
        """Ship what is ready, tell why it ended, and be done. `hopeless`: no other generator of this run will do better."""
        self._closing, self._hopeless = reason, hopeless
        self._notice.tell()

    def _due(self, now: float) -> bool:
        late = now - self._oldest >= self._config.generator.ship_every_s
        return late or self._closing is not None or self._size >= _MAX_BYTES or self._hurry()

    async def _ship(self) -> None:
        batch = list(self._ready)
        shipment = Shipment(
            base_fingerprint=self._fingerprint,
            groups=tuple(item for item in batch if isinstance(item, Group)),
            drops=tuple(item for item in batch if isinstance(item, Drop)),
        )
        data = await anyio.to_thread.run_sync(encode_shipment, shipment)
        try:
            await self._bucket.put({keys.rollout(self.name, self._next_seq): data}, create=True)
        except AlreadyExists:  # our own, from a try whose answer was lost; what it holds was in this batch too
            self._log.warning("already_shipped", seq=self._next_seq)
            self._next_seq += 1
            return
        self._next_seq += 1
        del self._ready[: len(batch)]
        self.open -= {item.group_id for item in batch}
        self._size, self._oldest = 0, anyio.current_time()
        await self._state()

    async def _state(self) -> None:
        self._counter += 1
        resident, refused = self._describe()
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
        self._stated_at, self._refused = anyio.current_time(), refused
