from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import anyio
import pytest
import structlog
from structlog.typing import EventDict

from grpod.errors import NotReady
from grpod.replica.supervise import Child, ChildSpec, in_words, supervised

pytestmark = pytest.mark.anyio
SCRIPT = str(Path(__file__).with_name("child.py"))


class Supervised:
    child: Child

    def __init__(self) -> None:
        self.entries: list[EventDict] = []
        self._said = anyio.Event()

    def __call__(self, logger: object, method: str, event: EventDict) -> EventDict:
        self.entries.append({**event, "at": method})
        self._said.set()
        self._said = anyio.Event()
        raise structlog.DropEvent

    def of(self, name: str) -> list[EventDict]:
        return [entry for entry in self.entries if entry["event"] == name]

    def lines(self) -> list[str]:
        return [entry["line"] for entry in self.of("child_output")]

    async def said(self) -> None:
        """Waits for the next event."""
        await self._said.wait()

    async def pids(self) -> list[int]:
        """Of the latest incarnation: the server and its worker."""
        while len(told := [line for line in self.lines() if line.startswith("pids")]) < self.child.incarnation:
            await self._said.wait()
        return [int(word) for word in told[-1].split()[1:]]

    async def call(self, path: str) -> None:
        async with aiohttp.ClientSession() as session:
            with suppress(aiohttp.ClientError):  # it crashed as it was told
                await session.get(self.child.url + path)


@asynccontextmanager
async def watched(*words: str, program: list[str] | None = None, **changes: object) -> AsyncIterator[Supervised]:
    it = Supervised()
    log = structlog.wrap_logger(structlog.PrintLogger(), processors=[it])
    options = {"max_restarts": 2, "backoff_s": 0.01, "stop_timeout_s": 5.0, "health_every_s": 0.05, **changes}
    command = program or [sys.executable, "-I", "-S", SCRIPT]
    spec = ChildSpec(name="fake", command=lambda port: [*command, str(port), *words], **options)
    with anyio.fail_after(60):
        async with supervised(spec, log=log) as it.child:
            yield it


def stat(pid: int) -> list[str]:
    """state, parent, …: what follows the name in /proc"""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def alive(pids: Iterable[int]) -> list[int]:
    """Zombies that nobody buries in a container are not alive."""
    found = []
    for pid in pids:
        try:
            state = stat(pid)[0]
        except OSError:
            continue
        if state not in "ZX":
            found.append(pid)
    return found


async def gone(pids: Iterable[int], within_s: float) -> bool:
    for _ in range(int(within_s / 0.05)):
        if not alive(pids):
            return True
        await anyio.sleep(0.05)
    return False


async def test_a_child_is_started_told_of_and_stopped_with_its_workers():
    async with watched() as it:
        assert await it.child.ready() == 1
        await it.call("/health")
        pids = await it.pids()
        assert len(alive(pids)) == 2
    assert not alive(pids)
    assert "to stderr" in it.lines()
    assert {entry["child"] for entry in it.entries} == {"fake"}


async def test_a_child_of_no_use_is_started_again_and_not_for_what_an_earlier_one_did():
    async with watched() as it:
        first = await it.child.ready()
        pids = await it.pids()
        it.child.restart(first, "produced nothing")
        await it.child.lost(first)
        assert await it.child.ready() == 2
        assert not alive(pids)
        it.child.restart(first, "too late")
        await it.call("/crash")
        await it.child.lost(2)
        assert await it.child.ready() == 3
        reasons = [entry["reason"] for entry in it.of("child_restarts")]
        assert reasons == ["produced nothing", "ended with exit code 3"]


async def test_a_child_that_is_always_of_no_use_is_given_up():
    async with watched() as it:
        for _ in range(3):
            it.child.restart(await it.child.ready(), "produced nothing")
            await it.child.lost(it.child.incarnation)
        with pytest.raises(NotReady, match="fake produced nothing, after 2 restarts"):
            await it.child.ready()
        it.child.restart(3, "again")  # nothing is there to be ended


async def test_each_line_is_passed_on_at_its_own_level():
    async with watched(level=lambda line: "error" if "stderr" in line else "debug") as it:
        await it.child.ready()
        await it.pids()
    levels = {entry["line"].split()[0]: entry["at"] for entry in it.of("child_output")}
    assert levels == {"to": "error", "pids": "debug"}


