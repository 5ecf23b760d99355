from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from grpod.learner.packing import pack, share_prompt

LENGTHS = st.lists(st.integers(1, 300), max_size=40)


@given(LENGTHS, st.integers(1, 1000))
def test_every_row_is_in_exactly_one_micro_batch(lengths: list[int], budget: int) -> None:
    batches = pack(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget for batch in batches)


@given(LENGTHS, st.integers(1, 1000))
def test_two_neighbouring_micro_batches_would_not_fit_in_one(lengths: list[int], budget: int) -> None:
    batches = pack(lengths, budget)
    for one, next_one in itertools.pairwise(batches):
        assert (len(one) + 1) * max(lengths[i] for i in [*one, next_one[0]]) > budget


def test_a_row_longer_than_the_budget_has_a_micro_batch_of_its_own() -> None:
    assert pack([3, 900, 5, 4], 10) == [[1], [2, 3], [0]]


def test_no_rows_make_no_micro_batch() -> None:
    assert pack([], 10) == []


@given(st.integers(1, 300), LENGTHS, st.integers(1, 2000), st.integers(8, 4096))
def test_every_completion_is_in_exactly_one_row(prompt: int, lengths: list[int], budget: int, hidden: int) -> None:
    rows = share_prompt(prompt, lengths, token_budget=budget, hidden_size=hidden)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(len(row) == 1 or prompt + sum(lengths[i] for i in row) <= budget for row in rows)


def test_short_completions_share_their_prompt_and_long_ones_do_not() -> None:
    assert share_prompt(200, [64] * 8, token_budget=8192, hidden_size=576) == [list(range(8))]
    assert share_prompt(200, [4000] * 3, token_budget=100_000, hidden_size=576) == [[0], [1], [2]]


def test_a_group_over_the_budget_is_split() -> None:
    assert share_prompt(10, [5, 5, 5], token_budget=20, hidden_size=64) == [[0, 1], [2]]
