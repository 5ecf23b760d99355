"""A real disk that is full for a while, and a folder that becomes read-only half-way."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.fleet import Fleet, Grpod, check_audit, check_groups, check_manifests, check_whole, fleet, waited

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """20 MB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "grpod-test", str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_and_a_read_only_one_are_told_once_and_nothing_is_torn(tmp_path: Path, disk: Path, small: Path) -> None:
    with fleet(tmp_path, small, disk / "run") as on:
        process = on.start("all", sets=("learner.steps=100000", "learner.keep_checkpoints=1000"))
        on.until_step(5)
        ballast = disk / "ballast"
        with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(65536))
        assert "no space left on device" in process.until("put_failed")["error"]
        check_manifests(on.run)
        ballast.unlink()
        goes_on(on, process)

        remount(disk, "ro")
        waited(lambda: "the file system is read-only" in process.log.read_text(), "it is told", failure=process.tail)
        remount(disk, "rw")
        goes_on(on, process)

        process.terminate()
        check_whole(on.run)
        check_groups(on.run)
        check_audit(on)


def remount(disk: Path, how: str) -> None:
    waited(
        lambda: subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], capture_output=True).returncode == 0,
        f"remount {how}: the kernel refuses while a file is open for writing",
    )


def goes_on(on: Fleet, process: Grpod) -> None:
    step = on.state()["step"]
    on.until_step(step + 5)
    loud = Counter(event["event"] for level in ("warning", "error") for event in process.lines() if event.get("level") == level)
    assert max(loud.values()) <= 2, f"one message for each trouble: {loud}"
