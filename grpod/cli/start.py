"""`grpod --role …`: roles and config are checked before anything is opened, created or written; then the daemon has it."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

if TYPE_CHECKING:
    from grpod.configure import Loaded

KINDS = ("learner", "generator", "proxy")


def start(roles: Sequence[str], path: str | None, sets: Sequence[str], takeover: Literal["wait", "exit"]) -> int:
    names = parse_roles(roles)
    before = {signum: signal.signal(signum, _nothing_begun) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        loaded = _config(names, None if path is None else Path(path), sets)
        from grpod import daemon

        return daemon.main(loaded.config, loaded.folder, names, takeover=takeover)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _config(names: Sequence[str], path: Path | None, sets: Sequence[str]) -> Loaded:
    from grpod import configure

    base = None
    if path is None and os.environ.get(configure.RUN_VARIABLE) and any(name != "proxy" for name in names):
        base = _base(names, sets)
    loaded = configure.load(path, env=os.environ, sets=sets, base=base)
    configure.check_roles(loaded.config, names, path=path)
    return loaded


def parse_roles(roles: Sequence[str]) -> tuple[str, ...]:
    """`all` stands for learner, generator and proxy. Raises `click.UsageError`."""
    names: list[str] = []
    for role in roles:
        kind, dash, index = role.partition("-")
        if role == "all":
            names += KINDS
        elif kind not in KINDS:
            raise click.UsageError(f"no role {role!r}; there are {', '.join(KINDS)}, all")
        elif dash and kind != "generator":
            raise click.UsageError(f"{role}: a process has one {kind} at most, without an index")
        elif dash and not (index.isascii() and index.isdigit()):
            raise click.UsageError(f"{role}: wanted generator-INDEX, as in generator-0")
        else:
            names.append(f"{kind}-{int(index)}" if dash else kind)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise click.UsageError(f"--role {twice[0]} is given twice")
    return tuple(names)


def _nothing_begun(signum: int, frame: object) -> None:
    os.write(2, f"grpod: {signal.Signals(signum).name}: stopped before anything was begun\n".encode())
    os._exit(0)


def _base(names: Sequence[str], sets: Sequence[str]) -> Mapping[str, Any] | None:
    """The agreed config of the run at GRPOD_RUN. A learner may be the one to begin it, so it does not wait for one."""
    import anyio

    from grpod import configure
    from grpod.cli.look import run_json

    early = configure.load(None, env=os.environ, sets=sets).config
    wait_s = 0 if "learner" in names else early.run.startup_timeout_s
    run = anyio.run(run_json, early.run.bucket, wait_s)
    return None if run is None else run.config
