from __future__ import annotations

import math
import struct

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from grpod.grpo.advantage import advantages, has_spread

ULP = struct.unpack("f", struct.pack("I", struct.unpack("I", struct.pack("f", 1.0))[0] + 1))[0]
EQUAL = {
    "six tenths": [0.1] * 6,
    "seven of 0.35": [0.35] * 7,
    "decimal sums": [0.1 + 0.2] * 4 + [0.3] * 4,
    "large": [1000.1] * 6,
    "one ulp of float32": [1.0] * 7 + [ULP],
}
REWARDS = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=16)


def wire(rewards: list[float]) -> list[float]:
    """As float32, which is how rewards arrive."""
    return [struct.unpack("f", struct.pack("f", reward))[0] for reward in rewards]


@pytest.mark.parametrize("rewards", EQUAL.values(), ids=EQUAL.keys())
@pytest.mark.parametrize("scale", ["std", "none"])
def test_rewards_that_are_equal_in_decimal_have_no_advantage(rewards: list[float], scale: str) -> None:
    for as_found in (rewards, wire(rewards)):
        assert not has_spread(as_found)
        assert advantages(as_found, scale=scale) == [0.0] * len(rewards)  # type: ignore[arg-type]


def test_a_small_difference_counts_at_full_strength() -> None:
    for rewards in ([0.30, 0.31, 0.30, 0.30], wire([0.30, 0.31, 0.30, 0.30]), wire([1000.30, 1000.31, 1000.30, 1000.30])):
        assert has_spread(rewards)
        assert advantages(rewards) == pytest.approx([-0.57735, 1.73205, -0.57735, -0.57735], abs=1e-3)


def test_without_scale_it_is_the_distance_from_the_mean() -> None:
    assert advantages([1.0, 0.0, 0.0, 3.0], scale="none") == [0.0, -1.0, -1.0, 2.0]


@given(REWARDS)
def test_advantages_are_centred_and_bounded(rewards: list[float]) -> None:
    values = advantages(rewards)
    assert sum(values) == pytest.approx(0.0, abs=1e-6)
    assert max(map(abs, values)) <= math.sqrt(len(rewards) - 1)
    if has_spread(rewards):
        assert math.fsum(value**2 for value in values) / len(values) == pytest.approx(1.0, abs=1e-6)


@given(REWARDS, st.floats(-1000, 1000))
def test_shifting_all_rewards_leaves_advantages(rewards: list[float], shift: float) -> None:
    shifted = [reward + shift for reward in rewards]
    assume(has_spread(rewards) == has_spread(shifted))
    assert advantages(shifted) == pytest.approx(advantages(rewards), abs=1e-3)


@given(st.integers(2, 64), st.floats(-1e30, 1e30).filter(lambda x: abs(x) > 1e-3))
def test_one_that_differs_from_all_others_reaches_the_bound_and_no_more(size: int, reward: float) -> None:
    values = advantages([0.0] * (size - 1) + [reward])
    assert abs(values[-1]) == pytest.approx(math.sqrt(size - 1), rel=1e-9)
    assert abs(values[-1]) <= math.sqrt(size - 1)
