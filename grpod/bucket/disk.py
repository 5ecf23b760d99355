"""Objects as files of one folder, blocking: what `FileBucket` runs in threads.

    put     temporary file in the same folder ─ fsync ─▶ link (create) or rename (overwrite) ─▶ fsync of the folder
    get     one open file: an object is replaced as a whole, never changed, so what is open is never torn
    list    one folder after the other, in key order

A temporary name begins with a dot, which no key can. A symbolic link below the folder is nobody's object: reads do not see it,
writes through it are refused. All functions raise OSError; `explain` makes one message of it.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import stat as st
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from grpod.bucket.base import Object, ObjectMeta, check_key, is_key
from grpod.bucket.leftovers import temporary_name
from grpod.errors import BucketError

_CHUNK: Final = 1 << 20
_NO_OBJECT: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)  # nothing there, or something else
_NO_LINKS: Final = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
_REASONS: Final = {
    errno.ENOSPC: "no space left on device",
    errno.EDQUOT: "the quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ENOTDIR: "a folder of it is a file",
    errno.EISDIR: "it is a folder",
    errno.ELOOP: "a symbolic link stands there, and none is followed",
}
_VANISHED: Final = 5  # times that a folder may vanish while something is put into it


def explain(error: OSError, root: str) -> str:
    """What went wrong, and how much is free there."""
    reason = _REASONS.get(error.errno or 0) or str(error)
    try:
        room = os.statvfs(root)
    except OSError:  # the folder itself is gone; the reason says so
        return reason
    inodes = ", no inodes left" if room.f_files and not room.f_favail else ""
    return f"{reason} ({_size(room.f_bavail * room.f_frsize)} free of {_size(room.f_blocks * room.f_frsize)}{inodes})"


def write(root: str, key: str, data: bytes | Path, *, create: bool, atomic: bool) -> list[str]:
    """Durable when it returns. The folders whose mtime has moved; FileExistsError when `create` meets an object."""
    final = _locate(root, key)
    if create:
        _is_free(final)  # before a large body is written for nothing; the link below is what decides
    for left in reversed(range(_VANISHED)):
        touched = _make_folders(root, os.path.dirname(final))
        try:
            temporary = _spill(os.path.dirname(final), data)
            break
        except FileNotFoundError:  # another process has deleted the folder's last object, and with it the folder
            if not left:
                raise
    try:
        if create:
            _create(temporary, final, atomic=atomic)
        else:
            os.replace(temporary, final)
    finally:
        _remove(temporary)
    _sync(os.path.dirname(final))
    return touched


def read(root: str, key: str, unless_tag: str | None) -> Object | None:
    """None when its tag is still that one. FileNotFoundError when there is no object."""
    for attempt in range(3):
        try:
            with _open(root, key) as file:
                meta = _meta(key, os.fstat(file.fileno()))
                if meta.tag == unless_tag:
                    return None
                return Object(meta=meta, data=file.readall())
        except OSError as error:
            if error.errno != errno.ESTALE or attempt == 2:  # NFS: replaced by another machine while it was read
                raise
    raise AssertionError


def copy(root: str, key: str, path: Path, size: int | None) -> None:
    """To a local file that appears whole. BucketError when it has another size, FileNotFoundError when there is no object."""
    with _open(root, key) as file:
        found = os.fstat(file.fileno()).st_size
        if size is not None and size != found:
            raise BucketError(f"object {key!r} has {found} bytes, not {size}", keys=(key,))
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _spill(str(path.parent), file, durable=False)
    try:
        if (copied := os.stat(temporary).st_size) != found:
            raise BucketError(f"object {key!r}: {copied} of its {found} bytes could be read", keys=(key,))
        os.replace(temporary, path)
    finally:
        _remove(temporary)


def stat(root: str, keys: Iterable[str]) -> list[ObjectMeta]:
    """Of those that are there."""
    return [meta for key in keys if (meta := _stat(root, key)) is not None]


def _stat(root: str, key: str) -> ObjectMeta | None:
    try:
        found = os.lstat(_locate(root, key))
    except OSError as error:
        if error.errno in _NO_OBJECT:
            return None
        raise
    return _meta(key, found) if st.S_ISREG(found.st_mode) else None


def scan(root: str, folder: str, after: str | None) -> list[ObjectMeta | str]:
    """One folder's objects and folders, in the order of the keys in them; what no key can be is left out."""
    try:
        with os.scandir(_locate(root, f"{folder}/_")[:-2] if folder else root) as entries:
            names = sorted(f"{e.name}/" if e.is_dir(follow_symlinks=False) else e.name for e in entries)
    except OSError as error:
        if error.errno in _NO_OBJECT:
            return []
        raise
    found: list[ObjectMeta | str] = []
    for name in names:  # "a/" sorts as the keys below it do: after "a-b", before "a0"
        key = f"{folder}/{name}" if folder else name
        if not is_key(name.removesuffix("/")):
            continue
        if key.endswith("/"):
            if after is None or key > after or after.startswith(key):
                found.append(key[:-1])
        elif (after is None or key > after) and (meta := _stat(root, key)) is not None:
            found.append(meta)
    return found


