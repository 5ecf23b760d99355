"""The bucket in a folder: the whole contract, what other programs leave there, and a disk that is full or read-only."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import pytest
import structlog
from hypothesis import settings

from grpod.bucket import disk, leftovers, mounts
from grpod.bucket.file import FileBucket
from grpod.errors import AlreadyExists, BucketError, ConfigError, NotFound
from tests.bucket.contract import BucketContract, keys_of, machine


class TestFileBucket(BucketContract):
    @pytest.fixture
    def open_again(self, tmp_path: Path) -> Callable[[], FileBucket]:
        return lambda: FileBucket(tmp_path / "bucket")


TestFileMachine = machine(lambda: FileBucket(tempfile.mkdtemp(prefix="grpod-machine-"))).TestCase
TestFileMachine.settings = settings(max_examples=20, stateful_step_count=20, deadline=None, database=None)


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


RACER = """
import sys, anyio, os, time
from grpod.bucket.file import FileBucket
from grpod.errors import AlreadyExists

async def race(folder, me):
    bucket = FileBucket(folder)
    print("ready", flush=True)
    sys.stdin.readline()
    for i in range(60):
        try:
            await bucket.put({f"leases/{i:02d}/claim.json": me.encode() * 3000}, create=True)
        except AlreadyExists:
            continue
        print(i, flush=True)

