"""A run as a user starts it: `grpod` in processes of its own; and its bucket as anybody may read it, with pyarrow alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = (  # of a run's folder: this, and nothing else
    r"run\.json",
    r"rollouts/[\w.-]+/\d{10}\.parquet",
    r"adapters/v\d{8}-e\d{6}/(adapter_model\.safetensors|adapter_config\.json|manifest\.json)",
    r"adapters/canary/(adapter_model\.safetensors|adapter_config\.json)",
    r"checkpoints/s\d{8}-e\d{6}/(adapter_model\.safetensors|optimizer\.safetensors|trainer\.json|manifest\.json)",
    r"ledger/e\d{6}/s\d{8}\.parquet",
    r"metrics/[\w.-]+/\d{10}\.parquet",
    r"state/(learner|proxy)\.json",
    r"state/generators/[\w.-]+\.json",
    r"leases/learner/\d{6}/(claim|beat)\.json",
    r"final/(adapter_model\.safetensors|adapter_config\.json|README\.md|manifest\.json)",
)
Row = dict[str, Any]


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "grpod", *args]


def start(role: str, config: Path, sets: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    args = ["--role", role, "--config", str(config)]
    for value in sets:
        args += ["--set", value]
    with log.open("ab") as out:
        return subprocess.Popen(command(*args), stdout=out, stderr=subprocess.STDOUT, cwd=log.parent)


@contextlib.contextmanager
def ended(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Whatever happens inside, none of them is left behind."""
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def wait(process: subprocess.Popen[bytes], timeout_s: float, log: Path) -> None:
    """Exit code 0 within the time, else the end of its log is the failure's message."""
    try:
        code: int | str = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = f"still running after {timeout_s:g} s"
    assert code == 0, f"{log.name}: {code}\n{log.read_text()[-4000:]}"


def terminate(process: subprocess.Popen[bytes], log: Path) -> None:
    process.send_signal(signal.SIGTERM)
    wait(process, 60, log)


def grpod_json(*args: str) -> dict[str, Any]:
    done = subprocess.run(command(*args), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def left_over(marker: str, within_s: float = 10.0) -> list[str]:
    """Command lines that name `marker` (a folder of this test), once they had time to end."""
    deadline = time.monotonic() + within_s
    while True:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if marker in line:
                        found.append(line)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


# ---- the bucket, read with pyarrow and json alone: the accounting does not trust the code that it checks


def document(run: Path, key: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / key).read_text())
    return found


def rollouts(run: Path) -> tuple[dict[str, list[Row]], dict[str, str]]:
    """(group id -> its rows, group id -> why its generator dropped it)"""
    groups: dict[str, list[Row]] = {}
    drops: dict[str, str] = {}
    for path in sorted(run.glob("rollouts/*/*.parquet")):
        table = pq.read_table(path)
        for row in table.to_pylist():
            groups.setdefault(row["group_id"], []).append(row)
        for drop in json.loads(table.schema.metadata[b"drops"]):
            drops[drop["group_id"]] = drop["reason"]
    return groups, drops


def ledger(run: Path) -> list[Row]:
    rows: list[Row] = []
    for key in document(run, "final/manifest.json")["ledger"]:
        rows += pq.read_table(run / key).to_pylist()
    return rows


def begun(run: Path) -> set[str]:
    states = [json.loads(path.read_text()) for path in run.glob("state/generators/*.json")]
    return {f"{state['generator']}/{n}" for state in states for n in range(state["begun"])}
