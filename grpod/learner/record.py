"""What a step leaves behind for people: a row of metrics, the bar or a line in the log, and the reward that ends a run."""

from __future__ import annotations

from statistics import fmean
from typing import Self

import anyio
from structlog.typing import FilteringBoundLogger

from grpod.learner.bar import StepBar
from grpod.learner.book import Book
from grpod.learner.feed import Feed
from grpod.learner.versions import Versions
from grpod.run.metrics_log import MetricWriter

_SAY_EVERY_S = 5.0
_REWARDS = 5  # steps whose mean `run.stop_at_reward` is compared with


class Recorder:
    """A context manager: the bar is shown while it is open."""

    def __init__(
        self,
        writer: MetricWriter,
        log: FilteringBoundLogger,
        *,
        feed: Feed,
        book: Book,
        versions: Versions,
        step: int,
        steps: int,
    ) -> None:
        self.writer = writer
        self._log, self._feed, self._book, self._versions, self._steps = log, feed, book, versions, steps
        self._bar = StepBar(step=step, steps=steps)
        self._rewards: tuple[float, ...] = ()
        self._said_at = float("-inf")
        self._waiting_at, self._told = anyio.current_time(), 0  # the last row; rollouts that it told of, if it was no step's

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.__exit__(None, None, None)

    @property
    def reward(self) -> float | None:
        """Mean of the last steps; None before there are enough."""
        return fmean(self._rewards) if len(self._rewards) == _REWARDS else None

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """`metrics` of the step itself; what the feed and the book know is added: reward over all groups that came."""
        came = self._feed.arrivals.metrics()
        if came:
            self._rewards = (*self._rewards, came["reward"])[-_REWARDS:]
        self._feed.arrivals.clear()
        self._waiting_at, self._told = anyio.current_time(), 0
        metrics |= came | self._totals()
        self.writer.add(step, metrics)
        self._say(step, metrics)

    def waiting(self, step: int) -> None:
        """Of a step that does not come: what has reached the learner for it so far. The step's own row counts instead."""
        now, came = anyio.current_time(), len(self._feed.arrivals)
        if came > self._told and now - self._waiting_at >= _SAY_EVERY_S:
            self._waiting_at, self._told = now, came
            self.writer.add(step, self._feed.arrivals.metrics() | self._totals())

    def _totals(self) -> dict[str, float]:
        feed = self._feed
        totals: dict[str, float] = {
            "sample/rollout_queue_size": feed.num_pending,
            "groups/trained_total": self._book.trained,
            "groups/duplicates_total": feed.duplicates,
            "quarantine_total": feed.quarantined,
        }
        return totals | {f"groups/dropped_total/{reason}": count for reason, count in self._book.dropped.items()}

    def _say(self, step: int, metrics: dict[str, float]) -> None:
        newest = self._versions.newest
        version = newest.version if newest else 0
        self._bar.update(step=step, reward=metrics.get("reward"), lag=metrics["lag/mean"], version=version)
        now = anyio.current_time()
        if step in (1, self._steps) or (not self._bar.shown and now - self._said_at >= _SAY_EVERY_S):
            self._said_at = now
            self._log.info(
                "step",
                step=f"{step}/{self._steps}",
                reward=round(self._rewards[-1], 3) if self._rewards else None,
                version=version,
                lag=round(metrics["lag/mean"], 1),
                waiting_s=round(metrics["perf/rollout_wait_s"], 2),
            )
