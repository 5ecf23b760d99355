"""A run whose processes are signalled, killed, stopped and started again, at moments that nobody chose.

The moments are drawn; LIFECYCLE_SEED repeats them.
"""

from __future__ import annotations

import random
import subprocess
import time
from collections import Counter

import pytest

from tests.integration import runs
from tests.integration.fleet import (
    Fleet,
    check_audit,
    check_groups,
    check_versions,
    check_whole,
    metric,
    waited,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
ON_AND_ON = "learner.steps=100000"
LAG_4 = ("run.max_lag=4",)


def wasted(found: dict[str, dict[str, object]], *reasons: str) -> int:
    return sum(row["reason"] in reasons for row in found.values())


def test_with_lag_4_hardly_anything_is_stale_and_a_stop_request_ends_all_roles(on: Fleet) -> None:
    """Two generators, four processes; `grpod stop` while it runs; the same commands go on from there, to the end."""
    roles = ("generator", "proxy", "learner", "generator")
    first = [on.start(role, sets=(*LAG_4, ON_AND_ON)) for role in roles]
    on.until_step(20)
    subprocess.run(runs.command("stop", on.url), check=True, timeout=60)
    assert [one.end() for one in first] == [0, 0, 0, 0], on.tails()
    check_whole(on.run)
    check_audit(on)
    stopped_at = on.state()["step"]
    steps = stopped_at + 40
    second = [on.start(role, sets=(*LAG_4, f"learner.steps={steps}")) for role in reversed(roles)]
    proxy = second[2]
    assert [one.end() for one in second if one is not proxy] == [0, 0, 0], on.tails()
    proxy.terminate()
    found = check_groups(on.run)
    check_whole(on.run)
    assert second[1].events("policy_loaded")[0]["step"] == stopped_at
    assert Counter(row["step"] for row in found.values() if row["end"] == "trained") == dict.fromkeys(range(1, steps + 1), 4)
    assert wasted(found, "stale", "stale_in_flight", "lost") <= 0.1 * len(runs.begun(on.run)), Counter(
        row["reason"] for row in found.values()
    )
    assert check_audit(on)["ended"]


def test_with_lag_0_and_two_generators_it_does_not_stand_still_and_nothing_is_stale(on: Fleet) -> None:
    sets = ("run.max_lag=0", ON_AND_ON)
    processes = [on.start("learner", "generator", sets=sets), on.start("generator", sets=sets)]
    waited(lambda: sum(begun >= 8 for begun in on.begun().values()) == 2, "both begin groups", failure=on.tails)
    on.until_step(on.state()["step"] + 20)
    subprocess.run(runs.command("stop", on.url), check=True, timeout=60)
    assert [one.end() for one in processes] == [0, 0], on.tails()
    assert {row["reason"] for row in check_groups(on.run).values()} <= {"", "zero_spread"}


def test_a_slow_bucket_does_not_hold_up_the_steps(on: Fleet) -> None:
    """Every put takes 2 s longer."""
    on.start("learner", "generator", sets=(*LAG_4, ON_AND_ON), program="tests.integration.slow_grpod")
    waited(lambda: len(metric(on.run, "publish/blocked_s")) >= 12, "12 steps", failure=on.tails)
    blocked = metric(on.run, "publish/blocked_s")
    assert sum(value for _, value in blocked) <= 0.02 * (blocked[-1][0] - blocked[0][0])
    found = check_groups(on.run)
    assert wasted(found, "stale", "stale_in_flight", "lost") <= 0.1 * len(found)


def test_sigterm_at_any_moment_is_exit_0_and_leaves_whole_objects(on: Fleet, moments: random.Random) -> None:
    """Model load, first rollout, a step, an upload: wherever it happens to be."""
    sets = (*LAG_4, ON_AND_ON)
    places = ["starting", "run_joined", "policy_loaded", "child_ready", "ready", "step"]
    for place in moments.sample(places, len(places)):
        process = on.start("all", sets=sets)
        process.until(place if on.run.exists() or place != "run_joined" else "run_created")
        time.sleep(moments.uniform(0, 1))
        process.terminate()
        check_whole(on.run)
    check_groups(on.run)
    check_versions(on.run)
    check_audit(on)


def test_sigterm_to_one_of_four(on: Fleet, moments: random.Random) -> None:
    sets = (*LAG_4, ON_AND_ON)
    processes = {
        role: on.start(role.partition("-")[0], sets=sets) for role in ("proxy", "generator-a", "learner", "generator-b")
    }
    lonely = on.start("generator", sets=("run.bucket=file://" + str(on.run.parent / "nobody"),))
    on.until_step(3)
    lonely.until("waiting_for_run")
    lonely.terminate()
    for role in moments.sample(sorted(processes), 4):
        time.sleep(moments.uniform(0, 1))
        processes[role].terminate()
        assert on.half_written(processes[role].pid) == []
    check_whole(on.run)
    check_groups(on.run)
    check_audit(on)
