"""Who runs what: an async test marked `anyio` is run by anyio's pytest plugin, on asyncio alone (the fixture below).

pytest-asyncio is in strict mode (pyproject.toml): it runs only tests marked `asyncio`, and takes no other.
"""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
