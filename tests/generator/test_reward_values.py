"""What a function may return: plain numbers come out, or a fault with its reason."""

from __future__ import annotations

import decimal
import fractions
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpod.generator.reward_values import Fault, plain_rewards
from tests.generator import reward_inputs


@pytest.mark.parametrize("function", ["ints", "bools", "numpy_array", "numpy_scalars", "tuple_"])
def test_numbers_of_any_kind_become_floats(function: str) -> None:
    rewards = plain_rewards(getattr(reward_inputs, function)([]), 4)
    assert rewards == [1.0, 0.0, 0.0, 1.0]
    assert {type(reward) for reward in rewards} == {float}


def test_exact_kinds_of_number_are_numbers() -> None:
    assert plain_rewards([fractions.Fraction(1, 2), decimal.Decimal("0.25"), None], 3) == [0.5, 0.25, None]


@pytest.mark.parametrize(
    ("function", "reason", "message"),
    [
        ("one", "reward_length", "got 1 value, wanted 4"),
        ("five", "reward_length", "got 5 values, wanted 4"),
        ("scalar", "reward_type", "got 1.0 (float), wanted a list of 4 numbers"),
        ("strings", "reward_type", "got '1' (str) for completion 0"),
        ("four_letters", "reward_type", "got '1001' (str)"),
        ("dict_", "reward_type", "(dict), wanted a list"),
        ("nothing", "reward_type", "got None (NoneType), wanted a list"),
        ("nested", "reward_type", "got [1.0] (list) for completion 0"),
        ("nested_array", "reward_type", "got [1.0] (list) for completion 0"),
        ("one_nan", "reward_not_finite", "got nan for completion 1"),
        ("one_inf", "reward_not_finite", "got inf for completion 1"),
        ("huge_int", "reward_not_finite", "for completion 0, wanted a finite number"),
        ("unprintable_int", "reward_not_finite", "got ... (int) for completion 0"),
        ("beyond_float32", "reward_not_finite", "got 1e+39 for completion 0"),
    ],
)
def test_a_fault_has_one_reason_and_says_got_and_wanted(function: str, reason: str, message: str) -> None:
    with pytest.raises(Fault) as caught:
        plain_rewards(getattr(reward_inputs, function)([]), 4)
    assert caught.value.reason == reason
    assert message in str(caught.value)


def test_an_array_of_no_dimension_is_no_list() -> None:
    with pytest.raises(Fault) as caught:
        plain_rewards(np.float32(1.0), 1)
    assert caught.value.reason == "reward_type"


FLOAT32_MAX = float(np.finfo(np.float32).max)


@given(st.lists(st.one_of(st.none(), st.floats(), st.integers(), st.booleans())))
def test_what_passes_is_finite_in_float32_and_what_is_not_does_not(values: list[float | None]) -> None:
    if not all(value is None or (math.isfinite(value) and abs(value) <= FLOAT32_MAX) for value in values):
        with pytest.raises(Fault):
            plain_rewards(values, len(values))
        return
    rewards = plain_rewards(values, len(values))
    assert all(reward is None or math.isfinite(np.float32(reward)) for reward in rewards)
    assert [reward is None for reward in rewards] == [value is None for value in values]
