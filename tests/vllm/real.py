"""A run that is over in a minute behind a real vLLM on a CPU, and the processes that such a vLLM consists of."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest

from tests.integration.fleet import Grpod, waited
from tests.models import make_tiny_base
from tests.small import make_small_run

VLLM = os.environ.get("VLLM_EXECUTABLE", "")
MARKS = [
    pytest.mark.vllm,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not VLLM, reason="VLLM_EXECUTABLE names no vllm"),
]
HIDDEN = 128  # of the base: vLLM's attention for CPUs knows no heads below 32
SETS = ("generator.engine=vllm", f"generator.vllm.executable={VLLM}", "run.startup_timeout_s=300")
START_S = 240.0  # for a vLLM on a machine with other things to do; alone it takes 25


def make_run(folder: Path) -> Path:
    """Its config, to be used with SETS. It learns so little that it goes on for as long as it is let."""
    config = make_small_run(folder, make_tiny_base(folder / "made", hidden=HIDDEN))
    text = config.read_text().replace("learning_rate: 3.0e-2", "learning_rate: 1.0e-4")
    assert "1.0e-4" in text
    config.write_text(text)
    return config


def sessions(one: Grpod) -> list[int]:
    """Each engine begins a session: whatever it is called, and wherever its environment lies, it stays in that."""
    return [event["pid"] for event in one.events("child_started")]


def engines(one: Grpod) -> dict[int, str]:
    """pid -> title of what belongs to a vLLM of this process: by its session, or by what it has mapped under the mark."""
    known, family, found = sessions(one), one.family(), {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                pid = int(entry.name)
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                ours = int(session) in known or (pid in family and "/site-packages/vllm/" in (entry / "maps").read_text())
                if ours and state not in "ZX":
                    found[pid] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    return found


def process(one: Grpod, name: str) -> int:
    """Of the newest engine, the one that is called so; "API": the one that was started."""
    session = sessions(one)[-1]
    if name == "API":
        return session
    (pid,) = [pid for pid, title in engines(one).items() if title.startswith(f"VLLM::{name}") and os.getsid(pid) == session]
    return pid


def gone(one: Grpod, pids: set[int] | None = None) -> None:
    """Nothing is left of them, or of any engine, 5 s later."""

    def left() -> dict[int, str]:
        return {pid: name for pid, name in engines(one).items() if pids is None or pid in pids}

    waited(lambda: not left(), f"{one.log.name}: vLLM's processes are gone", 5.0, lambda: f"left: {left()}")


def serving(one: Grpod, *, incarnation: int = 1) -> float:
    """Seconds until that engine is healthy."""
    began = time.monotonic()
    waited(
        lambda: len(one.events("child_ready")) >= incarnation or one.process.poll() is not None,
        f"engine {incarnation} is healthy",
        START_S,
        one.tail,
    )
    assert one.process.poll() is None, one.tail()
    return time.monotonic() - began
