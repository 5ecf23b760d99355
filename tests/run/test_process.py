from __future__ import annotations

import os
import subprocess
import sys

import pytest

from grpod.run import process
from grpod.run.process import is_gone, this_holder


def test_this_process_is_there() -> None:
    me = this_holder()
    assert me.pid == os.getpid()
    assert me.boot_id
    assert me.start_ticks > 0
    assert is_gone(me) is False


@pytest.mark.parametrize("change", [{"boot_id": "another"}, {"boot_id": ""}, {"pid_ns": "pid:[1]"}])
def test_of_another_machine_boot_or_container_nothing_can_be_told(change: dict[str, str]) -> None:
    assert is_gone(this_holder().model_copy(update={"pid": 999_999_999, **change})) is None


def test_a_pid_that_was_reused_is_another_process() -> None:
    me = this_holder()
    assert is_gone(me.model_copy(update={"start_ticks": me.start_ticks - 1})) is True


def test_an_ended_process_is_gone_as_a_zombie_and_after() -> None:
    # brackets and blanks in its name must not confuse the reading of /proc/<pid>/stat
    child = subprocess.Popen([sys.executable, "-c", "open('/proc/self/comm','w').write('a) Z (b'); print('up'); input()"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        stat = process._stat(child.pid)
        assert stat is not None
        holder = this_holder().model_copy(update={"pid": child.pid, "start_ticks": stat[1]})
        assert is_gone(holder) is False
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and still a zombie
        assert is_gone(holder) is True
    assert is_gone(holder) is True


def test_a_pid_that_proc_hides_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_stat", lambda pid: None)
    me = this_holder()
    assert is_gone(me) is None
    assert is_gone(me.model_copy(update={"pid": 2**22 + 1})) is True  # above the largest pid that Linux gives


def test_the_job_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_ID", "68b1")
    assert str(this_holder()).endswith("(Job 68b1)")
