"""Keeps one server process alive: a replica, started, watched, started again, and ended with everything that it started.

                    ┌────────── back-off, at most max_restarts in a row ──────────┐
                    ▼                                                             │
    free port ─▶ started ──/health──▶ healthy (ready() returns) ──gone or silent──┴─▶ gave up (ready() raises NotReady)
                    │                     │
                    └──── context left ───┴─▶ SIGTERM to the group ─ stop_timeout_s ─▶ SIGKILL

Each start is a new incarnation, with nothing of what the one before had loaded: whoever loads adapters waits for `lost()` and
begins again. What the child prints is passed on as log events. The process that grpod starts is the reaper (`reaper.py`); it
starts the child, and ends it also when grpod cannot.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import anyio
from anyio.abc import ByteReceiveStream, Process
from structlog.typing import FilteringBoundLogger

from grpod.errors import NotReady
from grpod.replica import reaper
from grpod.replica.client import ReplicaClient

LINE_LIMIT = 16_384  # bytes of one log line
_UNBORN = 1  # restarts of a child that was never healthy: its port may have been taken; else it will not be next time either
_WORDS = 500  # characters of a line, as its last words
_PROGRESS_S = 10.0  # between two words of a child that is still starting


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    name: str
    """bound to its log lines"""
    command: Callable[[int], list[str]]
    """the command line for a port of 127.0.0.1"""
    env: Mapping[str, str] = field(default_factory=dict)
    """added to grpod's own environment"""
    startup_timeout_s: float = 600.0
    max_restarts: int = 5
    """in a row: a child that was healthy for stable_s starts the count anew; of one that never was, `_UNBORN` at most"""
    stable_s: float = 60.0
    backoff_s: float = 1.0
    """before the first restart; doubles up to backoff_max_s"""
    backoff_max_s: float = 30.0
    health_every_s: float = 1.0
    silent_s: float = 60.0
    """without a healthy answer for so long, a running child is ended and started again"""
    closed_s: float = 2.0
    """the same once its port is closed, and with no time to stop: a server that ends waits for its open requests, and those
    of a dead engine never end"""
    stop_timeout_s: float = 10.0
    level: Callable[[str], str] = lambda line: "info"
    """debug, info, warning or error: at which a line of its output is passed on"""


@asynccontextmanager
async def supervised(spec: ChildSpec, *, log: FilteringBoundLogger) -> AsyncIterator[Child]:
    """Returns at once: `Child.ready` waits. On leaving, the child's whole group has ended."""
    child, failure = Child(spec, log.bind(child=spec.name)), None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(child._run)
        try:
            yield child
        except Exception as error:  # told to the caller below as it is, not in the task group's ExceptionGroup
            failure = error
        finally:
            child._stopping.set()
    if failure is not None:
        raise failure


