"""How many groups may be in flight at one replica: as many as keep its queue short and its KV cache full enough.

    /metrics, every second                                    limit
    the KV cache ran over (preemptions), or is all but full   nine tenths of what fits, and twice as long until it grows again
    sequences wait, twice in a row                            what runs, and one group
    no queue, room in the cache, and the limit was reached    doubled, until it shrank once; from then on an eighth more, each
                                                              time that as many groups have ended as may be in flight

More than that only makes rollouts older; less leaves the device idle. A lower limit shows its effect only when what is in
flight has come down to it, and a higher one when its completions have grown long: it is not moved again before. What the
replica does not tell stays at `UNTOLD`. The watcher also says when a replica has stopped: sequences are there, and no token
comes out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import anyio

from grpod.replica.client import Refused, ReplicaClient, Unavailable, UnusableAnswer
from grpod.replica.load import Load

FIRST, UNTOLD = 16, 32  # groups
EVERY_S = 1.0
HUNG_S = 300.0  # without a token: longer than any prefill or compilation while serving, on a CPU too
KV_FULL, KV_ROOM = 0.95, 0.85
SHRINK, GROW = 0.9, 1 / 8
RAREST = 64  # times that all groups in flight have ended, between two tries to have more of them
SHORT_QUEUE = 0.1  # of what runs: new requests wait for the next step of the engine, and that is no queue


@dataclass(frozen=True, kw_only=True)
class Crowd:
    limit: int = FIRST
    """groups"""
    growing: bool = True
    """it has never shrunk"""
    queued: int = 0
    """looks in a row that found a queue"""
    preemptions: int | None = None
    """at the last look"""
    moved_at: int = 0
    """groups that had ended when the limit was moved"""
    wait: int = 1
    """times that all groups in flight end before it grows; doubled whenever the cache ran over, halved by growing"""

    def after(self, load: Load, *, group_size: int, in_flight: int, ended: int, reached: bool) -> Crowd:
        """Of groups: `in_flight` now, `ended` since the start. `reached`: the limit kept some from being begun since the
        last look."""
        ran_over = self.preemptions is not None and load.preemptions > self.preemptions
        queue = load.waiting > max(group_size, SHORT_QUEUE * load.running)
        seen = replace(self, preemptions=load.preemptions, queued=self.queued + 1 if queue else 0)
        if in_flight > self.limit:
            return seen
        fits = in_flight * load.running / max(1, load.running + load.waiting)
        if in_flight and (ran_over or load.kv_usage > KV_FULL):
            wait = min(RAREST, 2 * self.wait)
            return replace(seen, limit=max(1, int(fits * SHRINK)), growing=False, moved_at=ended, wait=wait)
        if in_flight and seen.queued >= 2 and load.running:  # half at most: after a restart all prefill at once, and few run
            limit = min(self.limit, max(int(fits) + 1, self.limit // 2))
            return replace(seen, limit=limit, growing=False, moved_at=ended)
        if reached and not queue and load.kv_usage < KV_ROOM:
            if self.growing:
                return replace(seen, limit=self.limit * 2, moved_at=ended)
            if ended - self.moved_at >= self.limit * self.wait:
                limit = self.limit + max(1, int(self.limit * GROW))
                return replace(seen, limit=limit, moved_at=ended, wait=max(1, self.wait // 2))
        return seen


class CrowdWatch:
    """Of one replica, over all its incarnations. Owned by its station; the loop reads `limit` and says when it was reached."""

    def __init__(self, *, fixed: int | None, group_size: int) -> None:
        self._fixed, self._group_size = fixed, group_size
        self._crowd = Crowd()
        self._tells = True
        self.load: Load | None = None  # at the last look
        self.reached = False

    @property
    def limit(self) -> int:
        if self._fixed is not None:
            return self._fixed
        return self._crowd.limit if self._tells else UNTOLD

    async def watch(self, client: ReplicaClient, *, in_flight: Callable[[], int], ended: Callable[[], int]) -> None:
        """Returns when the replica has stopped: it was asked for something (a group, a score, a load), and for HUNG_S it has
        produced nothing."""
        self._crowd = replace(self._crowd, preemptions=None, queued=0)
        tokens, moved = -1, anyio.current_time()
        while True:
            await anyio.sleep(EVERY_S)
            now = anyio.current_time()
            try:
                load = await client.load()
            except (Unavailable, UnusableAnswer):  # somebody else's care: the supervisor, and whoever waits for an answer
                moved = now
                continue
            except Refused:
                load = None
            self.load, self._tells = load, load is not None
            if load is None:
                return await anyio.sleep_forever()
            self._crowd = self._crowd.after(
                load, group_size=self._group_size, in_flight=in_flight(), ended=ended(), reached=self.reached
            )
            self.reached = False
            if load.tokens != tokens or not client.outstanding:
                tokens, moved = load.tokens, now
            elif now - moved >= HUNG_S:
                return None
