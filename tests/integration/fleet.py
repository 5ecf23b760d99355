"""Processes of grpod that a test signals, kills and starts again; and what a bucket must hold after each of them.

A process and all that it starts carry a mark in their environment, so that whoever outlives it is found, whatever its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.integration import runs

MARK = "LIFECYCLE_MARK"
PATIENCE_S = 90.0  # for anything that a loaded machine does in seconds


class Grpod:
    """One process, its log (JSON lines), and all that it started."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.log = log
        self.mark = f"{log}:{time.monotonic_ns()}"
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, cwd=runs.ROOT, env={**os.environ, MARK: self.mark}
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def lines(self) -> list[dict[str, Any]]:
        """Of its log."""
        lines = self.log.read_text().split("\n")[:-1]  # the last may be half-written
        return [json.loads(line) for line in lines if line.startswith("{")]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.lines() if event.get("event") == name]

    def until(self, name: str, *, more_than: int = 0) -> dict[str, Any]:
        """The newest of these events, once there are more than that."""
        waited(lambda: len(self.events(name)) > more_than or self.process.poll() is not None, f"{self.log.name}: {name}")
        found = self.events(name)
        assert len(found) > more_than, f"ended with {self.process.returncode} before {name}\n{self.tail()}"
        return found[-1]

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def end(self, timeout_s: float = PATIENCE_S) -> int:
        """Its exit code; nothing that it started is left 5 s later."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s:g} s\n{self.tail()}") from None
        waited(lambda: not self.family(), f"{self.log.name}: left over", 5.0, lambda: str(self.family()))
        return code

    def terminate(self) -> None:
        """SIGTERM; exit 0 inside the grace period (the default: 30 s), by itself."""
        self.signal(signal.SIGTERM)
        code = self.end(32)
        forced = self.events("grace_over") + self.events("ended_by_force")
        assert (code, forced) == (0, []), f"{code}\n{self.tail()}"

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self.end() == -signal.SIGKILL

    def family(self) -> dict[int, str]:
        """pid -> command line of all processes with this mark that live, itself too."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if f"{MARK}={self.mark}\0".encode() in (entry / "environ").read_bytes():
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def tail(self) -> str:
        return "\n".join(line[:500] for line in self.log.read_text().splitlines()[-30:])


class Fleet:
    """All processes that one test starts on one run."""

    def __init__(self, folder: Path, config: Path, run: Path | None = None) -> None:
        """Logs stand in `folder`."""
        self.run = run or folder / "run"
        self._folder, self._config = folder, config
        self._numbers = itertools.count()
        self.started: list[Grpod] = []

    def start(self, *roles: str, sets: tuple[str, ...] = (), args: tuple[str, ...] = (), program: str = "grpod") -> Grpod:
        command = runs.command("--config", str(self._config), *args)
        command[command.index("grpod")] = program
        for role in roles:
            command += ["--role", role]
        for value in (f"run.bucket={self.url}", *sets):
            command += ["--set", value]
        self.started.append(Grpod(command, self._folder / f"{next(self._numbers)}-{'-'.join(roles)}.log"))
        return self.started[-1]

    @property
    def url(self) -> str:
        return f"file://{self.run}"

    def state(self) -> dict[str, Any]:
        """The learner's; empty before there is one."""
        path = self.run / "state/learner.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def begun(self) -> dict[str, int]:
        """Groups, by generator."""
        states = [json.loads(path.read_text()) for path in self.run.glob("state/generators/*.json")]
        return {state["generator"]: state["begun"] for state in states}

    def half_written(self, pid: int) -> list[str]:
        """Temporary files of that process."""
        return [name for _, _, names in os.walk(self.run) for name in names if name.startswith(".") and f"-{pid}-" in name]

    def until_step(self, step: int) -> None:
        waited(lambda: self.state().get("step", -1) >= step, f"step {step}", failure=lambda: self.tails())

    def tails(self) -> str:
        return "\n".join(f"--- {one.log.name}\n{one.tail()}" for one in self.started)


