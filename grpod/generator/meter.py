"""What a generator does, in numbers, as rows of `metrics/<generator>/`: means since the last row, and counts that only rise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from grpod.replica.load import Load
from grpod.wire.rollout import Group


class Meter:
    def __init__(self) -> None:
        self._skipped: Counter[str] = Counter()
        self._groups: list[tuple[float, float]] = []  # seconds: generated in, scored in
        self._brought: list[Mapping[str, float]] = []
        self._tokens = 0
        self._waited_s = 0.0
        self._since: float | None = None
        self._news = False

    def skipped(self, reason: str, row: int) -> None:
        self._skipped[reason] += 1
        self._news = True

    def done(self, group: Group) -> None:
        self._groups.append((group.timing["generate_s"], group.timing["score_s"]))
        self._tokens += sum(len(rollout.completion_ids) for rollout in group.rollouts)

    def brought(self, took: Mapping[str, float]) -> None:
        """A version: fetch_s, load_s, attest_s."""
        self._brought.append(took)

    def waited(self, seconds: float) -> None:
        """Without credit."""
        self._waited_s += seconds

    def row(
        self, now: float, *, in_flight: int, unproven: int = 0, limit: int = 0, loads: Sequence[Load] = ()
    ) -> dict[str, float]:
        """`unproven`: versions until now; `limit`: groups that may be in flight; `loads` of the replicas. Begins a new
        row. Empty when nothing has happened: an idle fleet writes nothing."""
        if self._since is not None and not (self._groups or in_flight or self._news):
            return {}
        values: dict[str, float] = {"rollout/inflight": in_flight, "rollout/backpressure_s": self._waited_s}
        values |= {"versions/unproven_total": unproven, "rollout/inflight_limit": limit}
        if loads:
            values["replica/running"] = sum(load.running for load in loads)
            values["replica/waiting"] = sum(load.waiting for load in loads)
            values["replica/kv_usage"] = max(load.kv_usage for load in loads)
            values["replica/preemptions_total"] = sum(load.preemptions for load in loads)
        if self._groups:
            generated, scored = zip(*self._groups, strict=True)
            values |= {"rollout/duration_s": fmean(generated), "rollout/score_s": fmean(scored)}
        if self._brought:
            values["versions/fetch_s"] = fmean(took["fetch_s"] for took in self._brought)
            values["versions/load_s"] = fmean(took["load_s"] for took in self._brought)
            values["versions/attest_s"] = fmean(took["attest_s"] for took in self._brought)
        if self._since is not None and now > self._since:
            values["rollout/generated_tok_s"] = self._tokens / (now - self._since)
        values |= {f"prompts/skipped_total/{reason}": count for reason, count in self._skipped.items()}
        self._groups.clear()
        self._brought.clear()
        self._news = False
        self._tokens, self._waited_s, self._since = 0, 0.0, now
        return values