anyio.run(race, sys.argv[1], sys.argv[2])
"""


def test_of_racing_processes_one_wins_each_name(tmp_path):
    racers = {
        name: subprocess.Popen(
            [sys.executable, "-c", RACER, tmp_path, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name in ("a", "b", "c")
    }
    for racer in racers.values():
        assert racer.stdout.readline() == "ready\n"
    for racer in racers.values():
        racer.stdin.write("go\n")
        racer.stdin.flush()
    won = {name: [int(line) for line in racer.communicate(timeout=60)[0].split()] for name, racer in racers.items()}
    assert sorted(i for numbers in won.values() for i in numbers) == list(range(60))
    for name, numbers in won.items():
        for i in numbers:
            assert (tmp_path / f"leases/{i:02d}/claim.json").read_bytes() == name.encode() * 3000
    assert len(files_below(tmp_path)) == 60


@pytest.mark.anyio
async def test_a_lost_answer_to_the_link_is_no_loss(tmp_path, monkeypatch):
    """NFS asks again when an answer is lost, and is then told that the name is there."""
    link = os.link

    def twice(source: str, target: str) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", twice)
    bucket = FileBucket(tmp_path)
    await bucket.put({"a": b"mine"}, create=True)
    with pytest.raises(AlreadyExists):
        await bucket.put({"a": b"other"}, create=True)
    assert files_below(tmp_path) == ["a"]


@pytest.mark.anyio
async def test_what_no_key_can_be_is_not_listed(tmp_path):
    bucket = FileBucket(tmp_path)
    await bucket.put({"rollouts/g/0000000001.parquet": b"1"})
    for name in (".DS_Store", "rollouts/g/.grpod-0-1-a", "rollouts/a file", "rollouts/é.parquet", ".git/config", "a b/c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "rollouts/g/0000000002.parquet.tmp").write_bytes(b"")  # this could be one: the reader of names judges
    os.mkfifo(tmp_path / "pipe")
    assert await keys_of(bucket) == ["rollouts/g/0000000001.parquet", "rollouts/g/0000000002.parquet.tmp"]
    with pytest.raises(NotFound):
        await bucket.get("pipe")
    assert await bucket.stat(["pipe"]) == {}


@pytest.mark.anyio
async def test_no_link_leads_out_of_the_folder(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    bucket = FileBucket(tmp_path / "bucket")
    (tmp_path / "bucket/folder").symlink_to(outside)
    (tmp_path / "bucket/file").symlink_to(outside / "secret")
    assert await keys_of(bucket) == await keys_of(bucket, "folder") == []
    for key in ("folder/secret", "file"):
        assert await bucket.stat([key]) == {}
        with pytest.raises(NotFound):
            await bucket.get(key)
        with pytest.raises(NotFound):
            await bucket.fetch({key: tmp_path / "copy"})
        with pytest.raises(BucketError, match="symbolic link") as caught:
            await bucket.put({key: b"new"}, create=True)
        assert not isinstance(caught.value, AlreadyExists)
    await bucket.delete(["folder/secret", "file"])
    assert (tmp_path / "bucket/file").is_symlink()
    await bucket.put({"file": b"mine"})  # replaces the link, not what it points to
    assert (outside / "secret").read_bytes() == b"secret"
    assert (await bucket.get("file")).data == b"mine"


@pytest.mark.anyio
async def test_the_folder_itself_may_be_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    await FileBucket(tmp_path / "link").put({"a": b"1"}, create=True)
    assert (await FileBucket(tmp_path / "real").get("a")).data == b"1"


@pytest.mark.anyio
async def test_a_file_in_the_way_of_a_folder_is_said(tmp_path):
    bucket = FileBucket(tmp_path)
    await bucket.put({"a": b""})
    for create in (False, True):
        with pytest.raises(BucketError, match="'a/b': a folder of it is a file") as caught:
            await bucket.put({"a/b": b""}, create=create)
        assert not isinstance(caught.value, AlreadyExists)
        with pytest.raises(BucketError, match="'c': it is a folder"):
            await bucket.put({"c/d": b""}) or await bucket.put({"c": b""}, create=create)
    assert files_below(tmp_path) == ["a", "c/d"]


@pytest.mark.anyio
async def test_a_put_of_another_process_wakes(tmp_path):
    """Plain writes stand for another process: nothing in this one rings."""
    bucket = FileBucket(tmp_path)
    await bucket.put({"state/learner.json": b"", "rollouts/g1/0": b"", "state/generators/g1.json": b""})
    await bucket.changed(0)
    for name in ("state/new.json", "rollouts/g1/1", "rollouts/g2/0", "control/stop-1.json", "run.json", "final/manifest.json"):
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tg:
                tg.start_soon(bucket.changed, 3600)
                (tmp_path / name).parent.mkdir(exist_ok=True)
                (tmp_path / name).write_bytes(b"")
        await bucket.changed(0.2)  # the mtime grows old: a second look, not another change
    # and one that happens while nobody waits
    (tmp_path / "rollouts/g2/1").write_bytes(b"")
    with anyio.fail_after(20):
        await bucket.changed(3600)


# -- a disk that is full, read-only, or not ours


def refuse(monkeypatch: pytest.MonkeyPatch, call: str, number: int, when: Callable[..., bool]) -> None:
    real = getattr(os, call)

    def refusing(*args: object, **kwargs: object) -> object:
        if when(*args):
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, call, refusing)


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, "no space left on device"),
        (errno.EDQUOT, "the quota is used up"),
        (errno.EROFS, "the file system is read-only"),
        (errno.EACCES, "permission denied"),
        (errno.EIO, "Input/output error"),
    ],
)
@pytest.mark.parametrize("call", ["open", "fsync", "link", "replace", "mkdir"])
@pytest.mark.anyio
async def test_a_refusing_disk_gives_one_message_and_leaves_nothing_torn(tmp_path, monkeypatch, call, number, reason):
    bucket = FileBucket(tmp_path)
    await bucket.put({"a/old": b"old"})
    key = "new/x" if call == "mkdir" else "a/old" if call == "replace" else "a/x"
    with monkeypatch.context() as patch:
        refuse(patch, call, number, lambda *args: call != "open" or bool(args[1] & os.O_CREAT))
        with pytest.raises(BucketError) as caught:
            await bucket.put({key: b"new"}, create=call != "replace")
    assert caught.value.keys == (key,)
    message = str(caught.value)
    assert all(part in message for part in (reason, key, bucket.url, " free of ")), message
    assert "\n" not in message
    assert files_below(tmp_path) == ["a/old"]
    assert (await bucket.get("a/old")).data == b"old"
    await bucket.put({key: b"new"})
    assert (await bucket.get(key)).data == b"new"


@pytest.mark.anyio
async def test_a_file_system_without_links_cannot_create(tmp_path, monkeypatch):
    bucket = FileBucket(tmp_path)
    refuse(monkeypatch, "link", errno.EPERM, lambda *args: True)
    with pytest.raises(BucketError, match="no hard links"):
        await bucket.put({"a": b""}, create=True)
    assert files_below(tmp_path) == []


@pytest.mark.anyio
async def test_the_keys_that_failed_for_one_reason_stand_in_one_message(tmp_path, monkeypatch):
    bucket = FileBucket(tmp_path)
    await bucket.put({"c": b""})
    refuse(monkeypatch, "fsync", errno.ENOSPC, lambda *args: True)
    with pytest.raises(BucketError, match=r"'a', 'b', 'd' and 1 more: no space left .*; 'c': already there") as caught:
        await bucket.put(dict.fromkeys("abcde", b""), create=True)
    assert not isinstance(caught.value, AlreadyExists)
    assert sorted(caught.value.keys) == ["a", "b", "c", "d", "e"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"this machine lets nobody mount a small disk: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.anyio
async def test_a_disk_that_fills_is_whole_again_once_there_is_room(small_disk, tmp_path):
    bucket = FileBucket(small_disk)
    await bucket.put({"checkpoints/1/optimizer": b"x" * 700_000, "checkpoints/1/manifest.json": b"{}"})
    (tmp_path / "source").write_bytes(b"y" * 700_000)
    for body in (b"y" * 700_000, tmp_path / "source"):
        with pytest.raises(
            BucketError, match=r"'checkpoints/2/optimizer': no space left on device \(.* kB free of 1.05 MB"
        ) as caught:
            await bucket.put({"checkpoints/2/optimizer": body, "checkpoints/2/trainer.json": b"{}"})
        assert caught.value.keys == ("checkpoints/2/optimizer",)
    assert files_below(small_disk) == ["checkpoints/1/manifest.json", "checkpoints/1/optimizer", "checkpoints/2/trainer.json"]
    with pytest.raises(BucketError, match=r"copy to .* no space left"):
        await bucket.fetch({"checkpoints/1/optimizer": small_disk / "elsewhere"})
    await bucket.delete(["checkpoints/1/manifest.json", "checkpoints/1/optimizer"])
    await bucket.put({"checkpoints/2/optimizer": tmp_path / "source"})
    assert (await bucket.get("checkpoints/2/optimizer")).data == b"y" * 700_000


@pytest.mark.anyio
async def test_a_read_only_disk_is_read(small_disk):
    bucket = FileBucket(small_disk)
    await bucket.put({"a/b": b"1"})
    await anyio.run_process(["mount", "-o", "remount,ro", str(small_disk)])
    for key in ("a/b", "c/d", "a/e"):
        with pytest.raises(BucketError, match=f"cannot write in file://.*'{key}': the file system is read-only"):
            await bucket.put({key: b"2"})
    with pytest.raises(BucketError, match=r"cannot delete in file://.*'a/b': the file system is read-only") as caught:
        await bucket.delete(["a/b", "z"])
    assert caught.value.keys == ("a/b",)
    with pytest.raises(BucketError, match=r"cannot make the folder .*read-only"):
        FileBucket(small_disk / "more")
    again = FileBucket(small_disk)
    assert (await again.get("a/b")).data == b"1"
    assert files_below(small_disk) == ["a/b"]


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is denied to root")
@pytest.mark.anyio
async def test_a_folder_that_is_not_ours_is_said(tmp_path):
    bucket = FileBucket(tmp_path / "bucket")
    (tmp_path / "bucket").chmod(0o555)
    with pytest.raises(BucketError, match="permission denied"):
        await bucket.put({"a": b""})


def test_a_folder_that_is_missing_or_a_file_is_a_matter_of_the_config(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        FileBucket(tmp_path / "none", create=False)
    assert not (tmp_path / "none").exists()
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(ConfigError, match="a file stands there"):
            FileBucket(path)


# -- temporary files of the dead, and mounts


@pytest.mark.anyio
async def test_what_a_crashed_writer_left_is_removed_at_the_first_put(tmp_path):
    script = "import os; from grpod.bucket.leftovers import temporary_name as t; print(os.getpid(), t())"
    pid, dead = (await anyio.run_process([sys.executable, "-c", script])).stdout.decode().split()
    mine, foreign = leftovers.temporary_name(), f".grpod-00000000-{pid}-aa"
    (tmp_path / "a/b").mkdir(parents=True)
    for name in (dead, mine, foreign, ".grpod-not-ours"):
        (tmp_path / "a/b" / name).write_bytes(b"torn")
    bucket = FileBucket(tmp_path)
    assert await keys_of(bucket) == []
    assert dead in os.listdir(tmp_path / "a/b")  # a reader removes nothing
    await bucket.put({"x": b""})
    assert sorted(os.listdir(tmp_path / "a/b")) == sorted([mine, foreign, ".grpod-not-ours"])


def test_a_temporary_file_of_another_machine_is_removed_after_a_day(tmp_path, monkeypatch):
    (tmp_path / ".grpod-00000000-1-aa").write_bytes(b"torn")
    assert leftovers.remove_leftovers(str(tmp_path)) == 0
    monkeypatch.setattr(leftovers, "_DAY_S", -1.0)
    assert leftovers.remove_leftovers(str(tmp_path)) == 1


@pytest.mark.anyio
async def test_on_a_mounted_bucket_creates_are_not_atomic_and_one_warning_says_so(tmp_path, monkeypatch):
    folder = tmp_path / "with space"
    escaped = str(folder).replace(" ", "\\040")
    table = f"/dev/vda / ext4 rw 0 0\nhf-mount {escaped} fuse rw 0 0\ntmpfs {tmp_path}x tmpfs rw 0 0\n"
    (tmp_path / "mounts").write_text(table)
    monkeypatch.setattr(mounts, "MOUNTS", tmp_path / "mounts")
    with structlog.testing.capture_logs() as logs:
        bucket, _, beside = FileBucket(folder), FileBucket(folder), FileBucket(tmp_path / "beside")
    assert [entry["event"] for entry in logs] == ["bucket_on_mount"]
    assert "hf://" in logs[0]["advice"]
    assert (bucket.atomic_create, beside.atomic_create) == (False, True)
    await bucket.put({"a": b"1"}, create=True)
    with pytest.raises(AlreadyExists):
        await bucket.put({"a": b"2"}, create=True)
    assert (await bucket.get("a")).data == b"1"
    assert files_below(folder) == ["a"]


@pytest.mark.parametrize(
    ("folder", "wanted"),
    [
        ("/data/b/run", ("hf-mount", "fuse")),
        ("/data/bb", ("/dev/sda", "ext4")),
        ("/x", ("/dev/root", "ext4")),
        ("/data/c", ("b", "fuse.hf-mount")),
    ],
)
def test_the_mount_of_a_folder_is_the_longest_and_last(folder, wanted):
    table = (
        "/dev/root / ext4 rw 0 0\n/dev/sda /data ext4 rw 0 0\nhf-mount /data/b fuse rw 0 0\n"
        "a /data/c nfs rw 0 0\nb /data/c fuse.hf-mount rw 0 0\n"
    )
    assert mounts.mount_of(Path(folder), table) == wanted


def test_sizes_are_told_as_people_read_them():
    assert [disk._size(n) for n in (0, 999, 1000, 1_048_576, 24_400_000_000, 10**13)] == [
        "0 B", "999 B", "1 kB", "1.05 MB", "24.4 GB", "10 TB",
    ]  # fmt: skip


@pytest.mark.anyio
async def test_a_folder_goes_with_its_last_object(tmp_path):
    bucket = FileBucket(tmp_path / "run")
    await bucket.put({"checkpoints/1/a": b"1", "checkpoints/1/b": b"2", "checkpoints/2/a": b"3"})
    await bucket.delete(["checkpoints/1/a"])
    assert (tmp_path / "run/checkpoints/1").is_dir()
    await bucket.delete(["checkpoints/1/b"])
    assert not (tmp_path / "run/checkpoints/1").exists()
    await bucket.put({"checkpoints/1/c": b"4"})
    assert files_below(tmp_path / "run") == ["checkpoints/1/c", "checkpoints/2/a"]


@pytest.mark.anyio
async def test_a_folder_that_vanishes_under_a_put_is_made_again(tmp_path, monkeypatch):
    bucket = FileBucket(tmp_path / "run")
    make, left = disk._make_folders, [tmp_path / "run/rollouts/g"] * 3

    def made_and_gone(root, folder):
        touched = make(root, folder)
        if left:
            left.pop().rmdir()
        return touched

    monkeypatch.setattr(disk, "_make_folders", made_and_gone)
    await bucket.put({"rollouts/g/0": b"1"}, create=True)
    assert files_below(tmp_path / "run") == ["rollouts/g/0"]