@contextlib.contextmanager
def fleet(folder: Path, config: Path, run: Path | None = None) -> Iterator[Fleet]:
    """Whatever happens inside, nothing of it is left behind."""
    found = Fleet(folder, config, run)
    try:
        yield found
    finally:
        for one in found.started:
            for pid in {*one.family(), *([one.pid] if one.process.poll() is None else [])}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            one.process.wait()


def waited(true: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S, failure: Callable[[], str] = lambda: "") -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s\n{failure()}"
        time.sleep(0.02)


# ---- the bucket, read without grpod's code


def check_whole(run: Path) -> None:
    """No object is torn, and no file is there that is no object."""
    for path in run.rglob("*"):
        if path.is_file():
            assert not path.name.startswith("."), f"{path}: a temporary file was left"
            if path.suffix == ".parquet":
                pq.read_table(path)
            elif path.suffix == ".json":
                json.loads(path.read_text())
    check_manifests(run)


def check_manifests(run: Path) -> None:
    """What has a manifest is what that says."""
    for path in run.rglob("manifest.json"):
        for name, ref in json.loads(path.read_text())["files"].items():
            data = (path.parent / name).read_bytes()
            assert (len(data), hashlib.sha256(data).hexdigest()) == (ref["size"], ref["sha256"]), f"{path.parent / name}"


def ends(run: Path) -> dict[str, dict[str, Any]]:
    """By group id, of the segments that final/ lists, else the newest checkpoint; each id stands there once."""
    if (run / "final/manifest.json").exists():
        rows = runs.ledger(run)
    else:
        manifests = [json.loads(path.read_text()) for path in run.glob("checkpoints/*/manifest.json")]
        newest = max(manifests, key=lambda m: (m["epoch"], m["step"]))
        rows = [row for key in newest["ledger"] for row in pq.read_table(run / key).to_pylist()]
    found = {row["group_id"]: row for row in rows}
    assert len(found) == len(rows), "a group ended twice"
    return found


def check_groups(run: Path) -> dict[str, dict[str, Any]]:
    """What the ledger ends was begun, what was trained was shipped whole and not dropped by its generator. Returns the ends."""
    found = ends(run)
    shipped, drops = runs.rollouts(run)
    known = runs.begun(run) | set(shipped) | set(drops)
    assert found.keys() <= known, sorted(found.keys() - known)
    trained = {group_id for group_id, row in found.items() if row["end"] == "trained"}
    assert trained <= shipped.keys(), sorted(trained - shipped.keys())
    assert trained.isdisjoint(drops), sorted(trained & drops.keys())
    return found


def claims(run: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(run.glob("leases/learner/*/claim.json"))]


def versions(run: Path) -> list[tuple[int, int]]:
    """(version, epoch) of all that were published, canonical or not."""
    made = [json.loads(path.read_text()) for path in run.glob("adapters/v*/manifest.json")]
    return [(manifest["version"], manifest["epoch"]) for manifest in made]


def check_versions(run: Path) -> None:
    """Numbers of canonical versions only rise, from epoch to epoch too."""
    firsts = {claim["epoch"]: claim["first_version"] for claim in claims(run)}
    canonical = sorted(
        (epoch, version)
        for version, epoch in versions(run)
        if all(version < first for later, first in firsts.items() if later > epoch)
    )
    numbers = [version for _, version in canonical]
    assert numbers == sorted(set(numbers)), numbers


def check_audit(fleet: Fleet) -> dict[str, Any]:
    audit = runs.grpod_json("audit", "--json", "--deep", fleet.url)
    assert audit["violations"] == []
    return audit


def metric(run: Path, name: str) -> list[tuple[float, float]]:
    """(when, value) of the learner's, in the order of its steps."""
    rows = [row for path in run.glob("metrics/learner-*/*.parquet") for row in pq.read_table(path).to_pylist()]
    return [(row["time"], row["value"]) for row in sorted(rows, key=lambda r: (r["step"], r["time"])) if row["name"] == name]
