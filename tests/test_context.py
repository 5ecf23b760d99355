"""What is cut short by a request to stop, and what is not."""

from __future__ import annotations

import anyio
import pytest

from grpod.context import Stopping

pytestmark = pytest.mark.anyio


async def test_work_goes_on_unless_a_stop_is_requested() -> None:
    async def work() -> int:
        await anyio.lowlevel.checkpoint()
        return 7

    assert await Stopping().unless(work) == 7


async def test_a_stop_cancels_work_that_waits() -> None:
    stop = Stopping()
    begun = anyio.Event()

    async def work() -> int:
        begun.set()
        await anyio.sleep_forever()
        return 7

    async def ask() -> None:
        await begun.wait()
        stop.request("the test says so")

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            assert await stop.unless(work) is None
            assert await stop.unless(work) is None, "also one that was requested before"


async def test_an_error_comes_out_as_itself() -> None:
    async def work() -> int:
        await anyio.lowlevel.checkpoint()
        raise KeyError("x")

    with pytest.raises(KeyError):
        await Stopping().unless(work)


async def test_cancelling_from_outside_is_no_stop() -> None:
    stop = Stopping()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await stop.unless(anyio.sleep_forever)
        raise AssertionError("went on")
    assert scope.cancelled_caught
