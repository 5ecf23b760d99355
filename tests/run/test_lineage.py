from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from grpod.run.lineage import Lineage
from grpod.wire.lease import Claim
from tests.run.helpers import claim


def test_a_zombies_later_versions_do_not_count() -> None:
    lineage = Lineage((claim(1), claim(2, 6, (30, 3, 1, 3))))
    assert lineage.highest_epoch == 2
    assert [lineage.canonical(version, 1) for version in (0, 5, 6, 9)] == [True, True, False, False]
    assert lineage.canonical(6, 2)
    assert not lineage.canonical(0, 3)  # nobody claimed it
    assert lineage.newest([(0, 1), (5, 1), (9, 1)]) == (5, 1)
    assert lineage.newest([(5, 1), (6, 2), (9, 1)]) == (6, 2)
    assert lineage.newest([(7, 1)]) is None


def test_orphans_take_the_position_of_what_was_resumed() -> None:
    lineage = Lineage((claim(1), claim(2, 6, (30, 3, 1, 3))))
    assert [lineage.pos(v, 1, v) for v in range(6)] == [0, 1, 2, 3, 3, 3]
    assert [lineage.pos(v, 2, v - 3) for v in (6, 7, 8)] == [3, 4, 5]


def test_resumes_chain() -> None:
    # epoch 3 resumes from v7 of epoch 2; epoch 4 has nothing newer than v2 of epoch 1 that is whole
    claims = (claim(1), claim(2, 6, (30, 3, 1, 3)), claim(3, 9, (40, 7, 2, 4)), claim(4, 12, (20, 2, 1, 2)))
    assert [Lineage(claims[:3]).pos(v, 2, v - 3) for v in (6, 7, 8)] == [3, 4, 4]
    assert [Lineage(claims[:3]).pos(v, 1, v) for v in (4, 5)] == [3, 3]
    lineage = Lineage(claims)
    assert [lineage.pos(v, 1, v) for v in range(6)] == [0, 1, 2, 2, 2, 2]
    assert [lineage.pos(v, 2, v - 3) for v in (6, 7, 8)] == [2, 2, 2]
    assert [lineage.pos(v, 3, v - 5) for v in (9, 10)] == [2, 2]
    assert lineage.pos(12, 4, 2) == 2


def test_a_run_that_begins_again_stands_at_position_0() -> None:
    nothing_published = Lineage((claim(1), claim(2, 0)))
    assert nothing_published.newest([(0, 1)]) is None  # epoch 1 came too late with it
    assert nothing_published.newest([(0, 1), (0, 2)]) == (0, 2)
    told_to = Lineage((claim(1), claim(2, 4)))
    assert [told_to.pos(v, 1, v) for v in range(4)] == [0, 0, 0, 0]
    assert [told_to.pos(v, 2, v - 4) for v in (4, 5)] == [0, 1]


def test_steps_beyond_the_resumed_one_are_undone() -> None:
    lineage = Lineage((claim(1), claim(2, 6, (30, 3, 1, 3)), claim(3, 6)))
    assert not Lineage(lineage.claims[:2]).undone(30, 1)
    assert Lineage(lineage.claims[:2]).undone(31, 1)
    assert lineage.undone(1, 2)
    assert not lineage.undone(1, 3)


def test_lineages_of_the_same_claims_are_equal() -> None:
    assert Lineage((claim(1),)) == Lineage((claim(1),)) != Lineage(())


@dataclass
class Learner:
    """One holder, correct in itself: numbers rise from first_version, the first takes the pos of what was resumed."""

    epoch: int
    next_version: int
    next_pos: int
    step: int
    published: list[tuple[int, int, int]] = field(default_factory=list)  # version, epoch, manifest pos
    checkpoints: list[tuple[int, int, int, int]] = field(default_factory=list)  # step, version, epoch, pos

    def publish(self) -> tuple[int, int, int]:
        made = (self.next_version, self.epoch, self.next_pos)
        self.published.append(made)
        self.next_version, self.next_pos, self.step = self.next_version + 1, self.next_pos + 1, self.step + 1
        return made

    def save(self) -> None:
        if self.published:
            self.checkpoints.append((self.step, *self.published[-1]))


@given(st.data())
def test_two_learners_interleaved(data: st.DataObject) -> None:
    """A zombie goes on publishing after another has claimed, and listings miss what is newest."""
    learners = [Learner(epoch=1, next_version=0, next_pos=0, step=0)]
    claims: list[Claim] = [claim(1)]
    order: list[tuple[int, int, int]] = []  # every publish, in time
    before_claim = {1: 0}  # epoch -> how many publishes of others its holder could have seen
    followed: list[tuple[int, int, int]] = []  # (claims known, epoch, version) that a reader took, in time
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["publish", "publish", "publish", "save", "claim"]))
        if action == "claim" and len(claims) < 5:
            missed = data.draw(st.integers(0, 2))
            seen = order[: len(order) - missed]
            whole = [c for learner in learners for c in learner.checkpoints if Lineage(tuple(claims)).canonical(c[1], c[2])]
            whole = whole[: len(whole) - data.draw(st.integers(0, 1))]  # its newest may be broken
            origin = max(whole, key=lambda c: (c[2], c[0]), default=None)
            first = max([1 + max((v for v, _, _ in seen), default=-1), *(c.first_version for c in claims)])
            epoch = len(claims) + 1
            claims.append(claim(epoch, first, origin))
            learners.append(Learner(epoch, first, origin[3] if origin else 0, origin[0] if origin else 0))
            before_claim[epoch] = len(order)
        else:
            learner = data.draw(st.sampled_from(learners[-2:]))
            if action == "save":
                learner.save()
            else:
                order.append(learner.publish())
        newest = Lineage(tuple(claims)).newest((v, e) for v, e, _ in order)
        if newest:
            followed.append((len(claims), newest[1], newest[0]))

    # a reader goes forward, whatever a zombie publishes; back only when it learns of a claim that undoes what it followed
    assert followed == sorted(followed)

    views = [Lineage(tuple(claims[:n])) for n in range(1, len(claims) + 1)]
    lineage = views[-1]
    canonical = [p for p in order if lineage.canonical(p[0], p[1])]
    numbers: dict[int, set[int]] = {}
    for version, epoch, _ in canonical:
        numbers.setdefault(version, set()).add(epoch)
    assert all(len(epochs) == 1 for epochs in numbers.values())

    # the true holder's numbers rise in the order in which they are published
    for epoch in before_claim:
        own = [v for v, e, _ in canonical if e == epoch]
        assert own == sorted(own)
    heads = [(e, v) for v, e, _ in canonical]
    assert [v for _, v in sorted(heads)] == sorted(v for _, v in heads)

    # who sees more claims counts fewer versions of the epochs it knew, never one again
    for earlier, later in pairwise(views):
        for version, epoch, _ in order:
            if epoch <= earlier.highest_epoch and not earlier.canonical(version, epoch):
                assert not later.canonical(version, epoch)

    # positions never fall along the line, so lag is never negative
    for view in views:
        line = sorted((e, v, view.pos(v, e, pos)) for v, e, pos in order if view.canonical(v, e))
        positions = [pos for _, _, pos in line]
        assert positions == sorted(positions)
        assert all(pos >= 0 for pos in positions)
