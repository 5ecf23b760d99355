"""What the clients asked for, and every replica that the proxy owns is to be brought to: live adapters, paused or not.

    load ─▶ pending ──quorum has it──▶ active ──unload, or other content under the name──▶ gone once no request uses it
               └───────otherwise─────▶ gone (rolled back)

Soft state: a proxy that restarts begins with nothing and takes the replicas as it finds them.
The law: under one name inside a replica there is never but one content, since engines key their prefix cache by that name. So
a client that reuses a name for other content (a resumed TRL run does) gets a fresh name upstream, and does not notice.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread

Mode = Literal["abort", "wait", "keep"]


@dataclass(frozen=True, kw_only=True)
class Live:
    """One content under one of the clients' names. Equal when name and content are, wherever the files lie."""

    name: str
    identity: str
    """sha256 of its files; a nonce when the proxy cannot read them: then no two loads are known to be the same"""
    path: str = field(compare=False)
    sha256: str | None = field(compare=False)

    def alias(self) -> str:
        """Its name inside a replica where the plain one is used up."""
        return f"{self.name}~{self.identity[:12]}"


@dataclass(kw_only=True)
class Wanted:
    """Owner: the fleet. Changed by `broadcast`, in_use by `forward`."""

    active: dict[str, Live] = field(default_factory=dict)
    pending: set[Live] = field(default_factory=set)
    in_use: Counter[Live] = field(default_factory=Counter)  # requests running under it
    dismissed: set[str] = field(default_factory=set)  # unloaded names of adapters that the proxy did not load itself
    paused: Mode | None = None
    pause_serial: int = 0  # +1 with each pause and resume
    locks: WeakValueDictionary[str, anyio.Lock] = field(default_factory=WeakValueDictionary)

    def find(self, name: str) -> Live | None:
        """What a client means by the name. An unloaded one is served for as long as requests run under it."""
        return self.active.get(name) or next((live for live in self.in_use if live.name == name), None)

    def keeps(self, live: Live) -> bool:
        """Is a replica to go on holding it?"""
        return live in self.pending or self.active.get(live.name) == live or live in self.in_use

    def to_load(self) -> list[Live]:
        """Newest first: what a client waits for comes before what a late replica catches up on."""
        return [*self.pending, *(live for live in reversed(self.active.values()) if live not in self.pending)]

    def lock(self, name: str) -> anyio.Lock:
        """One load or unload of a name at a time."""
        return self.locks.setdefault(name, anyio.Lock())

    def begin(self, live: Live) -> None:
        self.in_use[live] += 1

    def end(self, live: Live) -> bool:
        """True: that was the last request under something that is wanted no more."""
        self.in_use[live] -= 1
        if not self.in_use[live]:
            del self.in_use[live]
        return not self.keeps(live)


async def identify(name: str, path: str) -> Live:
    """Reads the adapter's files, where the proxy can."""
    sha256 = await content_of(path)
    return Live(name=name, path=path, sha256=sha256, identity=sha256 or secrets.token_hex(16))


async def content_of(path: str) -> str | None:
    return await anyio.to_thread.run_sync(_content_of, Path(path))


def _content_of(folder: Path) -> str | None:
    """sha256 over the names and bytes of the adapter's files; None: not to be read here (it may be on the replicas' hosts)."""
    whole = hashlib.sha256()
    try:
        if not (folder / "adapter_config.json").is_file():
            return None
        for file in sorted(folder.iterdir()):
            if file.is_file():
                with file.open("rb") as stream:
                    whole.update(f"{file.name}\0{hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return None
    return whole.hexdigest()
