"""What is wrong with `rewards` is said when the pool is entered, by function and name: user code is imported there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpod.config import RewardSection
from grpod.errors import ConfigError
from grpod.generator.reward import RewardFailure, RewardPool
from tests.generator.scoring import HERE, score


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"function": "reward_inputs.py:needs_missing_column"}, ["needs_missing_column", "'no_such_column'", "answer"]),
        ({"function": "reward_inputs.py:no_such_function"}, ["no_such_function", "reward_inputs.py has no function"]),
        ({"function": "no_such_file.py:reward"}, ["no_such_file.py cannot be read"]),
        ({"function": "no_such_package.module:reward"}, ["no_such_package.module", "ModuleNotFoundError"]),
        ({"function": "exact_mach"}, ["'exact_mach' is not built in", "did you mean 'exact_match'?"]),
        ({"function": "reward_inputs.py:"}, ["'reward_inputs.py:'", "was expected"]),
        ({"function": "reward_inputs.py:with_options"}, ["'bonus'"]),
        ({"function": "reward_inputs.py:with_options", "options": {"bonus": 1, "malus": 2}}, ["no parameter 'malus'"]),
        ({"function": "reward_inputs.py:ints", "options": {"prompts": 1}}, ["'prompts' is what every function is given"]),
        ({"function": "length"}, ["'length'", "target"]),
        ({"function": "length", "options": {"tokens": 3}}, ["no option 'tokens'; it has target"]),
        ({"function": "exact_match", "options": {"column": "gold"}}, ["column 'gold'", "answer"]),
        ({"function": "reward_inputs.py:ints", "weight": 0.0}, ["every weight is 0"]),
    ],
)
async def test_a_function_that_cannot_be_called_is_refused_by_name(section: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        async with RewardPool([RewardSection(**section)], folder=HERE, columns=("answer",)):
            pass
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f(:\n", "SyntaxError"),
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit(0)\n", "SystemExit"),
        ("import os; os._exit(0)\n", "while they were imported: the reward function ended its process"),
        ("while True: pass\n", "did not end within 1 s"),
        ("f = 3\n", "has no function 'f'"),
    ],
)
async def test_a_file_that_cannot_be_imported_is_refused(tmp_path: Path, source: str, words: str) -> None:
    (tmp_path / "broken.py").write_text(source)
    limit_s = 1 if "while" in source else 60
    rewards = RewardPool([RewardSection(function="broken.py:f")], folder=tmp_path, columns=(), start_timeout_s=limit_s)
    with pytest.raises(ConfigError, match=words):
        async with rewards:
            pass


@pytest.mark.anyio
async def test_a_file_finds_what_lies_beside_it_and_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("SCORE = 1.0\n")
    file = tmp_path / "mine.py"
    file.write_text("from helper import SCORE\ndef f(completions, prompts):\n    1 / len(prompts[0])\n    return [SCORE] * 4\n")
    async with RewardPool([RewardSection(function="mine.py:f", timeout_s=30)], folder=tmp_path, columns=()) as rewards:
        file.write_text("broken half-way through a run(")
        for worker in rewards._workers:
            await worker.end()  # one that comes back runs the text of the start
        assert (await score(rewards)).totals == (1.0,) * 4


@pytest.mark.anyio
async def test_a_module_is_found_beside_the_config_or_wherever_grpod_finds_it(tmp_path: Path) -> None:
    (tmp_path / "beside_config.py").write_text("def f(prompts):\n    return [2.0] * len(prompts)\n")
    sections = [RewardSection(function="beside_config:f"), RewardSection(function="tests.generator.reward_inputs:ints")]
    async with RewardPool(sections, folder=tmp_path, columns=(), workers=1) as rewards:
        assert (await score(rewards)).totals == (3.0, 2.0, 2.0, 3.0)


@pytest.mark.anyio
async def test_a_worker_that_cannot_be_started_again_costs_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it reads when it is imported has been removed while the run goes on, and its worker died."""
    monkeypatch.setattr("grpod.generator.reward.RETRIES_S", (0.0, 0.0))
    gone = tmp_path / "lexicon"
    gone.touch()
    (tmp_path / "r.py").write_text(f"import os\nopen({str(gone)!r})\ndef f(completions, **_):\n    os._exit(3)\n")
    async with RewardPool([RewardSection(function="r.py:f")], folder=tmp_path, columns=(), workers=1) as pool:
        gone.unlink()
        with pytest.raises(RewardFailure, match="FileNotFoundError") as caught:
            await score(pool)
        assert caught.value.reason == "reward_error"
