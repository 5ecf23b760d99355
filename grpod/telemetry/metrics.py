"""Every metric of a run, once: its name, unit, kind and meaning. The README's table is made from here.

Names are TRL's where the meaning is the same, so that dashboards keep working. `<…>` stands for any word: one metric for each
reward function or drop reason.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

_PLACE = re.compile(r"<(\w+)>")


@dataclass(frozen=True, kw_only=True)
class Metric:
    name: str
    unit: str  # "" is a plain number
    kind: Literal["gauge", "counter"]  # a counter only rises, over resumes too
    help: str

    @property
    def label(self) -> str | None:
        """Of a family: what its `<…>` stands for."""
        found = _PLACE.search(self.name)
        return found[1] if found else None

    @property
    def pattern(self) -> re.Pattern[str]:
        before, _, after = _PLACE.sub("<", self.name).partition("<")
        return re.compile(re.escape(before) + (f"(.+){re.escape(after)}" if self.label else ""))


def _gauge(name: str, unit: str, meaning: str) -> Metric:
    return Metric(name=name, unit=unit, kind="gauge", help=meaning)


def _counter(name: str, unit: str, meaning: str) -> Metric:
    return Metric(name=name, unit=unit, kind="counter", help=meaning)


METRICS: Final = (
    # what the policy is worth: over all groups that reached the learner, not over the trained ones alone
    _gauge("reward", "", "mean reward of all rollouts that reached the learner since the last step"),
    _gauge("reward_std", "", "their standard deviation"),
    _gauge("rewards/<name>", "", "mean of one reward function, before its weight, where it applied"),
    _gauge("completions/mean_length", "tokens", "mean completion of all rollouts that reached the learner since the last step"),
    _gauge("completions/min_length", "tokens", "the shortest of them"),
    _gauge("completions/max_length", "tokens", "the longest of them"),
    _gauge("completions/clipped_ratio", "share", "of them, ended by length (truncated)"),
    # the step
    _gauge("loss", "", "of the step, after all its denominators"),
    _gauge("grad_norm", "", "of the adapter's gradient, before it is clipped"),
    _gauge("learning_rate", "", "of the step"),
    _gauge("entropy", "nats", "mean entropy of the learner's distribution over trained tokens"),
    _gauge("kl", "nats", "mean KL of the policy to the base model over trained tokens; with loss.kl_beta only"),
    _gauge("ratio", "", "mean importance ratio, learner to generator, over trained tokens: 1 is on-policy"),
    _gauge("ratio_outside", "share", "trained tokens with an importance ratio outside [0.9, 1.1]"),
    _gauge("ratio_capped", "share", "trained tokens whose correction was capped, or that it masked"),
    _gauge(
        "ratio_mismatch/mean",
        "",
        "learner to generator at the weights of the version, so off 1 by the engine alone; one group at a time",
    ),
    _gauge("ratio_mismatch/outside", "share", "its tokens outside [0.9, 1.1]"),
    _gauge(
        "ratio_lag/mean",
        "",
        "learner now to learner at the weights of the version: what training has moved meanwhile; the same group",
    ),
    _gauge("ratio_lag/outside", "share", "its tokens outside [0.9, 1.1]"),
    _gauge("clip_ratio/low_mean", "share", "trained tokens clipped below, at 1 - loss.clip_low"),
    _gauge("clip_ratio/high_mean", "share", "trained tokens clipped above, at 1 + loss.clip_high"),
    _gauge("clip_ratio/region_mean", "share", "trained tokens clipped at either side"),
    _gauge("batch/groups_per_step", "groups", "trained in the step"),
    _gauge("batch/samples_per_step", "rollouts", "trained in the step"),
    _gauge("batch/trained_tokens_per_step", "tokens", "completion tokens under the loss mask"),
    _gauge("batch/microbatches_per_step", "", "forward passes of the step"),
    _gauge("batch/samples_per_row", "rollouts", "packed into one row, on average"),
    _gauge("batch/row_fill_frac", "share", "tokens of the packed rows that are no padding"),
    # how old what is trained on is
    _gauge("version", "", "policy version that was published last"),
    _gauge("lag/mean", "publishes", "mean lag of the step's groups"),
    _gauge("lag/max", "publishes", "greatest lag of the step's groups: at most run.max_lag"),
    _gauge("sample/rollout_queue_size", "groups", "admitted and not yet trained"),
    # how groups end
    _counter("groups/trained_total", "groups", "ended as trained"),
    _counter("groups/dropped_total/<reason>", "groups", "ended as dropped, by reason"),
    _counter("groups/duplicates_total", "groups", "met again after they had ended: not trained twice"),
    _counter("quarantine_total", "objects", "copied to quarantine/ because they could not be read"),
    # where the learner's time goes
    _gauge("perf/step_s", "s", "one optimizer step, from its groups to the next wait"),
    _gauge("perf/fwd_bwd_s", "s", "forward and backward passes of the step"),
    _gauge("perf/fwd_s", "s", "forward passes alone"),
    _gauge("perf/optimizer_s", "s", "the optimizer's update"),
    _gauge("perf/rollout_wait_s", "s", "waiting for enough groups before the step"),
    _gauge("publish/seconds", "s", "from a version's snapshot to its manifest in the bucket"),
    _gauge("publish/blocked_s", "s", "training stood still for a snapshot; the upload goes on beside it"),
    # generators
    _gauge("rollout/inflight", "groups", "asked of the replica and not yet answered"),
    _gauge("rollout/duration_s", "s", "from a group's request to its last completion, on average"),
    _gauge("rollout/score_s", "s", "scoring one group, on average"),
    _gauge("rollout/backpressure_s", "s", "without credit, since the last row"),
    _gauge("rollout/generated_tok_s", "tokens/s", "completion tokens of the generator"),
    _gauge("rollout/inflight_limit", "groups", "that may be in flight, over all replicas"),
    _gauge("replica/running", "rollouts", "being decoded, over all replicas, at the last look"),
    _gauge("replica/waiting", "rollouts", "without room in the engine yet, over all replicas"),
    _gauge("replica/kv_usage", "share", "of the KV cache, at the fullest replica"),
    _counter("replica/preemptions_total", "rollouts", "thrown out of a full KV cache, since the replicas started"),
    _gauge("versions/fetch_s", "s", "a version from the bucket to this disk, on average"),
    _gauge("versions/load_s", "s", "from there into the replica"),
    _gauge("versions/attest_s", "s", "its proof by the probe"),
    _counter("versions/unproven_total", "versions", "served on the canary's word: the probe was moved too little to tell"),
    _counter(
        "prompts/skipped_total/<reason>", "rows", "of the data set that cannot be asked, once in every data epoch, by reason"
    ),
)

_PATTERNS: Final = tuple((metric.pattern, metric) for metric in METRICS)
_EXACT: Final = {metric.name: metric for metric in METRICS if metric.label is None}


def describe(name: str) -> Metric:
    """Raises `KeyError` for a name that the table does not have."""
    return _match(name)[0]


def _match(name: str) -> tuple[Metric, str]:
    """And the word that stands for its `<…>`."""
    if name in _EXACT:
        return _EXACT[name], ""
    for pattern, metric in _PATTERNS:
        if metric.label and (found := pattern.fullmatch(name)):
            return metric, found[1]
    raise KeyError(f"metric {name!r} is not in the table of telemetry/metrics.py")
