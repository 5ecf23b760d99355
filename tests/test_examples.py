"""The examples' own files: what a user copies must do what its comments say. (They are run in tests/integration.)"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise

import pytest

from grpod import __main__, configure
from grpod.generator.builtin_rewards import math
from grpod.replica import vllm
from tests.models import EXAMPLES, example


def test_the_quickstarts_reward_wants_the_sum_and_nothing_else() -> None:
    reward = example("quickstart/rewards.py").sum_reward
    said = [[{"role": "assistant", "content": text}] for text in ("7", " 7\n", "8", "7 or 8", "")]
    assert reward(completions=said, answer=["7"] * 5, prompts=[None] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_the_quickstarts_prompts_are_all_sums_of_two_digits() -> None:
    rows = [json.loads(line) for line in (EXAMPLES / "quickstart/prompts.jsonl").read_text().splitlines()]
    asked = {row["prompt"][0]["content"]: row["answer"] for row in rows}
    assert asked == {f"{a}+{b}=": str(a + b) for a in range(10) for b in range(10)}


def test_the_arithmetic_prompts_are_what_their_script_prints() -> None:
    folder = EXAMPLES / "arithmetic"
    made = subprocess.run([sys.executable, str(folder / "make_prompts.py")], capture_output=True, text=True, check=True)
    assert made.stdout == (folder / "prompts.jsonl").read_text()


@pytest.fixture
def math_config() -> configure.Loaded:
    return configure.load(EXAMPLES / "math/grpod.yaml", env={})


def test_the_math_example_is_the_recipe_that_its_comments_tell_of(math_config: configure.Loaded) -> None:
    config = math_config.config
    assert config.generator.group_size * config.learner.groups_per_step == 128
    assert (config.lora.rank, config.lora.alpha, config.lora.target_modules) == (1, 2.0, "all-linear")
    assert config.generator.engine == "vllm"
    command = vllm.command(config, "base", port=1, gpus=["cuda:0"], shared=True)
    given = dict(pairwise(command))
    assert (given["--max-lora-rank"], given["--dtype"], given["--max-model-len"]) == ("1", "bfloat16", "4096")
    assert given["--gpu-memory-utilization"] == "0.45"


def test_the_math_example_passes_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.run(["config", "--check", str(EXAMPLES / "math/grpod.yaml")]) == 0
    assert capsys.readouterr().out.startswith("ok: ")


@pytest.mark.parametrize(
    ("columns", "gold"),
    [
        (["problem", "level", "type", "solution"], {"solution": r"Halve it: $1/2$. So the answer is $\boxed{\frac{1}{2}}$."}),
        (["question", "answer"], {"answer": "Half of one is <<1/2=0.5>>0.5.\n#### 1/2"}),
    ],
    ids=["MATH", "GSM8K"],
)
def test_the_math_reward_reads_the_gold_columns_that_the_example_names(columns: list[str], gold: dict[str, str]) -> None:
    reward = math(columns)
    said = [r"It is $\boxed{\frac12}$.", r"The answer is $\boxed{2}$.", "no idea"]
    assert reward(completions=said, **{name: [text] * 3 for name, text in gold.items()}) == [1.0, 0.0, 0.0]
