"""state/learner.json: what the fleet goes by (version, credits, what is waited for), written whenever it has changed.

Puts follow one another without a pause between, so that credit goes out with every end of a step; where a put takes seconds,
what changes meanwhile goes out together with the next.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from grpod.bucket.base import Bucket
from grpod.errors import BucketError
from grpod.run.notice import Notice
from grpod.telemetry.log import get_logger
from grpod.wire import keys
from grpod.wire.state import LearnerState


class Announcer:
    def __init__(self, bucket: Bucket, compose: Callable[[int], LearnerState], *, period_s: float = 5.0) -> None:
        self._bucket, self._compose, self._period_s = bucket, compose, period_s
        self._dirty = True
        self._notice = Notice()
        self._counter = 0
        self._failing = False
        self._log = get_logger()

    def touch(self) -> None:
        self._dirty = True
        self._notice.tell()

    async def run(self) -> None:
        while True:
            if not self._dirty:
                await self._notice.wait(self._period_s)
            if not await self.write():
                await anyio.sleep(1.0)
                self._dirty = True

    async def write(self) -> bool:
        """False: it could not be written; the next one says more, and a bucket that stays away ends the lease."""
        self._dirty = False
        self._counter += 1
        try:
            await self._bucket.put({keys.LEARNER_STATE: self._compose(self._counter).encode()})
        except BucketError as error:
            if not self._failing:
                self._log.warning("state_not_written", error=str(error))
            self._failing = True
            return False
        self._failing = False
        return True
