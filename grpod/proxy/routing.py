"""Which replica answers a request: a pure function of what is known about the replicas.

    candidates ─▶ hold the model? ─▶ up? ─▶ not tried yet? ─▶ not resting? ─▶ least outstanding tokens ─▶ lowest URL
                      │               │            │
                unknown_model    none_holds_it  exhausted              (nobody: the caller answers, waits, or gives up)
                or no_replica

The law: a request goes to a replica that is known to hold the very version that it names, or to none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Reason = Literal["least_loaded", "only_one", "unknown_model", "no_replica", "none_holds_it", "exhausted"]


@dataclass(frozen=True, kw_only=True)
class View:
    """One replica as routing sees it."""

    url: str
    up: bool
    resting: bool = False
    """its breaker is open: taken only when nobody else can"""
    models: frozenset[str]
    """names, in the clients' words, that it answers to, or did when it was last up; empty: it has not told yet"""
    outstanding: int = 0
    """tokens of prompts and completions asked for and not yet answered"""


@dataclass(frozen=True, kw_only=True)
class Ask:
    model: str
    known: bool = False
    """a live adapter, though perhaps no replica holds it at the moment"""
    avoid: frozenset[str] = frozenset()
    """URLs that failed this request already"""


@dataclass(frozen=True, kw_only=True)
class Choice:
    url: str | None
    reason: Reason


def choose(candidates: Sequence[View], ask: Ask) -> Choice:
    """Does not depend on the order of the candidates, so that equal proxies choose equally."""
    holders = [view for view in candidates if ask.model in view.models]
    if not holders and not ask.known:
        return Choice(url=None, reason="unknown_model" if any(view.models for view in candidates) else "no_replica")
    up = [view for view in holders if view.up]
    if not up:
        return Choice(url=None, reason="none_holds_it")
    fit = [view for view in up if view.url not in ask.avoid]
    if not fit:
        return Choice(url=None, reason="exhausted")
    best = min(fit, key=lambda view: (view.resting, view.outstanding, view.url))
    return Choice(url=best.url, reason="only_one" if len(fit) == 1 else "least_loaded")
