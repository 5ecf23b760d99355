"""The proxy's role: a listener in front of a fleet of replicas. Soft state only: killed and started again, it finds it anew.

consumes   requests of clients; replicas from the config, and those that register
produces   answers; state/proxy.json with its URLs, every few seconds
waits for  nothing: it serves with no replica at all, and /health says so until there is a quorum
ends       when it is asked to: no new connections, what runs may finish within a part of run.grace_s
"""

from __future__ import annotations

import errno
import socket
import time

import anyio
from aiohttp import web
from anyio.abc import TaskStatus

from grpod.bucket.base import Bucket
from grpod.config import resolve
from grpod.context import Context
from grpod.errors import BucketError, ConfigError, NotFound, NotReady, WireError
from grpod.proxy import broadcast, status
from grpod.proxy.app import Routes, is_loopback
from grpod.proxy.forward import Forwarder
from grpod.proxy.replicas import Fleet, Timing
from grpod.proxy.upstream import Sessions
from grpod.telemetry.log import get_logger
from grpod.wire import keys
from grpod.wire.state import ProxyState

HEADERS_S = 25.0  # an idle connection, or one whose headers do not get finished, is closed after this
CLOSE_S = 1.0  # for the last state, and for closing connections
DRAIN = 0.6  # share of run.grace_s in which what runs may finish

log = get_logger(role="proxy")


async def run(
    ctx: Context,
    *,
    index: int | None = None,
    task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    timing: Timing | None = None,
) -> None:
    """Raises `ConfigError` for keys that cannot be, `NotReady` when the address is taken (systemd tries again)."""
    config = ctx.config.proxy
    host, port = parse_listen(config.listen)
    token = _token(ctx)
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"proxy.listen {config.listen}: others than this machine could reach it, so proxy.token_file must be set "
            "(or listen on 127.0.0.1)"
        )
    fleet = Fleet(quorum=config.quorum, timing=timing, tend=broadcast.reconcile)
    async with Sessions() as sessions, anyio.create_task_group() as tasks:
        await tasks.start(fleet.run)
        tasks.start_soon(broadcast.resume_overdue, fleet)
        for url in config.replicas:
            fleet.register(url, "proxy", static=True)
        forwarder = Forwarder(fleet, sessions, retries=config.retries, keep_token=token is None)
        routes = Routes(fleet, forwarder, token=token, mount=config.mount)
        runner = web.AppRunner(
            routes.application(),
            access_log=None,
            handler_cancellation=True,  # a client that leaves cancels its request upstream
            keepalive_timeout=HEADERS_S,
            shutdown_timeout=CLOSE_S / 2,  # after that it is cancelled: see DRAIN
        )
        await runner.setup()
        try:
            site = await _listen(runner, host, port, config.listen)
            urls = sorted(_url(*address[:2]) for address in runner.addresses)
            if config.url:
                urls.insert(0, config.url)
            log.info("proxy_listening", urls=urls, replicas=len(fleet.replicas))
            beat = Beat(ctx.bucket, fleet, urls)
            tasks.start_soon(beat.run)
            task_status.started()
            await ctx.stop.wait()
            await site.stop()
            await beat.last()
            with anyio.move_on_after(DRAIN * ctx.config.run.grace_s):
                await routes.idle()
        finally:
            with anyio.move_on_after(2 * CLOSE_S, shield=True):
                await runner.cleanup()
        tasks.cancel_scope.cancel()
    log.info("proxy_ended")


def parse_listen(listen: str) -> tuple[str, int]:
    """host:port or [IPv6]:port; no host is every interface."""
    host, colon, port = listen.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"proxy.listen {listen!r}: host:port was expected, as in 127.0.0.1:8000 or [::1]:8000")
    return host or "0.0.0.0", int(port)


def _token(ctx: Context) -> str | None:
    if not ctx.config.proxy.token_file:
        return None
    path = resolve(ctx.config.proxy.token_file, ctx.folder)
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"proxy.token_file {path}: {error}") from error
    if not token:
        raise ConfigError(f"proxy.token_file {path}: it is empty")
    return token


async def _listen(runner: web.AppRunner, host: str, port: int, listen: str) -> web.TCPSite:
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise NotReady(
                f"proxy.listen {listen}: the address is in use; end what listens there or set another (port 0 takes a free one)"
            ) from error
        raise ConfigError(f"proxy.listen {listen}: {error.strerror or error}") from error
    return site


def _url(host: str, port: int) -> str:
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Beat:
    """state/proxy.json. The proxy goes on without it: who does not find it there does without the proxy."""

    def __init__(self, bucket: Bucket, fleet: Fleet, urls: list[str]) -> None:
        self._bucket = bucket
        self._fleet = fleet
        self._urls = urls
        self._counter: int | None = None
        self._failing = False
        self._lock = anyio.Lock()  # writes must not overtake each other
        self._period_s = 5.0 if bucket.url.startswith(("file:", "memory:")) else 15.0  # others count requests

    async def run(self) -> None:
        while True:
            await self._write()
            await anyio.sleep(self._period_s)

    async def last(self) -> None:
        """Nobody is to look for it any more."""
        self._urls = []
        with anyio.move_on_after(CLOSE_S):
            await self._write()

    async def _write(self) -> None:
        async with self._lock:
            try:
                if self._counter is None:
                    self._counter = await self._found()
                self._counter += 1
                await self._bucket.put({keys.PROXY_STATE: self._state(self._counter).encode()})
                self._failing = False
            except BucketError as error:
                if not self._failing:
                    log.warning("proxy_state_not_written", error=str(error))
                self._failing = True

    def _state(self, counter: int) -> ProxyState:
        states = {replica.url: status.state(replica, self._fleet) for replica in self._fleet.replicas.values()}
        return ProxyState(counter=counter, urls=self._urls, replicas=states, updated_at=time.time())

    async def _found(self) -> int:
        """The counter of a proxy before this one: readers keep the greatest."""
        try:
            found = await self._bucket.get(keys.PROXY_STATE)
        except NotFound:
            return 0
        try:
            return ProxyState.decode(found.data, keys.PROXY_STATE).counter if found is not None else 0
        except WireError as error:
            log.warning("proxy_state_unreadable", why=str(error))
            return 0
