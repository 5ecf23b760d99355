"""What is asked of a generator's engine, as far as the values alone tell: nothing is started for it, nothing connected.

    remote   a URL, of one server
    vllm     devices, arguments that leave grpod's own alone (`OURS`)
    embedded devices, each a single one

`generator.devices`: each entry is one replica, on the GPUs that it names.

cuda:0 or 0        one                cuda:0+cuda:1      both, as one (tensor parallel; vLLM alone does that)
GPU-…, MIG-…       by id              cpu                none
no entry, auto     the first one that is to be seen, else none
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from grpod.config import Config
from grpod.errors import ConfigError

OURS = ("--host", "--port", "--uds", "--served-model-name", "--model", "--api-key", "--enable-lora", "--no-enable-lora")

_GPU = re.compile(r"(cuda:)?\d+|(GPU|MIG)-\S+")


def check_engine(config: Config) -> None:
    """Of the engine that is asked for, what its values alone tell. Raises ConfigError."""
    generator = config.generator
    if generator.engine == "remote":
        if not _is_http(generator.remote.url):
            raise ConfigError(f"generator.remote.url {generator.remote.url!r}: a URL like http://host:port was expected")
        if len(generator.devices) > 1:
            raise ConfigError("generator.devices names several, but generator.remote.url is one server: a generator each")
        return
    check_devices(generator.devices, parallel=generator.engine == "vllm")
    if generator.engine == "vllm":
        check_args(generator.vllm.args)


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def gpus_of(device: str) -> tuple[str, ...]:
    """Of one entry. Raises ConfigError."""
    if device == "cpu":
        return ()
    if device in ("", "auto", "cuda"):
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
        there = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
        return ("cuda:0",) if there and not hidden else ()
    parts = [part.strip() for part in device.split("+")]
    for part in parts:
        if not _GPU.fullmatch(part):
            raise ConfigError(f"generator.devices: {device!r} is no device: cpu, cuda:0, or cuda:0+cuda:1 (tensor parallel)")
    return tuple(f"cuda:{part}" if part.isdigit() else part for part in parts)


def check_devices(devices: Sequence[str], *, parallel: bool) -> None:
    """`parallel`: the engine can use several GPUs as one. Raises ConfigError."""
    named = Counter(gpu for device in devices for gpu in gpus_of(device))
    for gpu, times in named.items():
        if times > 1:
            raise ConfigError(f"generator.devices names {gpu} {times} times: each replica needs GPUs of its own")
    for device in devices:
        if "+" in device and not parallel:
            raise ConfigError(f"generator.devices: {device!r}: only generator.engine vllm uses several GPUs as one")


def flag(arg: str) -> str:
    """--max_loras=4 -> --max-loras, as vLLM reads it; empty for a value."""
    return arg.partition("=")[0].replace("_", "-") if arg.startswith("--") else ""


def check_args(args: Sequence[str]) -> None:
    """Raises ConfigError for what would keep grpod from reaching its child."""
    for arg in args:
        if arg.startswith("--") and " " in arg.partition("=")[0]:
            name, _, value = arg.partition(" ")
            raise ConfigError(f"generator.vllm.args holds {arg!r}: write it as two entries, {name!r} and {value.strip()!r}")
        if flag(arg) in OURS:
            raise ConfigError(f"generator.vllm.args holds {arg!r}, which grpod sets by itself")
