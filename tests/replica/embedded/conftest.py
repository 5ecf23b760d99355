"""One embedded replica as a process, started once: its tests leave it without adapters and unpaused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models import make_tiny_base


@pytest.fixture(scope="session")
def two_ends(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base whose completions end at token 2 or 0."""
    return make_tiny_base(tmp_path_factory.mktemp("two-ends") / "base", eos_ids=(2, 0))


@pytest.fixture(scope="session")
def replica_url(two_ends: Path) -> Iterator[str]:
    arguments = ["--port", "0", "--dtype", "float32", "--max-model-len", "8000", "--max-loras", "2", "--max-lora-rank", "8"]
    command = [sys.executable, "-m", "grpod.replica.embedded", "--model", str(two_ends), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield line.split()[-1]
        process.terminate()
        assert process.wait(20) == 0
