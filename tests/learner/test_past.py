from __future__ import annotations

import pytest

from grpod.learner import past
from grpod.learner.past import Past


def test_the_newest_are_kept() -> None:
    kept = Past(2)
    for word in ("a", "b", "a", "c"):
        kept.note(word, word.encode())
    assert [kept.find(word) for word in "abc"] == [b"a", None, b"c"]


def test_large_ones_are_forgotten_but_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past, "MAX_BYTES", 3)
    kept = Past(9)
    kept.note("small", b"1")
    kept.note("large", b"12345")
    assert (kept.find("small"), kept.find("large")) == (None, b"12345")
