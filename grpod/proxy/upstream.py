"""Connections to replicas for what clients send. (Control calls have their own, in `replica/client.py`.)

A connection that was idle and is reset before the first byte of an answer says nothing of the replica: vLLM closes idle ones
after 5 s. The request is then sent once more, on a fresh one. A reset of a fresh connection is the replica's fault.
"""

from __future__ import annotations

import io
from contextlib import AsyncExitStack
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import aiohttp
from multidict import CIMultiDict
from yarl import URL

IDLE_S = 3.0  # below vLLM's 5
CONNECT_S = 5.0
READ_S = 1800.0  # a plain answer comes only when it is finished, and may have waited behind others and a pause


class Sessions:
    """An async context manager."""

    def __init__(self) -> None:
        self._exits = AsyncExitStack()

    async def __aenter__(self) -> Self:
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_reused)
        self._pooled = await self._session(trace_configs=[trace], connector=_connector(keepalive_timeout=IDLE_S))
        self._fresh = await self._session(connector=_connector(force_close=True))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        await self._exits.aclose()

    async def _session(self, **options: Any) -> aiohttp.ClientSession:
        session = aiohttp.ClientSession(
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # the bytes, and the header that is true of them, go on as they are
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=READ_S),
            trust_env=False,
            **options,
        )
        return await self._exits.enter_async_context(session)

    async def request(self, method: str, url: URL, *, headers: CIMultiDict[str], data: bytes | None) -> aiohttp.ClientResponse:
        """Redirects are not followed: nothing a client sent goes to a host that is no replica."""
        flag = {"reused": False}
        options: dict[str, Any] = {"headers": headers, "allow_redirects": False}
        try:
            return await self._pooled.request(method, url, data=_payload(data), trace_request_ctx=flag, **options)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            if not flag["reused"]:
                raise
        return await self._fresh.request(method, url, data=_payload(data), **options)


def _payload(data: bytes | None) -> bytes | io.BytesIO | None:
    """A large body is written in pieces, so that the event loop is not held up by one write."""
    return io.BytesIO(data) if data is not None and len(data) > 1 << 16 else data


def _connector(**options: Any) -> aiohttp.TCPConnector:
    return aiohttp.TCPConnector(limit=0, **options)


async def _reused(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
    context.trace_request_ctx["reused"] = True
