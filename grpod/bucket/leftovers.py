"""Temporary names, and who may remove them: a temporary file is left over once its writer is gone, or after a day.

    .grpod-<machine>-<pid>-<random>

The leading dot is what no key can have. <machine> stands for one boot and one namespace of process ids, so that a pid is only
looked up where it means something.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import secrets
import time
from pathlib import Path
from typing import Final

_NAME: Final = re.compile(r"\.grpod-([0-9a-f]{8})-([0-9]+)-[0-9a-f]+")
_DAY_S: Final = 86400.0  # no put takes that long, and no two clocks are that far apart


def temporary_name() -> str:
    return f".grpod-{_machine()}-{os.getpid()}-{secrets.token_hex(6)}"


def remove_leftovers(root: str) -> int:
    """Their number. Walks the whole bucket: once at the first put of a process is enough."""
    removed = 0
    for folder, _, names in os.walk(root):
        for name in names:
            if (match := _NAME.fullmatch(name)) and _is_left_over(path := f"{folder}/{name}", match[1], int(match[2])):
                try:
                    os.unlink(path)
                except (FileNotFoundError, PermissionError):  # somebody else was faster, or it is somebody else's to remove
                    continue
                removed += 1
    return removed


def _is_left_over(path: str, machine: str, pid: int) -> bool:
    if machine == _machine() and not _alive(pid):
        return True
    try:
        return time.time() - os.lstat(path).st_ctime > _DAY_S
    except FileNotFoundError:
        return False


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@functools.cache
def _machine() -> str:
    parts = [platform.node()]
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if boot.exists():
        parts += [boot.read_text().strip(), os.readlink(namespace)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]
