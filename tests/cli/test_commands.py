"""The command line itself: usage, roles, joining a run by its URL, `stop`, and how errors are told."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import grpod.daemon
from grpod.cli.start import parse_roles
from grpod.wire import keys
from grpod.wire.run import Final, Run, Stop
from tests.cli.conftest import Grpod

AGREED = {"model": {"base": "b"}, "data": {"source": "d"}, "rewards": [{"function": "math"}], "learner": {"steps": 7}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / keys.RUN).write_bytes(Run(run_id="r", config=AGREED, base_fingerprint="f", created_at=0.0).encode())
    return folder


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """What the daemon would have been started with."""
    calls: list[tuple[object, ...]] = []

    def fake_main(config: object, folder: Path, roles: object, *, takeover: str) -> int:
        calls.append((config, folder, roles, takeover))
        return 0

    monkeypatch.setattr(grpod.daemon, "main", fake_main)
    return calls


def test_help_and_version_are_there(grpod: Grpod) -> None:
    done = grpod("--help")
    assert done.code == 0
    assert all(word in done.out for word in ("--role", "--takeover", "status", "audit", "stop", "config"))
    assert grpod("--version").out.startswith("grpod 0.")
    assert grpod("status", "--help").code == 0


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("--role", "lerner"),
        ("--role", "generator-x"),
        ("--role", "learner-1"),
        ("--role", "learner", "--role", "all"),
        ("--role", "all", "--takeover", "never"),
        ("--role", "learner", "stop", "file:///x"),
        ("no-such-command",),
        ("config",),
        ("config", "--schema", "--check", "x"),
        ("stop",),
    ],
)
def test_bad_usage_exits_2(grpod: Grpod, argv: tuple[str, ...]) -> None:
    done = grpod(*argv)
    assert done.code == 2
    assert "Error:" in done.err
    assert "Traceback" not in done.err


def test_all_stands_for_the_three_roles() -> None:
    assert parse_roles(["all"]) == ("learner", "generator", "proxy")
    assert parse_roles(["generator-0", "generator-01"]) == ("generator-0", "generator-1")


def test_roles_are_started_with_what_the_command_line_says(grpod: Grpod, started: list[tuple[object, ...]]) -> None:
    sets = ["run.bucket=memory://x", "model.base=b", "data.source=d", "rewards=math"]
    argv = [word for text in sets for word in ("--set", text)]
    done = grpod("--role", "all", *argv, "--takeover", "exit", "--log-format", "json", "--log-level", "debug")
    assert done.code == 0, done.err
    ((config, folder, roles, takeover),) = started
    assert isinstance(config, grpod_config())
    assert (config.telemetry.log_format, config.telemetry.log_level) == ("json", "debug")
    assert (folder, roles, takeover) == (Path.cwd(), ("learner", "generator", "proxy"), "exit")


def grpod_config() -> type:
    from grpod.config import Config

    return Config


@pytest.mark.parametrize("role", ["generator", "learner"])
def test_grpod_run_alone_joins_the_run(grpod: Grpod, run: Path, started: list[tuple[object, ...]], role: str) -> None:
    done = grpod("--role", role, "--set", "learner.device=cpu", GRPOD_RUN=f"file://{run}")
    assert done.code == 0, done.err
    config = started[0][0]
    assert isinstance(config, grpod_config())
    assert (config.run.bucket, config.model.base, config.learner.steps) == (f"file://{run}", "b", 7)


def test_a_generator_waits_for_its_run_and_then_exits_75(grpod: Grpod, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/none"
    done = grpod("--role", "generator", "--set", "run.startup_timeout_s=0.2", GRPOD_RUN=url)
    assert done.code == 75
    assert url in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_learner_without_a_config_does_not_wait_for_a_run(grpod: Grpod, tmp_path: Path) -> None:
    done = grpod("--role", "learner", GRPOD_RUN=f"file://{tmp_path}/none")
    assert done.code == 2
    assert "model.base" in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_bad_url_exits_2_at_once(grpod: Grpod) -> None:
    done = grpod("--role", "generator", GRPOD_RUN="file:///tmp/exp#1")
    assert done.code == 2
    assert "'#'" in done.err


def test_stop_writes_one_request(grpod: Grpod, run: Path) -> None:
    done = grpod("stop", f"file://{run}", "--reason", "enough")
    assert done.code == 0
    (key,) = (path.relative_to(run).as_posix() for path in (run / "control").iterdir())
    assert keys.parse_stop(key)
    assert key in done.out
    request = Stop.decode((run / key).read_bytes(), key)
    assert request.reason == "enough"
    assert abs(request.created_at - time.time()) < 3600


def test_stop_of_an_ended_run_is_for_its_proxy_and_no_run_is_refused(grpod: Grpod, run: Path, tmp_path: Path) -> None:
    (run / "final").mkdir()
    final = Final(
        run_id="r", epoch=1, step=1, version=1, base_fingerprint="f", files={}, ledger=[], reason="steps", created_at=0.0
    )
    (run / keys.FINAL_MANIFEST).write_bytes(final.encode())
    assert "has ended already" in grpod("stop", f"file://{run}").out
    assert len(list((run / "control").iterdir())) == 1
    (tmp_path / "other").mkdir()
    for url in (f"file://{tmp_path}/other", f"file://{tmp_path}/none"):
        assert grpod("stop", url).code == 2
    assert not (tmp_path / "none").exists()


def test_status_and_audit_tell_of_a_run_without_a_process(grpod: Grpod, run: Path) -> None:
    for command in ("status", "audit"):
        done = grpod(command, f"file://{run}", "--json")
        assert (done.code, done.err) == (0, "")
        assert isinstance(json.loads(done.out), dict)
        assert grpod(command, f"file://{run}").out
        assert grpod(command, f"file://{run}x").code == 2


def test_audit_exits_1_when_something_does_not_fit(grpod: Grpod, run: Path) -> None:
    (run / "final").mkdir()
    (run / keys.FINAL_MANIFEST).write_bytes(b"{}")
    done = grpod("audit", f"file://{run}", "--deep", "--json")
    assert done.code == 1
    assert json.loads(done.out)["violations"]


def test_an_unexpected_error_is_told_once_with_its_traceback(grpod: Grpod, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("grpod.cli.look.at", broken)
    done = grpod("stop", f"file://{run}")
    assert done.code == 1
    assert done.err.count("Traceback") == 1


def test_an_interrupt_is_no_traceback(grpod: Grpod, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("grpod.cli.look.at", interrupted)
    done = grpod("stop", f"file://{run}")
    assert done.code == 130
    assert "Traceback" not in done.err


def test_the_installed_command_ends_with_the_exit_code(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("learner: {learning_rate: 1e-5x}\n")
    ended = subprocess.run(
        [sys.executable, "-m", "grpod", "--role", "all", "--config", str(path)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("grpod: ConfigError (exit 2): ")
    assert "1e-5x" in ended.stderr
    assert ended.stderr.count("\n") == 1
