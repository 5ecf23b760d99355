"""What a person at a terminal sees of the training: one bar that stays below the log. Elsewhere there are log lines."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class StepBar:
    """A context manager. Does nothing when stderr is no terminal."""

    def __init__(self, *, step: int, steps: int, shown: bool | None = None) -> None:
        self.shown = sys.stderr.isatty() if shown is None else shown
        self._step, self._steps = step, steps
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        if self.shown:
            self._bar = Progress(
                TextColumn("step"),
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TextColumn("reward {task.fields[reward]}  lag {task.fields[lag]:.1f}  version {task.fields[version]}"),
                TextColumn("so far"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=Console(stderr=True, soft_wrap=True, emoji=False, markup=False, highlight=False),
                refresh_per_second=4,
                redirect_stdout=False,
            )
            self._task = self._bar.add_task("step", total=self._steps, completed=self._step, reward="-", lag=0.0, version=0)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, *, step: int, reward: float | None, lag: float, version: int) -> None:
        if self._bar is not None:
            if reward is not None:  # else the last one stands: nothing has come since
                self._bar.update(self._task, reward=f"{reward:.3f}")
            self._bar.update(self._task, completed=step, lag=lag, version=version)
