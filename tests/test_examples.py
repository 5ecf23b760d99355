"""The examples' own files: what a user copies must do what its comments say. (They are run in tests/integration.)"""

from __future__ import annotations

import json
import subprocess
import sys

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
