"""`generator.devices`: each entry is one replica, on the GPUs that it names.

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

from grpod.errors import ConfigError

_GPU = re.compile(r"(cuda:)?\d+|(GPU|MIG)-\S+")


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