def remove(root: str, key: str) -> str | None:
    """The folder that it stood in; None when there was no object."""
    try:
        path = _locate(root, key)
        if not st.S_ISREG(os.lstat(path).st_mode):
            return None
        os.unlink(path)
    except OSError as error:
        if error.errno in _NO_OBJECT:
            return None
        raise
    folder = os.path.dirname(path)
    if folder != root:
        with contextlib.suppress(OSError):  # others stand in it; else people would take it for something
            os.rmdir(folder)
    return folder


def _locate(root: str, key: str) -> str:
    """Its path. OSError ELOOP when a folder on the way is a symbolic link: it may lead out of the bucket."""
    *folders, name = check_key(key).split("/")
    path = root
    for folder in folders:
        path = f"{path}/{folder}"
        if os.path.islink(path):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    return f"{path}/{name}"


def _open(root: str, key: str) -> io.FileIO:
    """FileNotFoundError for whatever stands under its name and is no file."""
    try:
        # not blocking: a pipe under that name would wait for its writer
        handle = os.open(_locate(root, key), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NO_OBJECT:
            raise FileNotFoundError(errno.ENOENT, "no object", key) from error
        raise
    if not st.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise FileNotFoundError(errno.ENOENT, "no object", key)
    return io.FileIO(handle, "rb")


def _meta(key: str, found: os.stat_result) -> ObjectMeta:
    # mtime is set by `_spill`, to the nanosecond, so that a reused inode is not taken for its predecessor; ctime is the store's
    return ObjectMeta(
        key=key, size=found.st_size, tag=f"{found.st_mtime_ns}-{found.st_size}-{found.st_ino}", modified=found.st_ctime
    )


def _spill(folder: str, data: bytes | Path | io.FileIO, *, durable: bool = True) -> str:
    """A temporary file in `folder` with that content, on the disk when it returns; none when it fails."""
    temporary = f"{folder}/{temporary_name()}"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with open(handle, "wb") as file:
            if isinstance(data, Path):
                with data.open("rb", buffering=0) as source:
                    shutil.copyfileobj(source, file, _CHUNK)
            elif isinstance(data, io.FileIO):
                shutil.copyfileobj(data, file, _CHUNK)
            else:
                file.write(data)
            file.flush()
            now = time.time_ns()
            os.utime(handle, ns=(now, now))
            if durable:
                os.fsync(handle)
    except BaseException:
        _remove(temporary)
        raise
    return temporary


def _is_free(final: str) -> None:
    try:
        mode = os.lstat(final).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    number = errno.EISDIR if st.S_ISDIR(mode) else errno.ELOOP if st.S_ISLNK(mode) else errno.EEXIST
    raise OSError(number, os.strerror(number), final)


def _create(temporary: str, final: str, *, atomic: bool) -> None:
    if not atomic:
        _is_free(final)
        os.replace(temporary, final)
        return
    try:
        os.link(temporary, final)
    except FileExistsError:
        if os.stat(temporary).st_nlink != 2:  # NFS: two names mean that the link was made, and its answer lost
            raise
    except OSError as error:
        if error.errno in _NO_LINKS:
            message = "the file system has no hard links, without which nothing is written once only"
            raise OSError(errno.ENOTSUP, message, final) from error
        raise


def _make_folders(root: str, folder: str) -> list[str]:
    """Makes what is missing between `root` and `folder`, durably. `folder`, and what had a name put into it."""
    missing = []
    while folder != root and not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    touched = [folder]
    for path in reversed(missing):
        try:
            os.mkdir(path)
        except FileExistsError:
            if not os.path.isdir(path):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
        _sync(os.path.dirname(path))
        touched.append(path)
    return touched


def _sync(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that has nothing to sync there
            raise
    finally:
        os.close(handle)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
