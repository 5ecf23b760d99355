"""Layers over each other, values made to fit, and what of a config is agreed. Configs as people spoil them: tests/cli."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpod import configure
from grpod.config_keys import all_keys, leaves, nearest
from grpod.config_yaml import scalar
from grpod.errors import ConfigError

SETS = ["run.bucket=memory://x", "model.base=b", "data.source=d.jsonl", "rewards=math"]


def load(*sets: str, **kwargs: Any) -> Any:
    return configure.load(None, env=kwargs.pop("env", {}), sets=[*SETS, *sets], **kwargs).config


def test_each_layer_overrides_those_before(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("learner: {steps: 2, groups_per_step: 2, publish_every: 2}\n")
    base = {"learner": {"steps": 1, "groups_per_step": 1, "publish_every": 1, "token_budget": 16}}
    env = {"GRPOD_LEARNER__GROUPS_PER_STEP": "3", "GRPOD_LEARNER__PUBLISH_EVERY": "3"}
    loaded = configure.load(path, env=env, sets=["learner.publish_every=4"], base=base)
    learner = loaded.config.learner
    assert (learner.token_budget, learner.steps, learner.groups_per_step, learner.publish_every) == (16, 2, 3, 4)
    assert loaded.folder == tmp_path


def test_the_longer_variable_wins_over_grpod_run() -> None:
    env = {"GRPOD_RUN": "memory://a", "GRPOD_RUN__BUCKET": "memory://b"}
    assert configure.load(None, env=env).config.run.bucket == "memory://b"
    assert configure.load(None, env={"GRPOD_RUN": "memory://a"}).config.run.bucket == "memory://a"


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("generator.devices=0,1", "generator.devices", ["0", "1"]),
        ("generator.devices=0", "generator.devices", ["0"]),
        ("generator.devices=[0, 'cuda:1']", "generator.devices", ["0", "cuda:1"]),
        ("generator.devices=", "generator.devices", []),
        ("lora.target_modules=q_proj, v_proj", "lora.target_modules", ["q_proj", "v_proj"]),
        ("lora.target_modules=all-linear", "lora.target_modules", "all-linear"),
        ("model.revision=0123456", "model.revision", "0123456"),
        ("model.revision=1e10", "model.revision", "1e10"),
        ("model.revision=null", "model.revision", None),
        ("run.name=a: b # c", "run.name", "a: b # c"),
        ("run.name=[draft", "run.name", "[draft"),
        ("run.name='quoted'", "run.name", "quoted"),
        ("run.name=", "run.name", ""),
        ("run.create_bucket=no", "run.create_bucket", False),
        ("run.create_bucket=True", "run.create_bucket", True),
        ("learner.steps=8.0", "learner.steps", 8),
        ("learner.steps=0x10", "learner.steps", 16),
        ("learner.steps=010", "learner.steps", 10),
        ("generator.max_in_flight=auto", "generator.max_in_flight", "auto"),
        ("generator.vllm.env.VLLM_Foo.x=1", "generator.vllm.env", {"VLLM_Foo.x": "1"}),
        ("generator.vllm.env={A: 1, B: yes}", "generator.vllm.env", {"A": "1", "B": "yes"}),
        ("generator.sampling={top_k: 5}", "generator.sampling.top_k", 5),
    ],
)
def test_a_value_is_made_to_fit_its_key(text: str, path: str, value: object) -> None:
    found = load(text)
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_a_variable_below_a_mapping_keeps_its_case() -> None:
    assert load(env={"GRPOD_GENERATOR__VLLM__ENV__VLLM_X": "01"}).generator.vllm.env == {"VLLM_X": "01"}


def test_rewards_may_be_named_alone() -> None:
    assert [r.function for r in load("rewards=math,file.py:f").rewards] == ["math", "file.py:f"]
    assert load("rewards=[{function: math, weight: 2, options: {a: 1e-3}}]").rewards[0].options == {"a": 1e-3}


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_is_read_back_as_it_was_written(value: float) -> None:
    assert scalar(repr(value)) == value


@given(st.integers())
def test_every_int_is_read_back_as_it_was_written(value: int) -> None:
    assert scalar(str(value)) == value


@pytest.mark.parametrize("text", ["yes", "no", "on", "1_000x", "1:30", "2026-01-01", "1e-5x", "0x", "e5", "."])
def test_what_only_looks_like_something_stays_text(text: str) -> None:
    assert scalar(text) == text


def test_every_key_finds_itself_in_every_spelling() -> None:
    for key in all_keys():
        spelt = tuple(part.replace("_", "-") for part in key.path)
        found = nearest(spelt, section=key.section is not None)
        assert found is not None
        assert found.path == key.path


def test_agreed_values_hold_agreed_and_offered_keys_only() -> None:
    values = configure.agreed_values(load("learner.device=cpu", "run.grace_s=5", "proxy.listen=127.0.0.1:0"))
    assert values["generator"].keys() == {"group_size", "sampling"}
    assert "device" not in values["learner"]
    assert "bucket" not in values["run"]
    assert "proxy" not in values
    assert values["rewards"][0]["function"] == "math"
    assert (values["model"]["base"], values["data"]["source"]) == ("b", "d.jsonl")


def test_a_joiner_gets_the_agreed_config_back_and_differs_in_nothing() -> None:
    config = load("learner.steps=7", "generator.sampling.top_k=3", "lora.target_modules=q_proj", "run.from=memory://old")
    values = configure.agreed_values(config)
    joined = configure.load(None, env={"GRPOD_RUN": "memory://x"}, base=values).config
    assert configure.differences(values, joined, ignore=()) == []
    configure.check_roles(joined, ["generator"])
    assert joined.learner.steps == 7


def test_differences_name_key_and_both_values() -> None:
    theirs = configure.agreed_values(load())
    ours = load("generator.group_size=16", "learner.steps=7", "model.base=elsewhere", "learner.device=cpu")
    assert configure.differences(theirs, ours) == ["generator.group_size is 8 in the run and 16 here"]
    assert "learner.steps is 100 in the run and 7 here" in configure.differences(theirs, ours, ignore=())
    assert configure.differences(theirs, ours, ignore=("generator.group_size", "learner")) == []


def test_a_run_begun_without_data_has_agreed_on_none() -> None:
    theirs = configure.agreed_values(configure.load(None, env={}, sets=SETS[:2]).config)
    assert "rewards" not in theirs
    assert configure.differences(theirs, load("data.seed=3")) == []


@pytest.mark.parametrize(
    ("sets", "roles", "missing"),
    [
        ([], ["learner"], ["model.base", "run.bucket"]),
        ([], ["generator"], ["model.base", "data.source", "rewards", "run.bucket"]),
        ([], ["proxy"], ["proxy.replicas", "run.bucket"]),
        (SETS[:2], ["learner"], []),
        (SETS[:2], ["learner", "generator"], ["data.source", "rewards"]),
        (SETS, ["learner", "generator", "proxy"], []),
        (SETS[:1], ["proxy"], []),
        (["proxy.replicas=http://a"], ["proxy"], []),
        ([*SETS, "generator.engine=remote"], ["generator"], ["generator.remote.url"]),
        ([*SETS, "generator.devices=0,1"], ["generator-1"], []),
        ([*SETS, "generator.devices=0,1"], ["generator-2"], ["generator.devices names 2"]),
        (SETS, ["generator-2"], ["generator.devices is empty"]),
    ],
)
def test_each_role_asks_only_for_what_it_needs(sets: list[str], roles: list[str], missing: list[str]) -> None:
    config = configure.load(None, env={}, sets=sets).config
    if not missing:
        configure.check_roles(config, roles)
        return
    with pytest.raises(ConfigError) as error:
        configure.check_roles(config, roles)
    for name in ("model.base", "data.source", "rewards", "run.bucket", "generator.remote.url", *missing):
        assert (name in str(error.value)) == (name in missing)


@pytest.mark.parametrize(
    ("given", "roles", "refused"),
    [
        ("run.from=memory://old", ["learner"], True),
        ("run.from=memory://old", ["generator"], False),  # it stands in the run.json that is joined
        ("telemetry.sinks=wandb", ["proxy"], True),
        ("telemetry.price_per_hour=2.5", ["generator"], True),
        ("run.name=", ["learner", "generator", "proxy"], False),
    ],
)
def test_what_is_not_built_yet_is_refused_not_ignored(given: str, roles: list[str], refused: bool) -> None:
    config = load(given)
    if not refused:
        configure.check_roles(config, roles)
        return
    with pytest.raises(ConfigError, match=f"not in this build yet: {given.partition('=')[0]};"):
        configure.check_roles(config, roles)


@pytest.mark.parametrize("devices", ["[]", "[cuda:0]"])
def test_an_index_without_a_device_is_told(devices: str) -> None:
    config = load(f"generator.devices={devices}")
    configure.check_roles(config, ["generator"])
    if devices != "[]":
        configure.check_roles(config, ["generator-0"])
    with pytest.raises(ConfigError, match=r"generator-1: generator\.devices"):
        configure.check_roles(config, ["generator-1"])


def test_every_key_is_read_by_something() -> None:
    """An attribute of its name stands in the code; a key that nothing reads would be ignored in silence."""
    folder = Path(configure.__file__).parent
    read = {
        node.attr
        for path in folder.rglob("*.py")
        if path.name != "config.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    names = [(key.name, "from_" if key.path[-1] == "from" else key.path[-1]) for key in leaves()]
    assert [name for name, attribute in names if attribute not in read] == []


def test_the_table_has_every_key_once_with_a_meaning() -> None:
    rows = configure.table()
    names = [row[0] for row in rows]
    assert len(set(names)) == len(names)
    assert set(names) >= {key.name for key in leaves()}
    assert all(doc for _, _, _, doc in rows)
    assert {kind for _, _, kind, _ in rows} == {"agreed", "local"}
    assert ("learner.learning_rate", "0.0001", "agreed") in [row[:3] for row in rows]
    assert ("rewards[].weight", "1.0", "agreed") in [row[:3] for row in rows]
