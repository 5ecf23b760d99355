"""A credit is a place in the order of training: no more is given than can be trained in time, and nobody is forgotten."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from grpod.learner import credits
from grpod.learner.pacing import Pacing

names = st.sampled_from(["a", "b", "c", "d"])
counts = st.dictionaries(names, st.integers(0, 200), min_size=1)


@given(st.integers(0, 500), counts, st.data())
def test_all_room_is_shared_and_no_more(room: int, outstanding: dict[str, int], data: st.DataObject) -> None:
    weights = {name: data.draw(st.floats(0, 100)) for name in outstanding}
    given_ = credits.share(room, outstanding, weights)
    assert sum(given_.values()) == room
    assert all(count > 0 for count in given_.values())


def test_credit_follows_throughput() -> None:
    assert credits.share(100, {"fast": 0, "slow": 0}, {"fast": 9.0, "slow": 1.0}) == {"fast": 90, "slow": 10}


def test_one_that_has_enough_outstanding_gets_nothing_before_the_others_have_as_much() -> None:
    assert credits.share(10, {"full": 30, "empty": 0}, {"full": 1.0, "empty": 1.0}) == {"empty": 10}


def test_nobody_alive_no_credit() -> None:
    assert credits.share(10, {}, {}) == {}


@given(st.integers(0, 4), st.integers(1, 4), st.integers(1, 16), st.integers(5, 60))
def test_a_group_begun_on_credit_is_trained_before_it_is_stale(
    max_lag: int, publish_every: int, groups: int, steps: int
) -> None:
    """Publishes land at once; groups are trained in the order of their credit."""
    published, step, granted, begun_under = 0, 0, 0, []
    while step < steps:
        end = credits.window_end(
            published_step=published, landed_step=published, stride=publish_every, publish_every=publish_every, max_lag=max_lag
        )
        room = credits.room(window_end=end, step=step, steps=steps, groups_per_step=groups, outstanding=granted - step * groups)
        granted += room
        begun_under += [published // publish_every] * room
        assert granted >= (step + 1) * groups, "the next step can always be filled"
        for pos in begun_under[step * groups : (step + 1) * groups]:
            assert published // publish_every - pos <= max_lag
        step += 1
        if step % publish_every == 0:
            published = step
    assert granted == steps * groups, "nothing is begun for steps that will not be made"


def test_on_policy_credit_waits_for_the_publish_itself() -> None:
    end = credits.window_end(published_step=3, landed_step=3, stride=5, publish_every=1, max_lag=0)
    assert end == 4
    assert credits.room(window_end=end, step=4, steps=100, groups_per_step=16, outstanding=0) == 0


def test_a_slow_bucket_widens_the_window_by_what_one_publish_takes() -> None:
    end = credits.window_end(published_step=3, landed_step=10, stride=7, publish_every=1, max_lag=1)
    assert end == 24


def test_a_resumed_learner_does_not_give_credit_for_what_was_begun_under_its_forerunner() -> None:
    pacing = Pacing({"g": 10}, {"g": 8})
    pacing.note_begun("g", 20)
    assert pacing.outstanding("g") == 12
    for _ in range(12):
        pacing.note_end("g", 0.0)
    assert pacing.outstanding("g") == 0
    assert pacing.grant(["g"], 4, 0.0)
    assert pacing.granted == {"g": 24}


def test_a_newcomer_is_given_as_much_as_the_others() -> None:
    pacing = Pacing()
    for _ in range(40):
        pacing.note_end("old", 1.0)
    pacing.granted["old"] = 40
    pacing.grant(["old", "new"], 20, 1.0)
    assert pacing.granted["new"] == 10


def test_a_newcomer_that_is_as_fast_soon_makes_as_much() -> None:
    """Each can make 20 groups at one time, a second for one; room for 60; the second comes a minute late."""
    pacing, now = Pacing(), 0.0
    waiting, due = Counter[str](), list[tuple[float, str]]()
    made: dict[str, list[float]] = {"old": [], "late": []}
    while now < 90:
        live = ["old"] if now < 60 else ["old", "late"]
        before = Counter(pacing.granted)
        pacing.grant(live, 60 - sum(pacing.outstanding(name) for name in live), now)
        waiting += Counter(pacing.granted) - before
        for name in live:
            begins = min(waiting[name], 20 - sum(owner == name for _, owner in due))
            waiting[name] -= begins
            due += [(now + 1.0, name)] * begins
        now, name = min(due)
        due.remove((now, name))
        pacing.note_end(name, now)
        made[name].append(now)
    lately = {name: sum(at > 70 for at in times) for name, times in made.items()}
    assert lately["late"] >= 0.9 * lately["old"], lately
