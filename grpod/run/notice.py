"""A condition variable for one event loop: `await notice.until(lambda: …)`, and whoever changes something calls `tell()`."""

from __future__ import annotations

from collections.abc import Callable

import anyio


class Notice:
    def __init__(self) -> None:
        self._event = anyio.Event()

    def tell(self) -> None:
        self._event.set()
        self._event = anyio.Event()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Returns at the next `tell`, or after `timeout_s`."""
        event = self._event
        with anyio.move_on_after(timeout_s):
            await event.wait()

    async def until(self, true: Callable[[], bool]) -> None:
        while not true():
            await self._event.wait()
