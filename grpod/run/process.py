"""Who holds a lease, as a process; and whether that process is gone.

A proof of death needs the same kernel boot and the same pid namespace; then a pid that is missing, that belongs to a process
started at another time, or that is a zombie, is a holder that will never write again. Everything else is no proof.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from grpod.wire.lease import Holder

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def this_holder() -> Holder:
    pid = os.getpid()
    stat = _stat(pid)
    return Holder(
        host=socket.gethostname(),
        boot_id=_read(_BOOT_ID),
        pid_ns=_pid_namespace(),
        pid=pid,
        start_ticks=stat[1] if stat else 0,
        job_id=os.environ.get("JOB_ID") or None,
    )


def is_gone(holder: Holder) -> bool | None:
    """None: it cannot be told from here (another machine, boot or container; no /proc)."""
    if not holder.boot_id or holder.boot_id != _read(_BOOT_ID) or holder.pid_ns != _pid_namespace():
        return None
    stat = _stat(holder.pid)
    if stat is not None:
        state, start_ticks = stat
        return state in "ZXx" or start_ticks != holder.start_ticks
    # /proc may hide other users' processes (hidepid): only the kernel's own word counts
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return None
    return None


def _stat(pid: int) -> tuple[str, int] | None:
    """(state, start time in clock ticks since boot); the command's name, in brackets, may hold anything, brackets too"""
    text = _read(Path(f"/proc/{pid}/stat"))
    if not text:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
