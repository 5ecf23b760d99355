"""The models and runs that tests here share."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.fleet import Fleet, fleet
from tests.small import make_small_run


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
