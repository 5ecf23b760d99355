"""The daemon as a process: signals, exit codes, readiness, and what is said. The roles stand in daemon_script.py."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpod.ending import cancel_after_s, exit_code, force_after_s
from grpod.errors import BucketError, LeaseLost, NotReady
from grpod.wire import keys
from grpod.wire.run import Stop
from grpod.wire.state import LearnerState


class Daemon:
    def __init__(self, folder: Path, *args: str) -> None:
        self.folder = folder
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.daemon_script", str(folder), *args],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def until(self, event: str) -> dict[str, Any]:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if line.startswith("{") and json.loads(line)["event"] == event:
                return dict(json.loads(line))
        raise AssertionError(f"ended without {event!r}: {self.lines}")

    def end(self) -> int:
        out, err = self.process.communicate(timeout=60)
        assert out == ""
        self.lines += err.splitlines()
        return self.process.returncode

    def events(self, name: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in self.lines if line.startswith("{")]
        return [event for event in found if event["event"] == name]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    started: list[Daemon] = []

    def start_one(*args: str, folder: Path = tmp_path / "run") -> Daemon:
        started.append(Daemon(folder, *args))
        return started[-1]

    yield start_one
    for daemon in started:
        if daemon.process.poll() is None:
            daemon.process.kill()
            daemon.process.communicate()
        for stream in (daemon.process.stdout, daemon.process.stderr):
            assert stream is not None
            stream.close()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_the_roles_drain_and_exits_0(start: Any, signum: int) -> None:
    daemon = start("learner=drains", "generator-1=drains", "proxy=drains")
    daemon.until("ready")
    daemon.process.send_signal(signum)
    assert daemon.end() == 0
    assert daemon.events("stopping")[0]["grace_s"] == 30
    assert daemon.events("stopping")[0]["reason"] == signal.Signals(signum).name
    assert {event["role"] for event in daemon.events("drained")} == {"learner", "generator-1", "proxy"}
    assert not any("Traceback" in line for line in daemon.lines)


def test_a_role_gets_its_index_and_says_whose_line_it_is(start: Any) -> None:
    daemon = start("generator-1=drains", "learner=drains")
    daemon.until("ready")
    daemon.process.terminate()
    assert daemon.end() == 0
    serving = {event["role"]: event["index"] for event in daemon.events("serving")}
    assert serving == {"generator-1": 1, "learner": None}
    assert "run" not in daemon.events("serving")[0]


def test_a_runs_name_stands_in_every_line(start: Any) -> None:
    daemon = start("learner=done", "run.name=the fifth try")
    assert daemon.end() == 0
    for event in ("starting", "role_ended", "ended"):
        assert daemon.events(event)[0]["run"] == "the fifth try"


def test_a_role_that_does_not_hear_is_cancelled_before_the_grace_period_is_over(start: Any) -> None:
    daemon = start("learner=deaf", "run.grace_s=1")
    daemon.until("ready")
    daemon.process.terminate()
    assert daemon.end() == 0
    assert daemon.events("grace_over")[0]["still_running"] == ["learner"]
    assert daemon.events("cleaned_up")
    assert not daemon.events("ended_by_force")


def test_a_role_stuck_in_a_thread_does_not_hold_up_the_end(start: Any) -> None:
    daemon = start("learner=stuck", "run.grace_s=0.5")
    daemon.until("ready")
    daemon.process.terminate()
    assert daemon.end() == 0
    assert daemon.events("ended_by_force")[0]["exit_code"] == 0


@pytest.mark.parametrize(("function", "sign"), [("deaf", "stopping"), ("blocks", "blocking")])
def test_the_second_signal_ends_it_at_once_even_if_the_loop_is_blocked(start: Any, function: str, sign: str) -> None:
    daemon = start(f"learner={function}", "run.grace_s=3600")
    daemon.until("ready")
    daemon.process.terminate()
    daemon.until(sign)
    daemon.process.send_signal(signal.SIGINT)
    assert daemon.end() == 128 + signal.SIGINT
    assert not daemon.events("cleaned_up")


def test_who_was_stopped_is_told_how_it_goes_on(start: Any, tmp_path: Path) -> None:
    state = LearnerState(epoch=1, counter=1, version=7, pos=7, step=12, steps=80, updated_at=0.0)
    path = tmp_path / "run" / keys.LEARNER_STATE
    path.parent.mkdir(parents=True)
    path.write_bytes(state.encode())
    daemon = start("learner=drains")
    daemon.until("ready")
    daemon.process.terminate()
    out, _ = daemon.process.communicate(timeout=60)
    assert out.strip() == "stopped at step 12 of 80: the same command goes on from there"


def test_a_crash_exits_1_with_one_traceback_and_cancels_the_others(start: Any) -> None:
    daemon = start("learner=crashes", "generator=deaf", "run.name=crashes")
    assert daemon.end() == 1
    (crash,) = daemon.events("crashed")
    assert "ZeroDivisionError" in crash["exception"]
    assert "in role learner" in crash["exception"]
    assert sum(line.count("Traceback") for line in daemon.lines) == 1
    assert daemon.events("cleaned_up")


def test_a_crash_beside_a_stuck_role_still_exits_1(start: Any) -> None:
    daemon = start("learner=crashes", "generator=stuck", "run.grace_s=0.5")
    assert daemon.end() == 1
    assert sum(line.count("Traceback") for line in daemon.lines) == 1


@pytest.mark.parametrize(
    ("function", "code", "error"),
    [("config_error", 2, "ConfigError"), ("lease_lost", 3, "LeaseLost"), ("not_ready", 75, "NotReady")],
)
def test_an_expected_error_is_one_line_and_its_own_exit_code(start: Any, function: str, code: int, error: str) -> None:
    daemon = start(f"learner={function}", "generator=deaf")
    assert daemon.end() == code
    (failed,) = daemon.events("failed")
    assert (failed["error"], failed["exit_code"], failed["where"]) == (error, code, "in role learner")
    assert not any("Traceback" in line for line in daemon.lines)


def test_a_role_that_is_never_ready_ends_with_75_and_is_named(start: Any) -> None:
    daemon = start("learner=drains", "generator=never_ready", "run.startup_timeout_s=0.5")
    assert daemon.end() == 75
    assert "generator" in daemon.events("failed")[0]["message"]
    assert "learner" not in daemon.events("failed")[0]["message"]
    assert not daemon.events("ready")


def test_a_bucket_that_cannot_be_made_ends_with_75(start: Any) -> None:
    daemon = start("learner=drains", folder=Path("/proc/no/run"))
    assert daemon.end() == 75


def test_roles_start_together_whichever_waits_for_which(start: Any) -> None:
    daemon = start("generator=waits_for_learner", "learner=begins")
    assert daemon.end() == 0
    assert daemon.events("ready")


def test_the_proxy_ends_when_the_other_roles_have(start: Any) -> None:
    daemon = start("learner=done", "proxy=drains")
    assert daemon.end() == 0
    assert daemon.events("ended")[0]["reason"] == "the roles have ended"


def test_a_proxy_alone_serves_until_it_is_stopped_without_a_bucket_too(start: Any, tmp_path: Path) -> None:
    daemon = start("proxy=drains", "run.bucket=", "run.lease_ttl_s=1")
    daemon.until("ready")
    daemon.process.terminate()
    assert daemon.end() == 0
    assert daemon.events("ended")[0]["reason"] == "SIGTERM"
    assert not (tmp_path / "run").exists()


def test_a_stop_request_lets_every_role_drain_and_one_from_before_does_not(start: Any, tmp_path: Path) -> None:
    control = tmp_path / "run" / "control"
    control.mkdir(parents=True)
    request = Stop(created_at=time.time()).encode()
    (tmp_path / "run" / keys.stop("0ld")).write_bytes(request)
    daemon = start("learner=drains", "proxy=drains")
    daemon.until("ready")
    (control / "new").write_bytes(request)
    (control / "new").rename(tmp_path / "run" / keys.stop("ab12"))
    assert daemon.end() == 0
    assert daemon.events("stopping")[0]["reason"] == "stop request control/stop-ab12.json"
    assert {event["role"] for event in daemon.events("drained")} == {"learner", "proxy"}


def test_a_signal_while_it_is_still_starting_exits_0(start: Any) -> None:
    daemon = start("learner=spawns", "proxy=drains")
    assert daemon.end() == 0


@pytest.mark.parametrize("grace_s", [0.1, 0.5, 1.0, 10.0, 30.0, 3600.0])
def test_the_end_by_force_comes_after_the_cancellation_and_within_the_grace_period(grace_s: float) -> None:
    assert 0 < cancel_after_s(grace_s) < force_after_s(grace_s) < grace_s


def test_the_first_error_decides_not_what_its_cancellation_brought_about() -> None:
    crash_first = BaseExceptionGroup("", [ExceptionGroup("", [KeyError("x")]), NotReady("cut short")])
    assert exit_code(crash_first) == 1
    assert exit_code(ExceptionGroup("", [LeaseLost("gone"), BucketError("cut short")])) == 3


def test_one_fault_in_two_roles_is_told_once(start: Any) -> None:
    daemon = start("learner=config_error", "generator=config_error", "run.name=together")
    assert daemon.end() == 2
    (failed,) = daemon.events("failed")
    assert failed["where"] == "in role learner, in role generator"
