from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from grpod.proxy.routing import Ask, View, choose

NAMES = ["base", "v1", "v2"]
views = st.lists(
    st.builds(
        View,
        url=st.sampled_from([f"http://r{i}" for i in range(6)]),
        up=st.booleans(),
        resting=st.booleans(),
        models=st.frozensets(st.sampled_from(NAMES)),
        outstanding=st.integers(0, 3),
    ),
    unique_by=lambda view: view.url,
)
asks = st.builds(
    Ask,
    model=st.sampled_from([*NAMES, "v9"]),
    known=st.booleans(),
    avoid=st.frozensets(st.sampled_from([f"http://r{i}" for i in range(6)])),
)


def view(url: str, **more: object) -> View:
    return View(**{"url": url, "up": True, "models": frozenset({"base"}), **more})  # type: ignore[arg-type]


@given(views, asks)
def test_who_is_chosen_is_up_holds_the_model_and_was_not_tried(candidates: list[View], ask: Ask) -> None:
    choice = choose(candidates, ask)
    fit = [v for v in candidates if v.up and ask.model in v.models and v.url not in ask.avoid]
    assert (choice.url is not None) == bool(fit)
    if choice.url is not None:
        (chosen,) = [v for v in fit if v.url == choice.url]
        awake = [v for v in fit if not v.resting] or fit
        assert chosen in awake
        assert chosen.outstanding == min(v.outstanding for v in awake)
        assert choice.reason == ("only_one" if len(fit) == 1 else "least_loaded")


@given(views, asks, st.randoms(use_true_random=False))
def test_the_order_of_the_candidates_does_not_matter(candidates: list[View], ask: Ask, dice: random.Random) -> None:
    shuffled = list(candidates)
    dice.shuffle(shuffled)
    assert choose(shuffled, ask) == choose(candidates, ask)


@given(views, asks)
def test_nobody_is_chosen_for_one_true_reason(candidates: list[View], ask: Ask) -> None:
    choice = choose(candidates, ask)
    holders = [v for v in candidates if ask.model in v.models]
    if choice.reason == "unknown_model":
        assert not holders
        assert not ask.known
        assert any(v.models for v in candidates)
    if choice.reason == "no_replica":
        assert not any(v.models for v in candidates)
    if choice.reason == "none_holds_it":
        assert not any(v.up for v in holders)
        assert holders or ask.known
    if choice.reason == "exhausted":
        assert {v.url for v in holders if v.up} <= ask.avoid


def test_the_least_loaded_wins_and_a_tie_goes_to_the_lowest_url() -> None:
    ask = Ask(model="base")
    assert choose([view("http://b", outstanding=5), view("http://a", outstanding=9)], ask).url == "http://b"
    assert choose([view("http://b"), view("http://a")], ask).url == "http://a"


def test_a_resting_replica_is_taken_when_it_is_the_only_one() -> None:
    ask = Ask(model="base")
    assert choose([view("http://a", resting=True), view("http://b", outstanding=9)], ask).url == "http://b"
    assert choose([view("http://a", resting=True)], ask).url == "http://a"
