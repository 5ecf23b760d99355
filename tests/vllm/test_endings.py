"""However grpod ends, and however its vLLM does, no process of that vLLM is left 5 s later.

Five ends share one run, and an engine as long as it lives: vLLM takes half a minute to start.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.fleet import Fleet, Grpod, check_audit, check_whole, fleet, waited
from tests.vllm.real import MARKS, SETS, START_S, engines, gone, make_run, process, serving

pytestmark = MARKS


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("endings"))


@pytest.fixture
def on(tmp_path: Path, config: Path) -> Iterator[Fleet]:
    with fleet(tmp_path, config) as found:
        yield found


def begun(on: Fleet, *sets: str) -> Grpod:
    """Training, so that groups are in flight."""
    one = on.start("all", sets=(*SETS, "learner.steps=100000", *sets))
    step = on.state().get("step", 0)
    serving(one)
    trains(on, one, step + 2)
    assert {process(one, name) for name in ("API", "EngineCore", "Worker")} <= engines(one).keys()
    return one


def trains(on: Fleet, one: Grpod, step: int) -> None:
    waited(lambda: on.state().get("step", -1) >= step or one.process.poll() is not None, f"step {step}", START_S, one.tail)
    assert one.process.poll() is None, one.tail()


def ended_and_back(on: Fleet, one: Grpod, name: str, number: int) -> float:
    """Seconds from the signal to the next adapter that is served; what was there before is gone, the new engine trains."""
    old, times = set(engines(one)), len(one.events("child_ready"))
    killed = time.monotonic()
    os.kill(process(one, name), number)
    one.until("replica_lost", more_than=times - 1)
    gone(one, old)
    serving(one, incarnation=times + 1)
    one.until("replica_back", more_than=times - 1)
    seconds = time.monotonic() - killed
    trains(on, one, on.state()["step"] + 2)
    assert not old & set(engines(one))
    return round(seconds, 1)


def test_nothing_of_vllm_is_left_when_it_dies_and_when_grpod_is_asked_to_end(on: Fleet) -> None:
    one = begun(on)
    figures = {"api_killed_back_s": ended_and_back(on, one, "API", signal.SIGKILL)}
    figures["engine_crashed_back_s"] = ended_and_back(on, one, "EngineCore", signal.SIGSEGV)
    asked = time.monotonic()
    one.terminate()
    figures["sigterm_s"] = round(time.monotonic() - asked, 1)
    gone(one)
    print(json.dumps(figures))
    check_audit(on)
    check_whole(on.run)


def test_nothing_of_vllm_is_left_when_grpod_is_killed_and_when_its_grace_is_over(on: Fleet) -> None:
    one = begun(on)
    one.kill()
    gone(one)
    one = begun(on, "run.grace_s=0.1")
    one.signal(signal.SIGTERM)
    assert one.end() == 0
    assert one.events("ended_by_force"), one.tail()
    gone(one)
    check_audit(on)
