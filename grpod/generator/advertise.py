"""Tells the proxy of this generator's replicas, where one is found: completions only, adapters stay the generator's.

    proxy.url, else state/proxy.json ─▶ POST /grpod/v1/replicas every heartbeat ─▶ DELETE at the end

The proxy is optional: whether it answers or not, training goes on, so a failure is logged once and tried again.
"""

from __future__ import annotations

import aiohttp
import anyio

from grpod.bucket.base import Bucket
from grpod.context import Context
from grpod.errors import BucketError, NotFound, WireError
from grpod.generator.engine import Engine
from grpod.generator.token_file import TokenFile
from grpod.telemetry.log import get_logger
from grpod.wire import keys
from grpod.wire.state import ProxyState

_BEAT_S = 5.0
_TIMEOUT = aiohttp.ClientTimeout(total=10)


async def advertise(ctx: Context, engines: list[Engine], token: TokenFile) -> None:
    """Until it is cancelled. Told are `generator.advertise`, or the replicas themselves when the proxy is in this process."""
    log, failing = get_logger(), False
    if not advertises(ctx):
        return
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
        told: dict[str, str] = {}  # replica's URL -> the proxy that was told of it
        try:
            while True:
                try:
                    if proxy := await _proxy(ctx):
                        for url in [ctx.config.generator.advertise] if ctx.config.generator.advertise else _urls(engines):
                            await _tell(session, proxy, url, token)
                            told[url] = proxy
                    failing = False
                except (aiohttp.ClientError, TimeoutError, BucketError, WireError) as error:
                    if not failing and not ctx.stop.requested:  # else it was asked to stop as well
                        log.warning("proxy_not_told", error=f"{type(error).__name__}: {error}")
                    failing = True
                await anyio.sleep(_BEAT_S)
        finally:
            with anyio.move_on_after(1.0, shield=True):
                for url, proxy in told.items():
                    await _leave(session, proxy, url, token)


def _urls(engines: list[Engine]) -> list[str]:
    return [engine.url for engine in engines if engine.url]


async def _proxy(ctx: Context) -> str | None:
    return ctx.config.proxy.url or await _from_state(ctx.bucket)


async def _from_state(bucket: Bucket) -> str | None:
    try:
        found = await bucket.get(keys.PROXY_STATE)
    except NotFound:
        return None
    assert found is not None
    urls = ProxyState.decode(found.data, keys.PROXY_STATE).urls
    return urls[0] if urls else None


async def _tell(session: aiohttp.ClientSession, proxy: str, url: str, token: TokenFile) -> None:
    body = {"url": url, "owner": "generator"}
    path, headers = f"{proxy.rstrip('/')}/grpod/v1/replicas", _headers(token)
    async with session.post(path, json=body, headers=headers, allow_redirects=False) as answer:
        if answer.status != 200:
            raise aiohttp.ClientError(f"{proxy} answered {answer.status}: {(await answer.text())[:200]}")


async def _leave(session: aiohttp.ClientSession, proxy: str, url: str, token: TokenFile) -> None:
    try:
        path, headers = f"{proxy.rstrip('/')}/grpod/v1/replicas", _headers(token)
        async with session.delete(path, params={"url": url}, headers=headers, allow_redirects=False):
            pass
    except (aiohttp.ClientError, TimeoutError) as error:  # it forgets us by itself after its ttl
        get_logger().debug("proxy_not_told_of_leaving", error=str(error))


def advertises(ctx: Context) -> bool:
    return bool(ctx.config.generator.advertise) or "proxy" in ctx.roles


def proxy_token(ctx: Context) -> TokenFile:
    """Raises ConfigError when one is needed and cannot be read."""
    return TokenFile("proxy.token_file", ctx.config.proxy.token_file if advertises(ctx) else None, ctx.folder)


def _headers(token: TokenFile) -> dict[str, str]:
    value = token()
    return {"Authorization": f"Bearer {value}"} if value else {}
