"""What the daemon hands to a role, and the one thing that a role must listen to: the request to stop.

    async def run(ctx: Context, *, index: int | None = None, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None

A role calls `task_status.started()` when it is of use to others, looks at `ctx.stop`, and returns when it is done. It is
cancelled when it does not return in time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import anyio

from grpod.bucket.base import Bucket
from grpod.config import Config

Takeover = Literal["wait", "exit"]


class Stopping:
    """Set once, by the first signal, by a stop request in the bucket, or when the roles have ended; never unset."""

    def __init__(self) -> None:
        self._event = anyio.Event()
        self.reason = ""
        self.ends_run = False  # a stop request in the bucket ends the run; a signal ends this process only

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    def request(self, reason: str, *, ends_run: bool = False) -> None:
        """The first reason stays."""
        if not self.requested:
            self.reason, self.ends_run = reason, ends_run
            self._event.set()

    async def wait(self) -> None:
        await self._event.wait()


@dataclass(frozen=True, kw_only=True)
class Context:
    config: Config
    folder: Path  # of the config file: relative paths are relative to it
    bucket: Bucket  # empty and in memory for a proxy that has none (config.run.bucket is "")
    stop: Stopping
    roles: tuple[str, ...]  # all that run in this process, as in --role
    takeover: Takeover = "wait"
    inputs_checked: anyio.Event = field(default_factory=anyio.Event)  # set by a generator: its data and rewards are usable

    async def wait_for_inputs(self) -> None:
        """Returns when nothing in this process can still find the data or the rewards wrong: before that nothing is begun."""
        if any(role.partition("-")[0] == "generator" for role in self.roles):
            await self.inputs_checked.wait()
