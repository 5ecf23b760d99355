"""How long one answer is waited for."""

from __future__ import annotations

from grpod.generator.patience import FACTOR, LEAST_S, REMEMBERED, Patience


def test_before_the_first_answer_it_may_take_as_long_as_a_start() -> None:
    assert Patience(600.0).seconds() == 600.0
    assert Patience(5.0).seconds() == LEAST_S


def test_then_ten_times_the_slowest_and_never_less_than_a_minute() -> None:
    patience = Patience(600.0)
    patience.answered(0.2)
    assert patience.seconds() == LEAST_S
    patience.answered(30.0)
    patience.answered(1.0)
    assert patience.seconds() == FACTOR * 30.0


def test_what_is_long_ago_is_forgotten() -> None:
    patience = Patience(600.0)
    patience.answered(100.0)
    for _ in range(REMEMBERED - 1):
        patience.answered(7.0)
    assert patience.seconds() == 1000.0
    patience.answered(7.0)
    assert patience.seconds() == 70.0


def test_a_group_that_was_not_answered_in_time_is_given_twice_as_long() -> None:
    patience = Patience(600.0)
    patience.answered(10.0)
    assert [patience.seconds(timed_out) for timed_out in range(3)] == [100.0, 200.0, 400.0]
