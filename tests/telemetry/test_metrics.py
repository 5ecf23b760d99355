"""The table of metrics: complete sentences for people, whole names for dashboards."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from grpod.telemetry.metrics import METRICS, describe

GRPOD = Path(__file__).resolve().parents[2] / "grpod"


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


def test_every_metric_is_emitted_somewhere() -> None:
    """Its name, or what its family's name begins with, stands in the code beside the table."""
    texts = {
        node.value
        for path in GRPOD.rglob("*.py")
        if path.name != "metrics.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert [metric.name for metric in METRICS if metric.name.partition("<")[0] not in texts] == []
