"""Processes that get no warning: a learner, a generator, a replica killed; a learner that is stopped and comes back.

The moments are drawn; LIFECYCLE_SEED repeats them.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter

import pytest

from tests.integration import runs
from tests.integration.fleet import Fleet, check_audit, check_groups, check_versions, check_whole, claims, versions, waited

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
ON_AND_ON = "learner.steps=100000"
SETS = ("run.max_lag=4", ON_AND_ON)


def test_a_killed_learner_goes_on_from_its_checkpoint_and_nothing_is_trained_twice(on: Fleet, moments: random.Random) -> None:
    """Some rounds with a checkpoint at every publish, some with none at all; two generators live through all."""
    generators = [on.start("generator", sets=SETS) for _ in range(2)]
    for every in ("auto", "50", "50", "auto"):
        learner = on.start("learner", sets=(*SETS, f"learner.checkpoint_every={every}"))
        begun_at = learner.until("policy_loaded")["step"]
        on.until_step(begun_at + moments.randint(10, 20))
        time.sleep(moments.uniform(0, 0.3))
        learner.kill()
        assert not learner.events("lease_abandoned"), "a dead holder was waited for"
    learner = on.start("learner", sets=(*SETS, f"learner.steps={on.state()['step'] + 10}"))
    assert [one.end() for one in (learner, *generators)] == [0, 0, 0], on.tails()

    found = check_groups(on.run)
    reasons = Counter(row["reason"] for row in found.values())
    check_versions(on.run)
    check_audit(on)
    check_whole(on.run)
    trained = Counter(row["step"] for row in found.values() if row["end"] == "trained")
    assert trained == dict.fromkeys(range(1, max(trained) + 1), 4)
    # what was generated under versions that the checkpoint did not know is used
    orphans = {
        (version, epoch)
        for claim in claims(on.run)
        if (origin := claim["resumed_from"])
        for version, epoch in versions(on.run)
        if epoch < claim["epoch"] and (epoch, version) > (origin["epoch"], origin["version"])
    }
    shipped, _ = runs.rollouts(on.run)
    made = {group_id: (rows[0]["policy_version"], rows[0]["policy_epoch"]) for group_id, rows in shipped.items()}
    ends = Counter(found[group_id]["end"] for group_id, version in made.items() if version in orphans and group_id in found)
    print(reasons, ends)
    assert ends["trained"] > ends["dropped"]
    assert reasons["foreign_epoch"] == 0, reasons
    # each death costs at most what was credited when it came; a learner that is left alone has the bar of test_lifecycle.py
    window = (1 + 4) * 4  # groups: max_lag and the next publish, groups_per_step
    assert reasons["stale"] + reasons["stale_in_flight"] + reasons["lost"] <= 4 * window, reasons


def test_killed_before_its_first_checkpoint_it_begins_again(on: Fleet) -> None:
    sets = (*SETS, "learner.checkpoint_every=1000")
    on.start("generator", sets=sets)
    for _ in range(2):
        learner = on.start("learner", sets=sets)
        learner.until("policy_loaded")
        epoch = len(claims(on.run))
        waited(lambda: on.state().get("epoch") == epoch and on.state()["step"] >= 5, "step 5", failure=on.tails)  # noqa: B023
        learner.kill()
    learner = on.start("learner", sets=(*sets, "learner.steps=10"))
    assert learner.end() == 0, learner.tail()
    check_groups(on.run)
    check_versions(on.run)
    check_audit(on)


def test_a_second_learner_waits_or_leaves_and_one_that_was_stopped_for_long_is_not_followed(on: Fleet) -> None:
    sets = (*SETS, "run.lease_ttl_s=4")
    generator, first = on.start("generator", sets=sets), on.start("learner", sets=sets)
    first.until("lease_held_by_this")
    leaver, second = on.start("learner", sets=sets, args=("--takeover", "exit")), on.start("learner", sets=sets)
    assert leaver.end() == 3, leaver.tail()
    assert f"pid {first.pid}" in leaver.events("failed")[0]["message"]
    second.until("lease_held")
    on.until_step(on.state()["step"] + 5)
    assert not second.events("lease_held_by_this")

    first.signal(signal.SIGSTOP)
    second.until("lease_held_by_this")
    waited(lambda: on.state()["epoch"] == 2, "the second publishes", failure=on.tails)
    time.sleep(8)  # two ttl in all, at the least: that is what is tested
    before = versions(on.run)
    first.signal(signal.SIGCONT)
    assert first.end() == 3, first.tail()
    assert {epoch for _, epoch in set(versions(on.run)) - set(before)} <= {2}
    step = on.state()["step"]
    on.until_step(step + 10)
    second.terminate()
    generator.terminate()
    found = check_groups(on.run)
    assert "foreign_epoch" not in {row["reason"] for row in found.values()}
    check_versions(on.run)
    check_audit(on)
    check_whole(on.run)


def test_a_killed_replica_is_replaced_and_a_generator_that_stood_still_goes_on_under_another_name(on: Fleet) -> None:
    """Then that generator is killed: it leaves nothing behind, its groups end, and the learner goes on with the other."""
    sets = (*SETS, "run.lease_ttl_s=4")
    learner = on.start("learner", sets=sets)
    stays, goes = on.start("generator", sets=sets), on.start("generator", sets=sets)
    waited(lambda: sum(begun >= 8 for begun in on.begun().values()) == 2, "both begin groups", failure=on.tails)
    child = stays.events("child_started")[0]
    staying = child["child"].partition("-replica")[0]
    os.kill(child["pid"], signal.SIGKILL)
    stays.until("child_ready", more_than=1)

    goes.signal(signal.SIGSTOP)
    learner.until("generator_retired")
    goes.signal(signal.SIGCONT)
    goes.until("retired_by_learner")
    going = learner.until("generator_seen", more_than=2)["generator"]
    waited(lambda: on.begun().get(going, 0) > 0, f"{going} begins a group", failure=on.tails)

    goes.kill()
    learner.until("generator_retired", more_than=1)
    begun, step = on.begun()[staying], on.state()["step"]
    on.until_step(step + 10)
    assert on.begun()[staying] > begun
    subprocess.run(runs.command("stop", on.url), check=True, timeout=60)
    assert [one.end() for one in (learner, stays)] == [0, 0], on.tails()
    found = check_groups(on.run)
    lost = {group_id for group_id, row in found.items() if row["reason"] == "lost"}
    assert not any(group_id.startswith(f"{staying}/") for group_id in lost), lost
    gone = {f"{name}/{n}" for name, count in on.begun().items() if name != staying for n in range(count)}
    assert gone <= found.keys(), "a group of the dead one has not ended"
    check_audit(on)
    check_whole(on.run)
