"""What answers a generator's requests: a child process under the supervisor, or a URL.

An engine has incarnations: one that was restarted holds no adapters, and everything begins anew (`station.py`).
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import anyio

from grpod.config import Config
from grpod.errors import ConfigError, NotReady
from grpod.generator.token_file import TokenFile
from grpod.replica.client import ReplicaClient
from grpod.replica.supervise import ChildSpec, supervised
from grpod.telemetry.log import get_logger

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM's kernels know


class Engine(Protocol):
    @property
    def url(self) -> str: ...

    async def ready(self) -> int:
        """Its incarnation, once it is healthy. Raises NotReady."""

    async def lost(self, incarnation: int) -> None:
        """Returns when that incarnation is gone."""


@asynccontextmanager
async def open_engine(config: Config, base: Path, *, device: str, name: str, token: TokenFile) -> AsyncIterator[Engine]:
    """Returns at once: `ready` waits. Raises ConfigError."""
    generator = config.generator
    if generator.engine == "remote":
        if not generator.remote.url:
            raise ConfigError("generator.remote.url is missing: generator.engine is remote")
        yield Remote(generator.remote.url, config.run.startup_timeout_s, token)
    elif generator.engine == "embedded":
        spec = ChildSpec(
            name=name,
            command=lambda port: embedded_command(config, base, device, port),
            startup_timeout_s=config.run.startup_timeout_s,
        )
        async with supervised(spec, log=get_logger()) as child:
            yield child
    else:
        raise ConfigError(
            f"generator.engine {generator.engine!r} is not in this build yet: use embedded, or remote with its url"
        )


def embedded_command(config: Config, base: Path, device: str, port: int) -> list[str]:
    command = [sys.executable, "-m", "grpod.replica.embedded", "--model", str(base), "--port", str(port)]
    command += ["--dtype", config.model.dtype, "--max-model-len", str(config.model.max_model_len)]
    command += ["--max-loras", str(config.run.max_lag + 4), "--max-lora-rank", str(lora_rank(config.lora.rank))]
    return [*command, "--device", device] if device else command


def lora_rank(rank: int) -> int:
    """The smallest that vLLM knows and that holds `rank`."""
    return next(known for known in LORA_RANKS if known >= rank)


def adapter_root(config: Config) -> str | None:
    """None: the replica reads this machine's disk."""
    generator = config.generator
    if generator.engine != "remote":
        return None
    if generator.remote.adapter_root:
        return generator.remote.adapter_root
    if urlsplit(generator.remote.url).hostname not in ("127.0.0.1", "localhost", "::1"):
        raise ConfigError(
            f"generator.remote.adapter_root is missing: {generator.remote.url} does not share this machine's disk, "
            "so it must be told where the bucket's keys lie there"
        )
    return None


class Remote:
    """A server that somebody else keeps alive. That it was restarted shows when it no longer knows an adapter."""

    def __init__(self, url: str, startup_timeout_s: float, token: Callable[[], str | None]) -> None:
        self.url = url
        self._startup_timeout_s = startup_timeout_s
        self._token = token
        self._incarnation = 0

    async def ready(self) -> int:
        with anyio.move_on_after(self._startup_timeout_s):
            async with ReplicaClient(self.url, token=self._token) as client:
                while not await client.health():  # noqa: ASYNC110  # another host's health: nothing here can tell of it
                    await anyio.sleep(0.5)
            self._incarnation += 1
            return self._incarnation
        raise NotReady(f"replica {self.url} was not healthy within run.startup_timeout_s {self._startup_timeout_s:g} s")

    async def lost(self, incarnation: int) -> None:
        await anyio.sleep_forever()
