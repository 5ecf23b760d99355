"""Commands are run in this process, as by `python -m grpod`; GRPOD_* variables of the outside are hidden."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from grpod import __main__


@dataclass(frozen=True, kw_only=True)
class Done:
    code: int
    out: str
    err: str


Grpod = Callable[..., Done]


@pytest.fixture
def grpod(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Grpod:
    for name in [name for name in os.environ if name.startswith("GRPOD_")]:
        monkeypatch.delenv(name)

    def run(*argv: str, **env: str) -> Done:
        with monkeypatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            code = __main__.run(argv)
        out, err = capsys.readouterr()
        return Done(code=code, out=out, err=err)

    return run
