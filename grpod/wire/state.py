"""state/**: heartbeats. Each has one owner, who overwrites it; readers keep the greatest (epoch, counter) seen, so that a
late retry cannot move them back (`newer`)."""

from __future__ import annotations

from typing import TypeVar

from grpod.wire.doc import Document


class LearnerState(Document):
    epoch: int
    counter: int
    step: int
    version: int | None  # the newest whose manifest is written; None before the first
    pos: int | None
    credits: dict[str, int] = {}  # generator -> how many groups it may have begun since its start
    low: dict[str, int] = {}  # generator -> all its objects below this number are read to the end
    retired: list[str] = []
    waiting_for: int = 0  # groups that the next step lacks
    steps: int  # at which the run ends
    updated_at: float


class GeneratorState(Document):
    generator: str
    counter: int
    begun: int  # groups begun since its start: ids <generator>/0 … <generator>/<begun-1>
    open: list[str]  # ids begun and not shipped
    next_seq: int  # of its next rollout object
    resident: list[str] = []  # "<version>-<epoch>" loaded in its replicas
    refused: list[str] = []  # "<version>-<epoch>" that attestation turned down
    url: str | None = None
    device: str = ""
    ended: str | None = None  # why it ended, in its last state
    hopeless: bool = False  # for a reason that holds for every generator of the run: its rewards never work
    started_at: float
    updated_at: float
    period_s: float  # it promises to be written again within this


class ProxyState(Document):
    counter: int
    urls: list[str]
    replicas: dict[str, str] = {}  # url -> state in a word
    updated_at: float


S = TypeVar("S", LearnerState, GeneratorState, ProxyState)


def order(state: LearnerState | GeneratorState | ProxyState) -> tuple[int, int]:
    return (getattr(state, "epoch", 0), state.counter)


def newer(known: S | None, found: S) -> S:
    """The one to keep."""
    return found if known is None or order(found) > order(known) else known
