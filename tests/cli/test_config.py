"""`grpod config --check` and `grpod --role` on configs as people write them: what is wrong is named, and nothing is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from grpod import configure
from grpod.wire.run import Run
from tests.cli.conftest import Grpod

GOOD = """\
run: {bucket: "file://./run"}
model: {base: tiny}
data: {source: prompts.jsonl}
rewards: [{function: math}]
"""


class Case(NamedTuple):
    yaml: str
    says: tuple[str, ...]
    over_good: bool = True


BAD = {
    "a remote that is no URL": Case(
        "generator: {engine: remote, remote: {url: nonsense}}\n", ("generator.remote.url 'nonsense'", "http://host:port")
    ),
    "a remote of another protocol": Case("generator: {engine: remote, remote: {url: 'ftp://x'}}\n", ("'ftp://x'",)),
    "one server for two": Case(
        "generator: {engine: remote, devices: ['0', '1'], remote: {url: 'http://x'}}\n", ("generator.devices", "one server")
    ),
    "no device": Case("generator: {devices: [gpu0]}\n", ("generator.devices", "'gpu0'", "cuda:0")),
    "a GPU twice": Case("generator: {engine: vllm, devices: ['cuda:0', '0']}\n", ("cuda:0 2 times",)),
    "several GPUs as one, embedded": Case("generator: {devices: ['0+1']}\n", ("'0+1'", "generator.engine vllm")),
    "an argument of grpod's own": Case(
        "generator: {engine: vllm, vllm: {args: ['--port', '1']}}\n", ("generator.vllm.args", "'--port'")
    ),
    "two words as one": Case(
        "generator: {engine: vllm, vllm: {args: ['--max-num-seqs 64']}}\n", ("generator.vllm.args", "'--max-num-seqs' and '64'")
    ),
    "not a number": Case("learner:\n  learning_rate: 1e-5x\n", ("c.yaml:6", "learner.learning_rate: 1e-5x", "number above 0")),
    "a boolean for an int": Case("generator:\n  group_size: yes\n", ("c.yaml:6", "generator.group_size: yes", "whole number")),
    "true for an int": Case("generator:\n  group_size: true\n", ("generator.group_size", "true", "a whole number")),
    "a fraction": Case("generator:\n  group_size: 8.5\n", ("generator.group_size", "8.5", "of at least 2")),
    "a section twice": Case("learner: {steps: 1}\nlora: {rank: 8}\nlearner:\n", ("c.yaml:7: learner is given twice",)),
    "a key twice": Case("learner:\n  steps: 1\n  steps: 2\n", ("c.yaml:7", "learner.steps is given twice", "line 6")),
    "the wrong level": Case("learning_rate: 1e-5\n", ("no key learning_rate", "learner.learning_rate")),
    "an abbreviation at the wrong level": Case("lr: 1e-5\n", ("no key lr;", "learner.learning_rate")),
    "an abbreviation": Case("learner:\n  lr: 1e-5\n", ("no key learner.lr;", "learner.learning_rate")),
    "a hyphen": Case("generator:\n  group-size: 8\n", ("generator.group-size", "generator.group_size")),
    "a list at the top": Case("- learner\n- generator\n", ("c.yaml", "a list", "sections"), over_good=False),
    "a tab": Case("learner:\n\tsteps: 1\n", ("c.yaml:2", "tab"), over_good=False),
    "an empty file": Case("", ("c.yaml", "model", "data", "rewards"), over_good=False),
    "infinite": Case("learner:\n  learning_rate: .inf\n", ("learner.learning_rate", ".inf", "finite")),
    "not a number at all": Case("learner:\n  learning_rate: .nan\n", ("learner.learning_rate", ".nan")),
    "too large for a float": Case("learner:\n  learning_rate: 1e999\n", ("learner.learning_rate", "1e999")),
    "a section that is none": Case("learner: 5\n", ("learner: 5", "a section with keys steps")),
    "an empty key": Case("learner:\n  steps:\n", ("learner.steps is empty", "a whole number")),
    "a choice that is none": Case("learner: {loss: {kind: ppo}}\n", ("learner.loss.kind", "ppo", "dapo")),
    "auto or a count": Case("generator: {max_in_flight: 0}\n", ("generator.max_in_flight", "0", "at least 1 or auto")),
    "inside a list": Case("rewards: [{function: math, weight: x}]\n", ("rewards[0].weight", "x"), over_good=False),
    "a field of PEFT": Case("lora: {use_dora: true}\n", ("lora.use_dora: vLLM does not serve DoRA", "target_modules")),
    "whole modules": Case("lora: {modules_to_save: [lm_head]}\n", ("lora.modules_to_save: vLLM does not serve",)),
    "trained biases": Case("lora: {bias: all}\n", ("lora.bias: vLLM does not serve",)),
    "an alpha for one module": Case("lora: {alpha_pattern: {q_proj: 64}}\n", ("lora.alpha_pattern: vLLM drops it",)),
    "a rank for one module": Case("lora: {rank_pattern: {q_proj: 2}}\n", ("lora.rank_pattern: vLLM drops it",)),
    "another scale": Case("lora: {use_rslora: true}\n", ("lora.use_rslora: the scale is lora.alpha / lora.rank",)),
    "another beginning": Case("lora: {init_lora_weights: pissa}\n", ("lora.init_lora_weights: B begins at zero",)),
    "targets by another name": Case("lora: {targets: [embed_tokens]}\n", ("lora.targets; did you mean lora.target_modules?",)),
    "two documents": Case("---\nlearner: {steps: 1}\n", ("c.yaml", "not YAML")),
    "two keys that do not fit": Case("model: {max_model_len: 100}\n", ("max_new_tokens", "max_model_len"), over_good=False),
}  # fmt: skip


def _file(tmp_path: Path, case: Case) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text((GOOD if case.over_good else "") + case.yaml)
    return path


@pytest.mark.parametrize("how", [("config", "--check"), ("--role", "all", "--config"), ("--role", "generator", "--config")])
@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_a_bad_config_exits_2_names_it_and_writes_nothing(
    grpod: Grpod, tmp_path: Path, case: Case, how: tuple[str, ...]
) -> None:
    done = grpod(*how, str(_file(tmp_path, case)))
    assert done.code == 2
    for words in case.says:
        assert words in done.err
    assert "Traceback" not in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


GOOD_RATES = {
    "1e-5": 1e-5, "3E-4": 3e-4, "1E-5": 1e-5, "0.00001": 1e-5, "1.e-5": 1e-5, ".00001": 1e-5, "+1e-5": 1e-5, "'1e-5'": 1e-5
}  # fmt: skip


@pytest.mark.parametrize("written", GOOD_RATES)
def test_a_number_is_the_same_number_whichever_way_it_came(tmp_path: Path, written: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(GOOD + f"learner: {{learning_rate: {written}}}\n")
    good = tmp_path / "good.yaml"
    good.write_text(GOOD)
    by_file = configure.load(path, env={}).config
    by_variable = configure.load(good, env={"GRPOD_LEARNER__LEARNING_RATE": written}).config
    by_set = configure.load(good, env={}, sets=[f"learner.learning_rate={written}"]).config
    for config in (by_file, by_variable, by_set):
        run = Run(run_id="r", config=configure.agreed_values(config), base_fingerprint="f", created_at=0.0)
        kept = json.loads(run.encode())["config"]["learner"]["learning_rate"]
        assert (type(kept), kept) == (float, GOOD_RATES[written])


def test_an_empty_section_means_its_defaults(grpod: Grpod, tmp_path: Path) -> None:
    path = _file(tmp_path, Case("learner:\ngenerator:\n", ()))
    assert grpod("config", "--check", str(path)).code == 0
    assert configure.load(path, env={}).config.learner.steps == 100


def test_check_says_what_it_found_and_resolves_a_relative_bucket(grpod: Grpod, tmp_path: Path) -> None:
    done = grpod("config", "--check", str(_file(tmp_path, Case("", ()))), "--set", "learner.steps=3")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("ok: ")
    assert f"file://{tmp_path}/run" in done.out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("GRPOD_LERNER__LR", "GRPOD_LEARNER__LEARNING_RATE"),
        ("GRPOD_LERNER__LEARNING_RATE", "GRPOD_LEARNER__LEARNING_RATE"),
        ("GRPOD_LEARNER__LERNING_RATE", "GRPOD_LEARNER__LEARNING_RATE"),
        ("GRPOD_LEARNER_STEPS", "GRPOD_LEARNER__STEPS"),
        ("GRPOD_LEARNER__LOSS__KINDS", "GRPOD_LEARNER__LOSS__KIND"),
        ("GRPOD_TEMPERATURE", "GRPOD_GENERATOR__SAMPLING__TEMPERATURE"),
        ("GRPOD_XYZ", "GRPOD_SECTION__KEY"),
        ("GRPOD_LORA__USE_DORA", "vLLM does not serve DoRA"),
        ("GRPOD_LORA__RANG", "GRPOD_LORA__RANK"),
    ],
)
@pytest.mark.parametrize("how", [("config", "--check"), ("--role", "learner", "--config")])
def test_a_misspelt_variable_exits_2_with_the_nearest_one(
    grpod: Grpod, tmp_path: Path, name: str, near: str, how: tuple[str, ...]
) -> None:
    done = grpod(*how, str(_file(tmp_path, Case("", ()))), **{name: "1e-5"})
    assert done.code == 2
    assert f"{name}: no such key" in done.err
    assert near in done.err


def test_variables_of_ours_that_are_no_keys_are_left_alone(grpod: Grpod, tmp_path: Path) -> None:
    path = str(_file(tmp_path, Case("", ())))
    done = grpod("config", "--check", path, GRPOD_RUN="file:///elsewhere/run", GRPOD_SPOT_NOTICE="/x", GRPODX="1")
    assert done.code == 0
    assert "file:///elsewhere/run" in done.out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lr=1e-5", "learner.learning_rate"),
        ("learner.lr=1e-5", "learner.learning_rate"),
        ("learner.learning_rate=1e-5x", "1e-5x does not fit"),
        ("learner.steps", "section.key=value"),
        ("learner=5", "a section with keys"),
        ("rewards=[{function: math", "not YAML"),
    ],
)
def test_a_bad_set_exits_2(grpod: Grpod, tmp_path: Path, text: str, says: str) -> None:
    done = grpod("config", "--check", str(_file(tmp_path, Case("", ()))), "--set", text)
    assert done.code == 2
    assert f"--set {text.partition('=')[0]}" in done.err
    assert says in done.err


def test_all_faults_come_at_once(grpod: Grpod, tmp_path: Path) -> None:
    path = _file(tmp_path, Case("lr: 1\ngenerator: {group_size: yes}\n", ()))
    done = grpod("config", "--check", str(path), "--set", "lora.rang=3", GRPOD_LEARNER__STEPS="0")
    assert done.code == 2
    for words in ("c.yaml:5: no key lr", "generator.group_size: yes", "lora.rank", "GRPOD_LEARNER__STEPS: learner.steps: 0"):
        assert words in done.err


@pytest.mark.parametrize(
    ("path", "content", "says"),
    [
        ("missing.yaml", None, "No such file"),
        ("folder.yaml", "folder", "directory"),
        ("latin.yaml", b"run: {name: \xe9}\n", "not UTF-8"),
        ("nul.yaml", b"run: {name: \x00}\n", "not YAML"),
        ("tag.yaml", b"run: !!python/object:os.system {}\n", "run"),
        ("alias.yaml", b"run: &a {name: *a}\n", "alias"),
        ("key.yaml", b"? [a]\n: 1\n", "key must be a word"),
    ],
)
def test_a_file_that_cannot_be_read_exits_2_with_its_name(
    grpod: Grpod, tmp_path: Path, path: str, content: bytes | str | None, says: str
) -> None:
    if isinstance(content, bytes):
        (tmp_path / path).write_bytes(content)
    elif content:
        (tmp_path / path).mkdir()
    done = grpod("config", "--check", str(tmp_path / path))
    assert done.code == 2
    assert path in done.err
    assert says in done.err


def test_a_proxy_asks_for_neither_model_nor_data(grpod: Grpod, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("proxy: {replicas: ['http://127.0.0.1:1']}\n")
    assert grpod("config", "--check", str(path)).code == 0
    path.write_text("lora: {rank: 8}\n")
    assert "proxy.replicas" in grpod("config", "--check", str(path), "--role", "proxy").err


def test_the_schema_describes_every_key_for_an_editor(grpod: Grpod) -> None:
    done = grpod("config", "--schema")
    schema = json.loads(done.out)
    assert done.code == 0
    assert schema["additionalProperties"] is False
    learner = schema["$defs"]["LearnerSection"]["properties"]
    assert learner["learning_rate"]["description"]
    assert learner["learning_rate"]["exclusiveMinimum"] == 0
    assert "from" in schema["$defs"]["RunSection"]["properties"]
