"""The table of metrics: complete sentences for people, whole names for dashboards."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from grpod.telemetry.metrics import METRICS, describe, prometheus_text


def test_every_metric_is_there_once_and_says_what_it_is():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.help, metric.name
        assert "\n" not in metric.help, metric.name
        assert (metric.kind == "counter") == ("_total" in metric.name), metric.name
        assert (metric.unit == "s") == metric.name.removesuffix("tok_s").endswith(("_s", "/seconds")), metric.name


def test_a_name_is_found_alone_or_in_its_family():
    assert describe("reward").name == "reward"
    assert describe("rewards/exact_match").name == "rewards/<name>"
    assert describe("rewards/my/file.py:f").label == "name"
    assert describe("groups/dropped_total/zero_spread").name == "groups/dropped_total/<reason>"
    for name in ("rewards", "rewards/", "reward/x", "lag", "step", ""):
        with pytest.raises(KeyError, match="not in the table"):
            describe(name)


def test_every_metric_is_exported_with_its_labels():
    values = {metric.name.replace("<name>", "math").replace("<reason>", "stale"): i + 0.5 for i, metric in enumerate(METRICS)}
    text = prometheus_text(values | {"rewards/fmt": -1.0}, labels={"who": "learner-e1"}).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert len(samples) == len(METRICS) + 1
    assert all(sample.labels["who"] == "learner-e1" for sample in samples)
    found = {(s.name, s.labels.get("name") or s.labels.get("reason")): s.value for s in samples}
    assert found["grpod_reward", None] == values["reward"]
    assert (found["grpod_rewards", "math"], found["grpod_rewards", "fmt"]) == (values["rewards/math"], -1.0)
    assert found["grpod_groups_dropped_total", "stale"] == values["groups/dropped_total/stale"]
    assert found["grpod_groups_trained_total", None] == values["groups/trained_total"]
    assert "# TYPE grpod_lag_mean gauge" in text
    assert "# HELP grpod_perf_step_s one optimizer step, from its groups to the next wait (s)" in text
