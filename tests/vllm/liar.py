"""A man in the middle who answers to every adapter's name with the base model, in front of a server that knows better."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

BASE = "base"


@asynccontextmanager
async def ignoring_adapters(url: str) -> AsyncIterator[str]:
    """His own URL. Loads and unloads go through and are answered as the server answers them."""
    async with aiohttp.ClientSession(auto_decompress=True) as session:

        async def handle(request: web.Request) -> web.Response:
            data, model = await request.read(), None
            if request.path == "/v1/completions":
                asked = json.loads(data)
                model, asked["model"] = asked["model"], BASE
                data = json.dumps(asked).encode()
            kind = {"Content-Type": request.content_type}
            async with session.request(request.method, url + request.path_qs, data=data or None, headers=kind) as answer:
                body = await answer.read()
            if model is not None and answer.status == 200:
                body = json.dumps({**json.loads(body), "model": model}).encode()
            return web.Response(status=answer.status, body=body, content_type=answer.content_type)

        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()
