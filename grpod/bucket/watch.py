"""What a file bucket looks at once a tick to see that another process has put something: the mtimes of a few folders.

A folder's mtime moves when a name appears in it or is replaced. It is coarse, up to some milliseconds: two changes within
one tick of the kernel's clock leave one mtime. So a young mtime counts as another value than the same one grown old, and a
look that fell between two such changes is followed by a second.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Final
from weakref import WeakValueDictionary

from grpod.bucket.pulse import TICK_S, Pulse

# '*' is every folder there. Everything that a role waits for ends in one of these: adapters in the learner's state.
WATCHED: Final = ("", "state", "state/generators", "rollouts", "rollouts/*", "adapters", "control", "final", "leases/learner")
_YOUNG_NS: Final = 20_000_000

_Value = tuple[int, bool]  # mtime in ns, grown old?


class Watch:
    """One for each path and process: what is put through it rings at once, what others put rings at the next look."""

    def __init__(self, root: str) -> None:
        self.pulse = Pulse()
        self._root = root
        self._lock = threading.Lock()
        self._own: dict[str, int] = {}  # mtime of a folder after the last put of this process
        self._generators: tuple[_Value, list[str]] | None = None  # rollouts/'s value, and the folders that it had then
        self._looked_at = time.monotonic()
        self._seen = self._values()

    def put_into(self, folder: str) -> None:
        """This process has just changed `folder` (absolute): that is no news."""
        if (value := _value(folder)) is not None:
            with self._lock:
                self._own[folder] = value[0]

    def look(self) -> bool:
        """Has another process changed something since the last look? At most one look a tick, whoever asks."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked_at < TICK_S / 2:
                return False
            before, self._seen, self._looked_at = self._seen, self._values(), now
            changed = {folder for folder, value in self._seen.items() if before.get(folder) != value}
            news = any(self._own.get(folder) != self._seen[folder][0] for folder in changed)
            return news or not before.keys() <= self._seen.keys()

    def _values(self) -> dict[str, _Value]:
        values: dict[str, _Value] = {}
        for name in WATCHED:
            folder = os.path.join(self._root, name).rstrip("/")
            for path in self._folders(folder[:-2], values) if name.endswith("/*") else (folder,):
                if (value := _value(path)) is not None:
                    values[path] = value
        return values

    def _folders(self, parent: str, values: dict[str, _Value]) -> list[str]:
        if parent not in values:
            return []
        if self._generators is None or self._generators[0] != values[parent]:
            try:
                with os.scandir(parent) as entries:
                    self._generators = values[parent], [e.path for e in entries if e.is_dir(follow_symlinks=False)]
            except FileNotFoundError:  # gone since its mtime was read
                return []
        return self._generators[1]


def _value(folder: str) -> _Value | None:
    try:
        mtime = os.stat(folder).st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return None
    return mtime, time.time_ns() - mtime > _YOUNG_NS


_watches: WeakValueDictionary[str, Watch] = WeakValueDictionary()
_watches_lock = threading.Lock()


def watch(root: str) -> Watch:
    """The one of this process for that path."""
    with _watches_lock:
        path = os.path.realpath(root)
        found = _watches.get(path)
        if found is None:
            found = _watches[path] = Watch(path)
        return found