class Child:
    """Owned by `supervised`: others read `url` and `incarnation`, and wait."""

    def __init__(self, spec: ChildSpec, log: FilteringBoundLogger) -> None:
        self.url = ""  # of the latest incarnation
        self.incarnation = 0  # +1 at each start
        self._spec = spec
        self._log = log
        self._running = False
        self._healthy = False
        self._healthy_since = 0.0
        self._gave_up = ""
        self._condemned = ""  # why this incarnation is to end
        self._born = False  # was any incarnation healthy?
        self._command: list[str] = []
        self._stop_s = spec.stop_timeout_s  # how long it may take to
        self._changed = anyio.Event()
        self._stopping = anyio.Event()
        self._said: deque[str] = deque(maxlen=20)

    async def ready(self) -> int:
        """Waits until the child is healthy and returns its incarnation. Raises `NotReady` once it was given up."""
        while not self._healthy:
            if self._gave_up:
                raise NotReady(self._gave_up)
            await self._changed.wait()
        return self.incarnation

    async def lost(self, incarnation: int) -> None:
        """Returns when that incarnation is gone, at once if it was before."""
        while self._running and self.incarnation == incarnation:
            await self._changed.wait()

    @property
    def trouble(self) -> str:
        """Why it is not ready, as far as it is known; empty when it is."""
        if self._healthy or self._gave_up:
            return self._gave_up
        return f"{self._spec.name} has not started yet; it last said: {self._said[-1] if self._said else 'nothing'}"

    def restart(self, incarnation: int, reason: str) -> None:
        """Of a child that is healthy by its own words, and of no use."""
        if self._running and self.incarnation == incarnation:
            self._condemned = reason
            self._change()

    async def _run(self) -> None:
        # Ends by `_stopping` alone: a cancelled caller must not leave processes behind.
        with anyio.CancelScope(shield=True):
            restarts = 0
            while not self._stopping.is_set():
                reason, healthy_s = await self._live()
                if self._stopping.is_set():
                    return
                if healthy_s >= self._spec.stable_s:
                    restarts = 0
                if restarts >= (self._spec.max_restarts if self._born else min(_UNBORN, self._spec.max_restarts)):
                    never = "" if self._born else " and was never healthy"
                    words = "it last said:\n  " + "\n  ".join(self._said) if self._said else "it said nothing"
                    command = shlex.join(self._command)
                    self._gave_up = (
                        f"{self._spec.name} {reason}{never}, after {restarts} restarts; its command: {command}; {words}"
                    )
                    self._log.error("child_given_up", reason=reason, restarts=restarts)
                    self._change()
                    return
                delay_s = min(self._spec.backoff_max_s, self._spec.backoff_s * 2**restarts)
                restarts += 1
                self._log.warning("child_restarts", reason=reason, restart=restarts, delay_s=delay_s)
                with anyio.move_on_after(delay_s):
                    await self._stopping.wait()

    async def _live(self) -> tuple[str, float]:
        """One incarnation, from start to end: why it ended, and for how many seconds it had been healthy."""
        port = free_port()
        process, link, group = await self._start(port)
        assert process.stdout is not None
        self.incarnation, self.url, self._running = self.incarnation + 1, f"http://127.0.0.1:{port}", True
        self._condemned, self._stop_s = "", self._spec.stop_timeout_s
        self._said.clear()  # the last words of another
        self._log.info("child_started", incarnation=self.incarnation, url=self.url, pid=group)
        self._change()
        pumped = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._pass_on, process.stdout, pumped)
            async with ReplicaClient(self.url) as client:
                reason = await self._watch(process, client)
            healthy_s = anyio.current_time() - self._healthy_since if self._healthy else 0.0
            self._running = self._healthy = False
            self._change()
            self._log.info("child_ending", reason=reason, most_s=self._stop_s)
            await self._end(process, link, group)
            with anyio.move_on_after(2.0):  # its last words; whoever holds the pipe any longer is no child of ours
                await pumped.wait()
            tasks.cancel_scope.cancel()
        await process.aclose()
        return reason, healthy_s

    async def _start(self, port: int) -> tuple[Process, socket.socket, int | None]:
        ours, theirs = socket.socketpair()
        with theirs:
            self._command = self._spec.command(port)
            command = [sys.executable, "-I", "-S", reaper.__file__, str(theirs.fileno()), *self._command]
            process = await anyio.open_process(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._spec.env},
                start_new_session=True,  # a Ctrl-C is for grpod, which ends the child in its own order
                pass_fds=(theirs.fileno(),),
            )
        told = await anyio.to_thread.run_sync(ours.recv, 32)
        return process, ours, int(told) if told else None

    async def _watch(self, process: Process, client: ReplicaClient) -> str:
        """Returns why this incarnation is over: it ended, is sick, or is to stop."""
        reason = "was stopped"
        async with anyio.create_task_group() as tasks:

            async def ended() -> None:
                nonlocal reason
                reason = f"ended {in_words(await process.wait())}"
                tasks.cancel_scope.cancel()

            async def stopping() -> None:
                await self._stopping.wait()
                tasks.cancel_scope.cancel()

            async def condemned() -> None:
                nonlocal reason
                while not self._condemned:
                    await self._changed.wait()
                reason = self._condemned
                tasks.cancel_scope.cancel()

            tasks.start_soon(ended)
            tasks.start_soon(stopping)
            tasks.start_soon(condemned)
            reason = await self._sick(client)
            tasks.cancel_scope.cancel()
        return reason

    async def _sick(self, client: ReplicaClient) -> str:
        """Returns when the child was not healthy in time, or no longer is."""
        spec, look_s, began = self._spec, 0.05, anyio.current_time()
        told = began
        with anyio.move_on_after(spec.startup_timeout_s):
            while not await client.health():
                if anyio.current_time() - told >= _PROGRESS_S:
                    told = anyio.current_time()
                    self._log.info(
                        "child_starting", seconds=round(told - began), last_line=self._said[-1] if self._said else ""
                    )
                await anyio.sleep(look_s)
                look_s = min(spec.health_every_s, look_s * 1.5)
            self._healthy, self._born, self._healthy_since = True, True, anyio.current_time()
            self._log.info("child_ready", incarnation=self.incarnation, seconds=round(self._healthy_since - began, 1))
            self._change()
        healthy = open_ = anyio.current_time()
        while self._healthy:
            await anyio.sleep(spec.health_every_s)
            if await client.health():
                healthy = open_ = anyio.current_time()
            elif await listens(self.url):
                open_ = anyio.current_time()
            if anyio.current_time() - open_ >= spec.closed_s:
                self._stop_s = 0.0
                return f"had closed its port for {spec.closed_s:g} s and did not end"
            if anyio.current_time() - healthy >= spec.silent_s:
                return f"was not healthy for {spec.silent_s:g} s"
        return f"was not ready within {spec.startup_timeout_s:g} s"

    async def _end(self, process: Process, link: socket.socket, group: int | None) -> None:
        """Asks the reaper to end the group, and waits; does it itself when the reaper cannot."""
        with link:
            with suppress(OSError):  # the reaper has ended
                link.sendall(f"{self._stop_s:g}".encode())
            with anyio.move_on_after(self._stop_s + 5.0):
                await process.wait()
            if process.returncode is None or process.returncode < 0:  # stuck, or killed itself
                if group is not None:
                    with suppress(ProcessLookupError):
                        os.killpg(group, signal.SIGKILL)
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    async def _pass_on(self, stream: ByteReceiveStream, done: anyio.Event) -> None:
        """Lines become log events; one that is too long is broken."""
        rest = b""
        async for data in stream:
            *lines, rest = (rest + data).replace(b"\r", b"\n").split(b"\n")
            if len(rest) > LINE_LIMIT:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._say(line)
        self._say(rest)
        done.set()

    def _say(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            self._said.append("".join(c if c.isprintable() else "·" for c in text[:_WORDS]))
            level = self._spec.level(text)
            if self._stopping.is_set() or (level == "warning" and not self._healthy):
                level = "debug"  # what it says of being ended; what it warns of at every start (an error there is told)
            getattr(self._log, level)("child_output", line=text)

    def _change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def in_words(code: int) -> str:
    """Of the reaper's exit code, which is the child's, or 128 + the signal that ended it."""
    number = -code if code < 0 else code - 128
    return f"by {signal.Signals(number).name}" if number in signal.valid_signals() else f"with exit code {code}"


async def listens(url: str) -> bool:
    """False only if its host says that nobody does."""
    server = urlsplit(url)
    try:
        with anyio.move_on_after(1.0):
            stream = await anyio.connect_tcp(server.hostname or "", server.port or 80)
            await stream.aclose()
    except OSError as error:  # anyio's, of one address: its cause tells; no file to be had here says nothing of the child
        return not isinstance(error.__cause__ or error, ConnectionRefusedError)
    return True


def free_port() -> int:
    """Nobody's at this moment. If somebody takes it before the child does, the child fails and gets another."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
