"""Who runs what: an async test marked `anyio` is run by anyio's pytest plugin, on asyncio alone (the fixture below).

pytest-asyncio is in strict mode (pyproject.toml): it runs only tests marked `asyncio`, and takes no other.
"""

from __future__ import annotations

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
