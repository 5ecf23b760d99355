"""A group of four and a pool to score it, for the reward tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from grpod.config import RewardSection
from grpod.generator.prompts import Prompt
from grpod.generator.reward import RewardFailure, RewardPool, Scores

HERE = Path(__file__).parent


def prompt(text: Any = "1+1=", **columns: Any) -> Prompt:
    return Prompt(
        row=7,
        data_epoch=0,
        prompt_id="p",
        prompt_ids=(1,),
        prompt=text,
        columns=columns,
        conversational=not isinstance(text, str),
    )


def pool(*functions: str | dict[str, Any], columns: Sequence[str] = ("answer",), **options: Any) -> RewardPool:
    sections = [
        RewardSection(**({"function": given} if isinstance(given, str) else {**given})) for given in map(_located, functions)
    ]
    return RewardPool(sections, folder=HERE, columns=columns, **{"workers": 1, **options})


def _located(given: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(given, str):
        return f"reward_inputs.py:{given}"
    return {**given, "function": f"reward_inputs.py:{given['function']}"}


async def score(rewards: RewardPool, asked: Prompt | None = None) -> Scores:
    return await rewards.score(asked or prompt(answer="2"), ["c0", "c1", "c2", "c3"], [[3, 4]] * 4)


async def failure(rewards: RewardPool, asked: Prompt | None = None) -> RewardFailure:
    with pytest.raises(RewardFailure) as caught:
        await score(rewards, asked)
    return caught.value
