"""What the tests of `run/` share: claims and documents in one line each, and a clock that only a waiting bucket moves on."""

from __future__ import annotations

from typing import Any

import anyio.lowlevel

from grpod.bucket.memory import MemoryBucket
from grpod.run.process import this_holder
from grpod.run.waiting import Clock
from grpod.wire.lease import Claim, Holder, ResumedFrom

ELSEWHERE = Holder(host="elsewhere", boot_id="another-boot", pid_ns="pid:[1]", pid=7, start_ticks=1)


def claim(epoch: int, first_version: int = 0, resumed: tuple[int, int, int, int] | None = None, **more: Any) -> Claim:
    """resumed: (step, version, epoch, pos)"""
    origin = ResumedFrom(step=resumed[0], version=resumed[1], epoch=resumed[2], pos=resumed[3]) if resumed else None
    fields = {"run_id": "r", "nonce": f"n{epoch}", "holder": ELSEWHERE, "created_at": 0.0, **more}
    return Claim(epoch=epoch, first_version=first_version, resumed_from=origin, **fields)


class Stop:
    requested = False


class ManualTime:
    """Seconds pass only when somebody waits for the bucket, and while a process is stopped (`now += …`)."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.clock = Clock(monotonic=lambda: self.now, boottime=lambda: self.now, wall=lambda: self.now)


class TimedBucket(MemoryBucket):
    """`changed` takes no real time, but all of the manual time; `on_wait` is called before each."""

    def __init__(self, url: str, time: ManualTime) -> None:
        super().__init__(url)
        self.time = time
        self.on_wait: Any = None

    async def changed(self, timeout_s: float) -> None:
        await anyio.lowlevel.checkpoint()
        self.time.now += timeout_s
        if self.on_wait:
            await self.on_wait()


def dead_here() -> Holder:
    """A holder of this machine whose process is gone: its pid now belongs to one that was started at another time."""
    me = this_holder()
    return me.model_copy(update={"start_ticks": me.start_ticks + 1})
