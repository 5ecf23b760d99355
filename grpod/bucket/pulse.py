"""How `changed()` wakes: one count for each bucket and process, and for each task the count that it has seen.

    task looks ── another task puts ── changed()       returns at once: the count is past what this task has seen
    task looks ── it puts itself    ── changed()       waits: nobody is woken by what he wrote himself
    changed() … another process puts                   the backend looks once a tick, and rings

So no change is lost between a look and the wait for the next one. A loop that puts at every wake still needs a least period
of its own: two such loops would wake each other for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

import anyio
import anyio.lowlevel

TICK_S: Final = 0.05  # between two looks at what other processes, or event loops of other threads, have done

# The events that tasks wait on belong to one event loop each; a RunVar keeps those of different loops apart.
_events: anyio.lowlevel.RunVar[dict[int, anyio.Event]] = anyio.lowlevel.RunVar("grpod_bucket_events")


@dataclass(kw_only=True)
class _Seen:
    """Owned by one task; a child task inherits the context but not the ownership."""

    task: int
    count: int


class Pulse:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._told = 0  # the count at the last wake of any task: what a task that never waited is taken to have seen
        self._seen: ContextVar[_Seen | None] = ContextVar("seen", default=None)

    def ring(self, *, own: bool = True) -> None:
        """Something has changed. `own`: by the calling task, which need not be woken for it."""
        with self._lock:
            self._count += 1
            if own and (mine := self._mine()).count == self._count - 1:
                mine.count = self._count
        if event := _events.get({}).pop(id(self), None):
            event.set()

    async def wait(self, timeout_s: float, look: Callable[[], Awaitable[None]] | None = None) -> None:
        """`look` is called once a tick, and rings when it sees a change."""
        await anyio.lowlevel.checkpoint()
        deadline = anyio.current_time() + timeout_s
        mine = self._mine()
        while True:
            if look is not None:
                await look()
            left = deadline - anyio.current_time()
            if self._count != mine.count or left <= 0:
                break
            with anyio.move_on_after(min(left, TICK_S)):
                await self._event().wait()
        mine.count = self._told = self._count

    def _mine(self) -> _Seen:
        task = anyio.get_current_task().id
        mine = self._seen.get()
        if mine is None or mine.task != task:
            mine = _Seen(task=task, count=self._told)
            self._seen.set(mine)
        return mine

    def _event(self) -> anyio.Event:
        try:
            events = _events.get()
        except LookupError:
            events = {}
            _events.set(events)
        return events.setdefault(id(self), anyio.Event())
