"""A learner and two generators, each with a vLLM of its own: one of these is killed, and costs no more than was in flight."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

from tests.integration import runs
from tests.integration.fleet import check_audit, check_groups, check_versions, check_whole, fleet, waited
from tests.vllm.real import MARKS, SETS, START_S, engines, gone, make_run, process, serving

pytestmark = MARKS
# nothing is learnt: with all rewards alike there would be nothing to train on, long before the killed one is back
ON_AND_ON = ("learner.steps=100000", "learner.learning_rate=1e-9", "run.startup_timeout_s=300")
CORE = "generator.vllm.env.VLLM_CPU_OMP_THREADS_BIND"  # by themselves both vLLMs take core 0, and one that starts there starves


def test_a_killed_vllm_costs_what_was_in_flight_and_is_back_by_itself(tmp_path: Path) -> None:
    with fleet(tmp_path, make_run(tmp_path)) as on:
        learner = on.start("learner", sets=ON_AND_ON)
        struck, _ = generators = [on.start("generator", sets=(*SETS, f"{CORE}={core}")) for core in range(2)]
        for one in generators:
            serving(one)
        waited(lambda: sum(begun >= 8 for begun in on.begun().values()) == 2, "both begin groups", START_S, on.tails)

        def name(one: object) -> str:
            return next(str(e["child"]) for e in one.events("child_started")).partition("-replica")[0]  # type: ignore[attr-defined]

        old = set(engines(struck))
        os.kill(process(struck, "API"), signal.SIGKILL)
        lost = struck.until("replica_lost")
        gone(struck, old)
        step = on.state()["step"]
        serving(struck, incarnation=2)
        back = struck.until("replica_back")
        meanwhile, again = on.state()["step"] - step, on.begun()
        assert meanwhile >= 5, f"{meanwhile} steps in {back['seconds']} s: the other has gone on"
        waited(lambda: all(n > again[of] for of, n in on.begun().items()), "both begin groups again", START_S, on.tails)
        on.until_step(on.state()["step"] + 10)
        subprocess.run(runs.command("stop", on.url), check=True, timeout=60)
        assert [one.end() for one in (learner, *generators)] == [0, 0, 0], on.tails()
        for one in generators:
            gone(one)

        found = check_groups(on.run)
        _, drops = runs.rollouts(on.run)
        # the learner overtakes what is slow for a moment, as an engine that shares its two cores with one that starts may be
        stale = {group_id for group_id, reason in drops.items() if reason.startswith("stale")}
        reasons = {group_id: reason for group_id, reason in drops.items() if reason != "interrupted" and group_id not in stale}
        cost = {group_id: reason for group_id, reason in reasons.items() if group_id.startswith(f"{name(struck)}/")}
        assert len(cost) <= lost["in_flight"], cost
        assert not reasons.keys() - cost.keys(), reasons
        assert len(stale) <= 0.05 * len(found), f"{len(stale)} of {len(found)} groups"
        assert not [row for row in found.values() if row["reason"] == "lost"]
        check_audit(on)
        check_versions(on.run)
        check_whole(on.run)
        figures = {"back_s": back["seconds"], "steps_meanwhile": meanwhile, "in_flight": lost["in_flight"]}
        print(json.dumps({**figures, "cost": cost, "stale": len(stale), "groups": len(found)}))
