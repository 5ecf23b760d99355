"""The proxy's routes. To a client it is one vLLM server; under /grpod/v1/ it speaks of itself.

POST /v1/completions, /v1/chat/completions                     forward.complete
POST /v1/load_lora_adapter, /v1/unload_lora_adapter            broadcast, to replicas that the proxy owns
POST /pause, /resume                                           broadcast
GET  /health, /v1/models, /server_info, /is_paused             answered from what the fleet knows
GET  /metrics, /grpod/v1/status, /                             the proxy's own
GET, POST, DELETE /grpod/v1/replicas                           list; register and heartbeat; leave
any other GET                                                  a replica that is up
any other POST, PUT, …                                         refused: it would reach one replica of several
"""

from __future__ import annotations

import hmac
import ipaddress
import posixpath
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from grpod.errors import ConfigError
from grpod.proxy import broadcast, meters, status
from grpod.proxy.answers import problem
from grpod.proxy.broadcast import BroadcastFailed
from grpod.proxy.forward import Forwarder
from grpod.proxy.replicas import Conflict, Fleet
from grpod.proxy.request import BODY_LIMIT, BadRequest, read_document, read_job
from grpod.telemetry.log import get_logger

# what needs no escape in JSON; nor has it any meaning in a path
ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+=~-]{0,199}")
# vLLM's routes by which a trainer writes weights itself: with several replicas behind one address that cannot work
NOT_HERE = {"get_world_size", "init_weight_transfer_engine"}

log = get_logger(role="proxy")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Routes:
    def __init__(self, fleet: Fleet, forwarder: Forwarder, *, token: str | None, mount: str) -> None:
        self._fleet = fleet
        self._forwarder = forwarder
        self._token = token
        self._mount = mount
        self._since = time.time()
        self._running = 0  # requests
        self._idle = anyio.Event()

    def application(self) -> web.Application:
        app = web.Application(client_max_size=BODY_LIMIT, middlewares=[self._errors, self._authorized])
        app.add_routes(
            [
                web.post("/v1/completions", self._complete),
                web.post("/v1/chat/completions", self._complete),
                web.post("/v1/load_lora_adapter", self._load),
                web.post("/v1/unload_lora_adapter", self._unload),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/server_info", self._server_info),
                web.get("/is_paused", self._is_paused),
                web.get("/metrics", self._metrics),
                web.get("/", self._page),
                web.get("/grpod/v1/status", self._status),
                web.get("/grpod/v1/replicas", self._replicas),
                web.post("/grpod/v1/replicas", self._register),
                web.delete("/grpod/v1/replicas", self._leave),
                web.route("*", "/{path:.*}", self._rest),
            ]
        )
        return app

    async def idle(self) -> None:
        """Returns when no request is being answered."""
        while self._running:
            await self._idle.wait()

    # -- around every route

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._running += 1
        try:
            return await handler(request)
        except BadRequest as error:
            return problem(error.status, str(error))
        except BroadcastFailed as error:
            return problem(error.status, str(error))
        except Conflict as error:
            return problem(409, str(error))
        except web.HTTPException as error:
            return problem(error.status, f"{request.method} {request.path}: {error.reason}")
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()
                self._idle = anyio.Event()

    @web.middleware
    async def _authorized(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._token is not None and request.path != "/health":
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            same = hmac.compare_digest(given.strip().encode(errors="surrogateescape"), self._token.encode())
            if scheme.lower() != "bearer" or not same:
                return problem(401, "a bearer token is asked for here", headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    # -- completions, and what nobody knows

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        return await self._forwarder.complete(request, await read_job(request, keep_token=self._token is None))

    async def _rest(self, request: web.Request) -> web.StreamResponse:
        first = request.path.strip("/").partition("/")[0]
        if first in NOT_HERE:
            return problem(501, f"{request.path}: behind a proxy weights travel as adapters: POST /v1/load_lora_adapter")
        if first == "grpod" or request.method not in ("GET", "HEAD"):
            return problem(404, f"{request.method} {request.path}: the proxy does not know this, and does not pass it on")
        return await self._forwarder.pass_on(request)

    # -- broadcasts

    async def _load(self, request: web.Request) -> web.Response:
        document = await read_document(request)
        name, path = _text(document, "lora_name"), _text(document, "lora_path")
        if not ADAPTER_NAME.fullmatch(name):
            raise BadRequest(400, f"lora_name {name!r:.200} must match {ADAPTER_NAME.pattern}")
        self._check_path(request, path)
        await broadcast.load(self._fleet, name, path)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: web.Request) -> web.Response:
        name = _text(await read_document(request), "lora_name")
        await broadcast.unload(self._fleet, name)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _pause(self, request: web.Request) -> web.Response:
        match request.query.get("mode", "abort"):  # vLLM's default
            case "abort" | "wait" | "keep" as mode:
                await broadcast.pause(self._fleet, mode)
            case other:
                raise BadRequest(400, f"mode {other!r}: one of abort, wait, keep")
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        await broadcast.resume(self._fleet)
        return web.json_response({"status": "resumed"})

    def _check_path(self, request: web.Request, path: str) -> None:
        """A replica reads whatever lies there, so not everybody may name any folder."""
        if self._mount:
            mount = posixpath.normpath(self._mount)
            if ".." in path.split("/") or not posixpath.normpath(path).startswith(mount.rstrip("/") + "/"):
                raise BadRequest(403, f"lora_path {path!r:.200} does not lie under proxy.mount {self._mount}")
        elif not is_loopback(request.remote or ""):
            raise BadRequest(403, "lora_path is taken from clients on this machine only, as long as proxy.mount is not set")

    # -- answered here

    async def _health(self, request: web.Request) -> web.Response:
        if self._fleet.healthy():
            return web.Response()
        return problem(
            503, f"{sum(r.up for r in self._fleet.replicas.values())} of {len(self._fleet.replicas)} replicas are up"
        )

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(status.models(self._fleet))

    async def _server_info(self, request: web.Request) -> web.Response:
        info = status.server_info(self._fleet)
        return problem(503, "no replica has told yet") if info is None else web.json_response(info)

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self._fleet.wanted.paused is not None})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=meters.exposition(self._fleet), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(status.status(self._fleet, since=self._since))

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(text=status.page(self._fleet), content_type="text/html")

    # -- members

    async def _replicas(self, request: web.Request) -> web.Response:
        return web.json_response({"replicas": status.replicas(self._fleet)})

    async def _register(self, request: web.Request) -> web.Response:
        document = await read_document(request)
        url = _text(document, "url")
        match document.get("owner"):
            case "generator" | "proxy" as owner:
                try:
                    self._fleet.register(url, owner)
                except ConfigError as error:
                    raise BadRequest(400, str(error)) from None
            case other:
                raise BadRequest(400, f"owner {other!r:.80}: one of generator, proxy")
        ttl_s = self._fleet.timing.ttl_s
        return web.json_response({"ttl_s": ttl_s, "heartbeat_s": ttl_s / 3})

    async def _leave(self, request: web.Request) -> web.Response:
        url = request.query.get("url") or _text(await read_document(request), "url")
        try:
            left = self._fleet.leave(url, "asked to")
        except ConfigError as error:
            raise BadRequest(400, str(error)) from None
        return web.json_response({"left": left})


def _text(document: dict[str, Any], key: str) -> str:
    value = document.get(key)
    if not isinstance(value, str) or not value:
        raise BadRequest(400, f"{key}: a text was expected, not {value!r:.80}")
    return value


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
