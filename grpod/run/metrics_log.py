"""A role's numbers, from memory to write-once segments of `metrics/<who>/`.

    add ─▶ rows ── once a period, and at a flush ──▶ segment <seq> ─▶ bucket

<who> is new at every start (`learner-e<epoch>`, or the generator's name), so a segment that is already there after a failed
put is that very put, applied after all. A segment that could not be written is kept as it is, and tried again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import anyio
import anyio.to_thread

from grpod.bucket.base import Bucket
from grpod.errors import AlreadyExists, BucketError
from grpod.telemetry.log import get_logger
from grpod.telemetry.metrics import describe
from grpod.wire import keys
from grpod.wire.tables import Metric, encode_metrics

PERIOD_S: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class _Segment:
    seq: int
    data: bytes


class MetricWriter:
    def __init__(self, bucket: Bucket, who: str, *, period_s: float = PERIOD_S, wall: Callable[[], float] = time.time) -> None:
        self._bucket = bucket
        self._who = who
        self._period_s = period_s
        self._wall = wall
        self._rows: list[Metric] = []
        self._unsure: _Segment | None = None  # its put has failed: perhaps applied, perhaps not
        self._next_seq = 0
        self._lock = anyio.Lock()
        self._log = get_logger()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Names are those of telemetry/metrics.py. What is no finite number is left out: it has no place on a curve."""
        now = self._wall()
        for name, value in values.items():
            assert describe(name)
            if math.isfinite(value):
                self._rows.append(Metric(time=now, step=step, name=name, value=float(value)))

    async def run(self) -> None:
        """Until it is cancelled. While the bucket is away the numbers wait in memory."""
        failing = False
        while True:
            await anyio.sleep(self._period_s)
            try:
                await self.flush()
                failing = False
            except BucketError as error:
                if not failing:
                    self._log.warning("metrics_not_written", error=str(error))
                failing = True

    async def flush(self) -> None:
        """All that was added so far stands in the bucket when it returns; raises `BucketError`."""
        async with self._lock:
            if self._unsure is not None:
                await self._write(self._unsure)
            if self._rows:
                rows, self._rows = self._rows, []
                # from here on the rows live in the segment, also when this task is cancelled
                self._unsure = _Segment(seq=self._next_seq, data=encode_metrics(rows))
                self._next_seq += 1
                await self._write(self._unsure)

    async def _write(self, segment: _Segment) -> None:
        try:
            await self._bucket.put({keys.metrics(self._who, segment.seq): segment.data}, create=True)
        except AlreadyExists:
            self._log.debug("metrics_were_written", who=self._who, seq=segment.seq)
        self._unsure = None
