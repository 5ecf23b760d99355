r"""Rewards by a single word in the config: math, exact_match, format, length.

Each name stands for a maker: make(columns, **options) -> reward function. It checks its options and columns once, at start
(ValueError), so that the function itself only scores. None: the row has no gold answer, so the reward does not apply.

    math         1 where math-verify holds the completion's last or boxed answer to be equal to the gold column
    exact_match  1 where the last number (or \boxed{...}) equals the gold number; a gold that is no number: equal text
    format       1 where the regex matches; by default <think>...</think> and then an answer
    length       1 at `target` tokens, falling to 0 at none and at twice as many
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

GOLD = ("answer", "solution")
THINK = r"\A<think>(?!.*<think>).*?</think>.*\Z"
_NUMBER = re.compile(r"(?:(?<![\w.)])[-+])?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s*/\s*\d+)?")
_BOXED = re.compile(r"\\boxed\s*\{")

RewardFunction = Callable[..., list[float | None]]


def text_of(completion: Any) -> str:
    """A completion is a text, or a list of messages: the last one's content."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def math(columns: Sequence[str], *, column: str = "") -> RewardFunction:
    from math_verify import parse, verify  # imports sympy: at start, not under the first group's time-out

    # its own time-outs need SIGALRM, and read as "wrong"; here the pool ends the worker, and the group is dropped by name
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    name = _gold_column(columns, column)

    def score(completions: Sequence[Any], **given: Any) -> list[float | None]:
        gold = _gold(given, name)
        target = parse(_as_latex(gold), parsing_timeout=None) if gold is not None else []
        if not target:
            return [None] * len(completions)
        answers = [parse(text_of(completion), parsing_timeout=None) for completion in completions]
        return [float(verify(target, answer, timeout_seconds=None)) for answer in answers]

    return score


def exact_match(columns: Sequence[str], *, column: str = "") -> RewardFunction:
    name = _gold_column(columns, column)

    def score(completions: Sequence[Any], **given: Any) -> list[float | None]:
        gold = _gold(given, name)
        if gold is None:
            return [None] * len(completions)
        return [float(_equal(text_of(completion), gold)) for completion in completions]

    return score


def format(columns: Sequence[str], *, regex: str = THINK) -> RewardFunction:
    try:
        pattern = re.compile(regex, re.DOTALL)
    except re.error as error:
        raise ValueError(f"regex {regex!r}: {error}") from error

    def score(completions: Sequence[Any], **_: Any) -> list[float | None]:
        return [float(bool(pattern.search(text_of(completion)))) for completion in completions]

    return score


def length(columns: Sequence[str], *, target: int) -> RewardFunction:
    if isinstance(target, bool) or not isinstance(target, int) or target < 1:
        raise ValueError(f"target {target!r}: a number of tokens, at least 1, was expected")

    def score(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float | None]:
        return [max(0.0, 1.0 - abs(len(ids) - target) / target) for ids in completion_ids]

    return score


BUILT_IN: dict[str, Callable[..., RewardFunction]] = {
    "math": math,
    "exact_match": exact_match,
    "format": format,
    "length": length,
}


def _gold_column(columns: Sequence[str], column: str) -> str:
    for name in (column,) if column else GOLD:
        if name in columns:
            return name
    wanted = repr(column) if column else " or ".join(map(repr, GOLD))
    raise ValueError(f"the gold answers are read from column {wanted}; the data has {', '.join(columns) or 'none'}")


def _gold(given: dict[str, Any], name: str) -> str | None:
    """The same for the whole group. Of a worked solution (GSM8K) what stands after ####."""
    values = given.get(name)
    if not values or values[0] is None:
        return None
    return str(values[0]).rpartition("####")[2].strip()


def _as_latex(gold: str) -> str:
    """math-verify reads LaTeX between delimiters only: a bare \\frac{1}{2} would be read as the number 2."""
    bare = "\n" not in gold and not any(mark in gold for mark in ("$", "\\(", "\\[", "\\boxed"))
    return f"${gold}$" if bare else gold


def _equal(completion: str, gold: str) -> bool:
    answer = _last_boxed(completion)
    number = _number(gold)
    if number is None:
        return _squeeze(completion if answer is None else answer) == _squeeze(gold)
    found = _NUMBER.findall(completion if answer is None else answer)
    return bool(found) and _number(found[-1]) == number


def _number(text: str) -> Fraction | None:
    text = re.sub(r"[\s$%,]", "", text).rstrip(".")
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None


def _last_boxed(text: str) -> str | None:
    *_, start = (None, *(match.end() for match in _BOXED.finditer(text)))
    if start is None:
        return None
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return None


def _squeeze(text: str) -> str:
    return " ".join(text.split()).casefold().strip(" .")
