"""A proxy in the test's own event loop, in front of fake replicas, with a stock HTTP client beside it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import anyio

from grpod.bucket.memory import MemoryBucket
from grpod.config import Config
from grpod.context import Context, Stopping
from grpod.proxy import loop
from grpod.proxy.replicas import Timing
from grpod.wire import keys
from grpod.wire.state import ProxyState
from tests.fakes import FakeReplica

QUICK = Timing(
    poll_s=0.1,
    poll_down_s=0.02,
    look_s=5.0,
    ttl_s=0.5,
    rest_s=0.05,
    rest_max_s=0.2,
    retry_s=0.01,
    retry_max_s=0.05,
    server_error_s=0.2,
    broadcast_s=10.0,
    pause_s=10.0,
    patience_s=10.0,
)


@dataclass(kw_only=True)
class Proxy:
    url: str
    bucket: MemoryBucket
    stop: Stopping
    http: aiohttp.ClientSession

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        async with self.http.get(self.url + path, **options) as answer:
            return answer.status, await _content(answer)

    async def post(self, path: str, document: Any = None, **options: Any) -> tuple[int, Any]:
        if document is not None:
            options["json"] = document
        async with self.http.post(self.url + path, **options) as answer:
            return answer.status, await _content(answer)

    async def complete(self, model: str = "base", **more: Any) -> tuple[int, Any]:
        body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 4, "seed": 1, "logprobs": 0, "return_token_ids": True}
        return await self.post("/v1/completions", body | more)

    async def load(self, name: str, path: str | Path = "/nowhere/at/all") -> tuple[int, Any]:
        return await self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), "load_inplace": False})

    async def unload(self, name: str) -> tuple[int, Any]:
        return await self.post("/v1/unload_lora_adapter", {"lora_name": name})

    async def status(self) -> dict[str, Any]:
        code, status = await self.get("/grpod/v1/status")
        assert code == 200
        return status

    async def counters(self, kind: str = "requests") -> dict[str, int]:
        counters = (await self.status())["counters"]
        return {name.partition("/")[2]: count for name, count in counters.items() if name.startswith(kind + "/")}

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Asks for the status until it is so; the test's time-out is the limit."""
        while not condition(status := await self.status()):  # noqa: ASYNC110  (it is asked over HTTP)
            await anyio.sleep(0.01)
        return status

    async def all_up(self, number: int) -> None:
        await self.until(lambda status: [r["state"] for r in status["replicas"]].count("up") == number)


async def until(condition: Callable[[], object]) -> None:
    """Of something in a fake, which tells nobody; the test's time-out is the limit."""
    while not condition():  # noqa: ASYNC110
        await anyio.sleep(0.01)


async def _content(answer: aiohttp.ClientResponse) -> Any:
    return await (answer.json() if answer.content_type == "application/json" else answer.text())


def context(proxy: Mapping[str, Any] | None = None, *, folder: Path = Path("/"), grace_s: float = 5.0) -> Context:
    config = Config.model_validate(
        {"model": {"base": "x"}, "run": {"grace_s": grace_s}, "proxy": {"listen": "127.0.0.1:0", **(proxy or {})}}
    )
    bucket = MemoryBucket(f"memory://{secrets.token_hex(8)}")
    return Context(config=config, folder=folder, bucket=bucket, stop=Stopping(), roles=("proxy",))


async def announced(bucket: MemoryBucket) -> str:
    """Its URL, as anybody finds it."""
    found = await bucket.get(keys.PROXY_STATE)
    assert found is not None
    return ProxyState.decode(found.data, keys.PROXY_STATE).urls[0]


@asynccontextmanager
async def running(
    replicas: Sequence[FakeReplica | str] = (),
    *,
    wait: bool = True,
    folder: Path = Path("/"),
    timing: Any = None,
    **config: Any,
) -> AsyncIterator[Proxy]:
    """Serves, with all `replicas` up unless `wait` is off; ends by the stop request when the block is left. `timing`: changes
    of QUICK."""
    urls = [replica if isinstance(replica, str) else replica.url for replica in replicas]
    ctx = context({"replicas": urls, **config}, folder=folder, grace_s=1.0)
    async with anyio.create_task_group() as tasks, aiohttp.ClientSession() as http:

        async def role(*, task_status: Any) -> None:
            await loop.run(ctx, task_status=task_status, timing=replace(QUICK, **(timing or {})))

        await tasks.start(role)
        while True:  # the state object follows the listener by a moment
            if keys.PROXY_STATE in await ctx.bucket.stat([keys.PROXY_STATE]):
                break
            await ctx.bucket.changed(1.0)
        proxy = Proxy(url=await announced(ctx.bucket), bucket=ctx.bucket, stop=ctx.stop, http=http)
        if wait:
            await proxy.all_up(len(urls))
        yield proxy
        ctx.stop.request("the test is over")


def adapter(folder: Path, content: bytes = b"weights") -> Path:
    """What counts as an adapter for who only reads its bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 4}')
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder
