"""The rewards that need no code: math, exact_match, format, length."""

from __future__ import annotations

from typing import Any

import pytest

from grpod.generator.builtin_rewards import BUILT_IN


def score(name: str, *completions: Any, columns: tuple[str, ...] = ("answer",), gold: Any = None, **options: Any) -> list[Any]:
    function = BUILT_IN[name](columns, **options)
    given = {column: [gold] * len(completions) for column in columns}
    return function(completions=list(completions), completion_ids=[[0] * len(c) for c in completions], **given)


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("4", "2+2 is 4", "2+2 is 5"),
        (4, r"so \boxed{4}", r"4 or rather \boxed{5}"),
        (r"\frac{1}{2}", r"$\frac{2}{4}$", r"$\frac{1}{3}$"),
        (r"$\sqrt{8}$", r"\boxed{2\sqrt{2}}", r"\boxed{2}"),
        ("She has 3 * 4 = 12.\n#### 12", "The answer is 12.", "The answer is 3."),
    ],
)
def test_math_compares_values(gold: Any, right: str, wrong: str) -> None:
    message = [{"role": "assistant", "content": right}]
    assert score("math", right, wrong, "no idea", message, gold=gold) == [1.0, 0.0, 0.0, 1.0]


def test_math_does_not_apply_without_a_gold_answer() -> None:
    assert score("math", "4", "5") == [None, None]
    assert score("math", "4", gold="", columns=("solution",)) == [None]


def test_the_gold_column_is_answer_then_solution_then_what_is_asked_for() -> None:
    assert score("exact_match", "4", gold="4", columns=("solution",)) == [1.0]
    assert score("exact_match", "4", gold="4", columns=("target",), column="target") == [1.0]
    with pytest.raises(ValueError, match="'answer' or 'solution'; the data has target"):
        BUILT_IN["exact_match"](("target",))
    with pytest.raises(ValueError, match="'gold'; the data has none"):
        BUILT_IN["math"]((), column="gold")


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("1234", "That is $1,234.00.", "1,235"),
        ("-3", "x = -3", "x = 3"),
        ("3", "5-3", "5-2"),
        ("0.5", r"1/3 no: \boxed{1/2}", "0.25"),
        ("72", "48 + 24 = 72", "72 - 1 = 71"),
        ("work\n#### 1,000", "1000", "100"),
        ("Paris", " paris. ", "Paris, France"),
        ("x + y", r"\boxed{x + y}", r"\boxed{x}"),
    ],
)
def test_exact_match_compares_the_last_number_or_the_text(gold: str, right: str, wrong: str) -> None:
    assert score("exact_match", right, wrong, gold=gold) == [1.0, 0.0]


def test_format_asks_for_a_thought_and_takes_any_regex() -> None:
    assert score("format", "<think>a\nb</think> 4", "4", "<think>a", "x <think>a</think> 4") == [1.0, 0.0, 0.0, 0.0]
    assert score("format", "a 12", "a", regex=r"\d+$") == [1.0, 0.0]
    with pytest.raises(ValueError, match="regex '\\('"):
        BUILT_IN["format"]((), regex="(")


def test_length_peaks_at_its_target() -> None:
    assert score("length", "", "x" * 5, "x" * 10, "x" * 15, "x" * 40, target=10) == [0.0, 0.5, 1.0, 0.5, 0.0]
    with pytest.raises(ValueError, match="target 0"):
        BUILT_IN["length"]((), target=0)
