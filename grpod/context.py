"""What the daemon hands to a role, and the one thing that a role must listen to: the request to stop.

    async def run(ctx: Context, *, index: int | None = None, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None

A role calls `task_status.started()` when it is of use to others, looks at `ctx.stop`, and returns when it is done. It is
cancelled when it does not return in time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import anyio

from grpod.bucket.base import Bucket
from grpod.config import Config

Takeover = Literal["wait", "exit"]
T = TypeVar("T")


class Stopping:
    """Set once, by the first signal, by a stop request in the bucket, or when the roles have ended; never unset."""

    def __init__(self) -> None:
        self._event = anyio.Event()
        self.reason = ""

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    def request(self, reason: str) -> None:
        """The first reason stays."""
        if not self.requested:
            self.reason = reason
            self._event.set()

    async def wait(self) -> None:
        await self._event.wait()

    async def unless(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """What the work returns. None: a stop was requested meanwhile, and the work was cancelled."""
        result: T | None = None
        failure: Exception | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(self._cancel, group.cancel_scope)
            try:
                result = await work()
            except Exception as error:  # raised again below, as itself: the group would wrap it
                failure = error
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return result

    async def _cancel(self, scope: anyio.CancelScope) -> None:
        await self.wait()
        scope.cancel()


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
