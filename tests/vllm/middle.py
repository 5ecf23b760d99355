"""A man in the middle, between a generator and its real vLLM, who does to a request what the test tells him to.

    async with between(lambda: child.url) as middle:      the server may come back under another URL
        middle.hook = hook                                 async def hook(asked, forward) -> web.StreamResponse

A server that is away is told by a closed connection, as without him. A client that leaves is left by the server, too.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import anyio
from aiohttp import web

from tests.fakes import drop


@dataclass(frozen=True, kw_only=True)
class Asked:
    request: web.Request
    body: Any  # parsed JSON; None: there is none

    @property
    def group(self) -> bool:
        """It asks for completions, not for a score."""
        return self.request.path == "/v1/completions" and "prompt_logprobs" not in self.body


Forward = Callable[[], Awaitable[web.StreamResponse]]
Hook = Callable[[Asked, Forward], Awaitable[web.StreamResponse]]


@dataclass(kw_only=True)
class Middle:
    url: str = ""
    hook: Hook | None = None
    in_flight: int = 0  # groups, at the server
    asked: list[int] = field(default_factory=list)  # seeds of groups, as often as they were asked for
    sound: list[float] = field(default_factory=list)  # when whole groups were passed on
    aborted: int = 0  # groups of which a part was passed on
    moved: anyio.Event = field(default_factory=anyio.Event)

    def move(self) -> None:
        self.moved.set()
        self.moved = anyio.Event()

    async def until(self, true: Callable[[], bool], timeout_s: float = 300.0) -> None:
        with anyio.fail_after(timeout_s):
            while not true():
                await self.moved.wait()


@asynccontextmanager
async def between(server: Callable[[], str]) -> AsyncIterator[Middle]:
    middle = Middle()
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=None)
    ) as session:

        async def handle(request: web.Request) -> web.StreamResponse:
            data = await request.read()
            asked = Asked(request=request, body=json.loads(data) if data else None)
            if asked.group:
                middle.asked.append(asked.body["seed"])

            async def forward() -> web.StreamResponse:
                middle.in_flight += asked.group
                middle.move()
                kind = {"Content-Type": request.content_type}
                try:
                    async with session.request(
                        request.method, server() + request.path_qs, data=data or None, headers=kind
                    ) as answer:
                        body = await answer.read()
                except aiohttp.ClientError:
                    return drop(request)
                finally:
                    middle.in_flight -= asked.group
                    middle.move()
                if asked.group and answer.status == 200:
                    if any(choice["finish_reason"] == "abort" for choice in json.loads(body)["choices"]):
                        middle.aborted += 1
                    else:
                        middle.sound.append(anyio.current_time())
                return web.Response(status=answer.status, body=body, content_type=answer.content_type)

            try:
                return await (forward() if middle.hook is None else middle.hook(asked, forward))
            finally:
                middle.move()

        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            middle.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield middle
        finally:
            await runner.cleanup()


async def broken(asked: Asked, forward: Forward) -> web.StreamResponse:
    """A hook: every route answers 500."""
    return web.json_response({"error": {"message": "out of order", "code": 500}}, status=500)
