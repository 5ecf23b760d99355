"""What answers a generator's requests: a child process under the supervisor, or a URL.

An engine has incarnations: one that was restarted holds no adapters, and everything begins anew (`station.py`).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import anyio

from grpod.config import Config
from grpod.config_engine import gpus_of
from grpod.errors import ConfigError, NotReady
from grpod.generator.token_file import TokenFile
from grpod.replica import vllm
from grpod.replica.client import ReplicaClient
from grpod.replica.supervise import ChildSpec, supervised
from grpod.run.base_model import max_positions, weights_dtype
from grpod.telemetry.log import get_logger


class Engine(Protocol):
    @property
    def url(self) -> str: ...

    async def ready(self) -> int:
        """Its incarnation, once it is healthy. Raises NotReady."""

    async def lost(self, incarnation: int) -> None:
        """Returns when that incarnation is gone."""

    def restart(self, incarnation: int, reason: str) -> None:
        """Ends that incarnation, where it is ours to end."""

    @property
    def trouble(self) -> str:
        """Why it is not ready, as far as it is known; empty when it is."""


@asynccontextmanager
async def open_engine(
    config: Config, base: Path, *, device: str, name: str, token: TokenFile, learner_here: bool = False
) -> AsyncIterator[Engine]:
    """Returns at once: `ready` waits. `device`: of `generator.devices`; empty: what there is. `learner_here`: it runs on this
    machine, too. Raises ConfigError."""
    generator = config.generator
    if generator.engine == "remote":
        yield Remote(generator.remote.url, config.run.startup_timeout_s, token)
    else:
        if generator.engine == "vllm":
            spec = vllm_spec(config, base, device, name, learner_here=learner_here)
        else:
            spec = ChildSpec(
                name=name,
                command=lambda port: embedded_command(config, base, device, port),
                startup_timeout_s=config.run.startup_timeout_s,
            )
        async with supervised(spec, log=get_logger()) as child:
            yield child


def check_executable(config: Config) -> None:
    """What this machine can tell before the base model is there: that may be gigabytes away. Raises ConfigError."""
    generator = config.generator
    if generator.engine == "vllm" and shutil.which(generator.vllm.executable) is None:
        raise ConfigError(
            f"generator.vllm.executable {generator.vllm.executable!r} is no command here: install vllm (in a checkout of "
            "grpod: pip install -e '.[vllm]'), or name the one of another environment, such as /opt/vllm/bin/vllm"
        )


def vllm_spec(config: Config, base: Path, device: str, name: str, *, learner_here: bool) -> ChildSpec:
    """Raises ConfigError, as check_executable does."""
    check_executable(config)
    gpus = gpus_of(device)
    if not gpus and device != "cpu":
        get_logger().warning("vllm_on_cpu", message="no GPU is to be seen here; generator.devices: [cpu] if that is meant")
    shared = learner_here and not set(gpus).isdisjoint(_learners(config))
    if shared:
        get_logger().info("gpu_shared_with_learner", gpus=list(gpus), gpu_memory_utilization=vllm.SHARED_GPU)
    most = max_positions(base)
    if most is not None and config.model.max_model_len > most:
        raise ConfigError(f"model.max_model_len {config.model.max_model_len}: {base} has positions for {most} tokens")
    dtype = weights_dtype(base, config.model.dtype)
    return ChildSpec(
        name=name,
        command=lambda port: vllm.command(config, str(base), port=port, gpus=gpus, shared=shared, dtype=dtype),
        env=vllm.environment(config, gpus=gpus, outer=os.environ),
        startup_timeout_s=config.run.startup_timeout_s,
        level=vllm.level,
    )


def _learners(config: Config) -> tuple[str, ...]:
    try:
        return gpus_of(config.learner.device)
    except ConfigError:  # the learner's own to tell
        return ()


def embedded_command(config: Config, base: Path, device: str, port: int) -> list[str]:
    command = [sys.executable, "-m", "grpod.replica.embedded", "--model", str(base), "--port", str(port)]
    command += ["--dtype", config.model.dtype, "--max-model-len", str(config.model.max_model_len)]
    command += ["--max-loras", str(config.run.max_lag + 4), "--max-lora-rank", str(vllm.lora_rank(config.lora.rank))]
    return [*command, "--device", device] if device else command


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
        self.trouble = ""

    async def ready(self) -> int:
        with anyio.move_on_after(self._startup_timeout_s):
            async with ReplicaClient(self.url, token=self._token) as client:
                while ailment := await client.ailment():
                    if ailment != self.trouble:
                        get_logger().warning("replica_not_healthy", replica=self.url, error=ailment)
                    self.trouble = ailment
                    await anyio.sleep(0.5)
            self.trouble = ""
            self._incarnation += 1
            return self._incarnation
        raise NotReady(
            f"replica {self.url} was not healthy within run.startup_timeout_s {self._startup_timeout_s:g} s: {self.trouble}"
        )

    async def lost(self, incarnation: int) -> None:
        await anyio.sleep_forever()

    def restart(self, incarnation: int, reason: str) -> None:
        pass  # whoever waits for its answers gives up by itself
