"""What tests put into a folder is whole at once: nobody needs to wait until it stands still (`test_feed.py` has that)."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpod.learner.session._SETTLE_S", 0.0)