async def test_a_child_that_is_long_in_starting_is_told_of(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("grpod.replica.supervise._PROGRESS_S", 0.1)
    async with watched("deaf") as it:
        while not (told := [entry for entry in it.of("child_starting") if entry["last_line"]]):
            await it.said()
        assert told[0]["last_line"] in it.lines()
        assert told[0]["seconds"] >= 0
        assert not it.of("child_ready")


async def test_a_crash_ends_the_workers_and_begins_a_new_incarnation():
    async with watched() as it:
        first = await it.child.ready()
        pids, url = await it.pids(), it.child.url
        await it.call("/crash")
        await it.child.lost(first)
        assert await it.child.ready() == 2
        assert it.child.url != url
        assert not alive(pids)
        await it.child.lost(first)
        assert [entry["reason"] for entry in it.of("child_restarts")] == ["ended with exit code 3"]
        assert len(alive(await it.pids())) == 2
    assert not alive(await it.pids())


async def test_a_killed_child_takes_its_workers_along():
    async with watched() as it:
        first = await it.child.ready()
        pids = await it.pids()
        os.kill(pids[0], signal.SIGKILL)
        await it.child.lost(first)
        await it.child.ready()
        assert not alive(pids)


async def test_a_silent_child_is_started_again():
    async with watched(silent_s=0.1) as it:
        first = await it.child.ready()
        await it.call("/sick")
        await it.child.lost(first)
        assert await it.child.ready() == 2


async def test_a_child_that_listens_no_longer_and_does_not_end_is_started_again():
    """So vLLM stays, for ever, when its engine has died under a request that it waits for."""
    async with watched("stubborn", closed_s=0.1, stop_timeout_s=1000.0) as it:
        first = await it.child.ready()
        pids = await it.pids()
        await it.call("/close")
        await it.child.lost(first)
        assert await it.child.ready() == 2
        assert not alive(pids)
        assert [entry["reason"] for entry in it.of("child_restarts")] == ["had closed its port for 0.1 s and did not end"]
        os.kill((await it.pids())[0], signal.SIGKILL)  # it has a thousand seconds


@pytest.mark.parametrize(("word", "reason"), [("never", "ended with exit code 4"), ("deaf", "was not ready within 0.2 s")])
async def test_it_is_given_up_after_the_limit(word: str, reason: str):
    async with watched(word, startup_timeout_s=0.2 if word == "deaf" else 30.0) as it:
        with pytest.raises(NotReady, match=f"fake {reason} and was never healthy, after 1 restarts; its command: .*child.py"):
            await it.child.ready()
        assert it.child.incarnation == 2, "what never was healthy will not be next time either"
        await it.child.lost(2)


async def test_its_last_words_are_fit_to_be_read():
    code = "import sys; sys.stdout.buffer.write(bytes(range(1, 32)) + b'x' * 3000); sys.exit(1)"
    async with watched(program=[sys.executable, "-c", code]) as it:
        with pytest.raises(NotReady) as gave_up:
            await it.child.ready()
    assert len(str(gave_up.value)) < 1500
    assert all(c.isprintable() or c == "\n" for c in str(gave_up.value))


async def test_a_stable_time_forgives_earlier_restarts():
    async with watched(stable_s=0.0) as it:
        for incarnation in range(1, 5):
            assert await it.child.ready() == incarnation
            await it.call("/crash")
            await it.child.lost(incarnation)


async def test_a_child_that_ignores_sigterm_is_killed():
    async with watched("stubborn", stop_timeout_s=0.2) as it:
        await it.child.ready()
        pids = await it.pids()
    assert not alive(pids)


async def test_a_worker_that_left_the_group_ends_too():
    async with watched("escape") as it:
        await it.child.ready()
        pids = await it.pids()
    assert await gone(pids, 5)


async def test_a_killed_reaper_leaves_nothing_behind():
    async with watched() as it:
        first = await it.child.ready()
        pids = await it.pids()
        parent = int(stat(pids[0])[1])
        os.kill(parent, signal.SIGKILL)
        await it.child.lost(first)
        assert await it.child.ready() == 2
        assert not alive(pids)


async def test_an_error_of_the_caller_comes_through_as_it_is():
    pids: list[int] = []

    async def fail() -> None:
        async with watched() as it:
            await it.child.ready()
            pids.extend(await it.pids())
            raise KeyError("mine")

    with pytest.raises(KeyError):
        await fail()
    assert pids
    assert not alive(pids)


async def test_a_cancelled_caller_leaves_nothing_behind():
    with anyio.CancelScope() as scope:
        async with watched() as it:
            await it.child.ready()
            scope.cancel()
            await anyio.sleep_forever()
    assert not alive(await it.pids())


GRPOD = """
    import signal, sys, anyio, structlog
    from grpod.replica.supervise import ChildSpec, supervised

    async def main():
        spec = ChildSpec(name="fake", command=lambda port: [sys.executable, sys.argv[1], str(port), *sys.argv[2:]])
        async with supervised(spec, log=structlog.wrap_logger(structlog.PrintLogger(), processors=[say])) as child:
            await child.ready()
            with anyio.open_signal_receiver(signal.SIGTERM) as signals:
                print("ready", flush=True)
                async for _ in signals:
                    break

    def say(logger, name, event):
        print(event.get("line", ""), flush=True)
        raise structlog.DropEvent

    anyio.run(main)
"""


def start_grpod(word: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A process that supervises a child, and the three below it: child, worker, reaper."""
    command = [sys.executable, "-c", textwrap.dedent(GRPOD), SCRIPT, *filter(None, [word])]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids: list[int] = []
    for line in parent.stdout:
        if line.startswith("pids"):
            pids = [int(word) for word in line.split()[1:]]
        if line == "ready\n":
            break
    return parent, [*pids, int(stat(pids[0])[1])]


@pytest.mark.parametrize("word", ["", "stubborn", "escape"])
async def test_kill_9_of_grpod_ends_everything_within_5_s(word: str):
    parent, pids = start_grpod(word)
    with parent:
        assert len(alive(pids)) == 3
        parent.kill()
    assert await gone(pids, 5)


async def test_the_grace_that_was_asked_for_ends_with_grpod():
    """Killed while it waits for a child that takes all of its ten seconds."""
    parent, pids = start_grpod("stubborn")
    with parent:
        parent.send_signal(signal.SIGTERM)
        for line in parent.stdout or ():
            if line == "asked to end\n":
                break
        assert len(alive(pids)) == 3
        parent.kill()
    assert await gone(pids, 5)


def test_exit_codes_in_words():
    assert [in_words(code) for code in (0, 3, 137, -9, 255)] == [
        "with exit code 0",
        "with exit code 3",
        "by SIGKILL",
        "by SIGKILL",
        "with exit code 255",
    ]
