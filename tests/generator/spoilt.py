"""Answers with status 200 that are no completion of a group, each spoilt in one way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Spoil = Callable[[dict[str, Any]], object]


def set_choice(**values: Any) -> Spoil:
    return lambda answer: answer["choices"][1].update(values)


def set_logprob(value: Any) -> Spoil:
    return lambda answer: answer["choices"][1]["logprobs"]["token_logprobs"].__setitem__(0, value)


SPOILT: dict[str, tuple[str, Any]] = {
    "aborted": ("edit", set_choice(finish_reason="abort")),
    "no reason": ("edit", set_choice(finish_reason=None)),
    "null logprob": ("edit", set_logprob(None)),
    "NaN": ("edit", set_logprob(float("nan"))),
    "minus infinity": ("edit", set_logprob(float("-inf"))),
    "positive": ("edit", set_logprob(0.7)),
    "one too many": ("edit", lambda answer: answer["choices"][1]["logprobs"]["token_logprobs"].append(-1.0)),
    "no logprobs": ("edit", set_choice(logprobs=None)),
    "no tokens": ("edit", set_choice(token_ids=[])),
    "one missing": ("edit", lambda answer: answer["choices"].pop()),
    "index twice": ("edit", set_choice(index=0)),
    "the base": ("edit", lambda answer: answer.update(model="base")),
    "another prompt": ("edit", lambda answer: [choice.update(prompt_token_ids=[1]) for choice in answer["choices"]]),
    "an error": ("raw", lambda data: b'{"error": {"message": "out of memory", "code": 500}}'),
    "cut": ("raw", lambda data: data[: len(data) // 2]),
    "empty": ("raw", lambda data: b""),
}
