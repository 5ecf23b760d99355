"""The pool against user code of every kind: rewards, faults and their reasons, time-outs, and no process left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog

from grpod.config import RewardSection
from grpod.errors import ConfigError
from grpod.generator.prompts import Prompt
from grpod.generator.reward import RewardFailure, RewardPool, RewardsUseless, Scores

HERE = Path(__file__).parent


def prompt(text: Any = "1+1=", **columns: Any) -> Prompt:
    return Prompt(
        row=7,
        data_epoch=0,
        prompt_id="p",
        prompt_ids=(1,),
        prompt=text,
        columns=columns,
        conversational=not isinstance(text, str),
    )


def pool(*functions: str | dict[str, Any], columns: Sequence[str] = ("answer",), **options: Any) -> RewardPool:
    sections = [
        RewardSection(**({"function": given} if isinstance(given, str) else {**given})) for given in map(_located, functions)
    ]
    return RewardPool(sections, folder=HERE, columns=columns, **{"workers": 1, **options})


def _located(given: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(given, str):
        return f"reward_inputs.py:{given}"
    return {**given, "function": f"reward_inputs.py:{given['function']}"}


async def score(rewards: RewardPool, asked: Prompt | None = None) -> Scores:
    return await rewards.score(asked or prompt(answer="2"), ["c0", "c1", "c2", "c3"], [[3, 4]] * 4)


async def failure(rewards: RewardPool, asked: Prompt | None = None) -> RewardFailure:
    with pytest.raises(RewardFailure) as caught:
        await score(rewards, asked)
    return caught.value


async def gone(pids: Sequence[int]) -> bool:
    """Waits until none of them runs (a zombie that nobody has collected yet does not run)."""
    with anyio.move_on_after(20) as scope:
        await anyio.to_thread.run_sync(_wait_until_gone, pids, abandon_on_cancel=True)
    return not scope.cancelled_caught


def _wait_until_gone(pids: Sequence[int]) -> None:
    while any(_runs(pid) for pid in pids):
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# -- what comes out


@pytest.mark.anyio
@pytest.mark.parametrize("function", ["numpy_array", "numpy_scalars", "coroutine", "awaitable", "strict_signature"])
async def test_rewards_cross_the_pipe(function: str) -> None:
    async with pool(function, columns=("answer", "meta")) as rewards:
        scores = await score(rewards, prompt(answer="2", meta={"a": 1}))
    assert scores == Scores(totals=(1.0, 0.0, 0.0, 1.0), rewards={function: (1.0, 0.0, 0.0, 1.0)})


@pytest.mark.anyio
async def test_none_is_left_out_of_the_weighted_sum() -> None:
    async with pool("some_none", "other") as rewards:
        assert (await score(rewards)).totals == (1.0, 0.5, 0.0, 1.0)
    async with pool({"function": "some_none", "weight": 2.0}, {"function": "other", "weight": -1.0}) as rewards:
        scores = await score(rewards)
    assert scores.totals == (2.0, -0.5, 0.0, -1.0)
    assert scores.rewards == {"some_none": (1.0, None, 0.0, None), "other": (0.0, 0.5, 0.0, 1.0)}


@pytest.mark.anyio
async def test_two_functions_of_one_name_have_keys_of_their_own() -> None:
    async with pool("other", "ints", "other") as rewards:
        assert rewards.names == ("other", "ints", "other_2")
        assert set((await score(rewards)).rewards) == set(rewards.names)


@pytest.mark.anyio
async def test_messages_are_shown_as_messages() -> None:
    async with pool("messages") as rewards:
        assert (await score(rewards, prompt([{"role": "user", "content": "1+1="}]))).totals == (1.0,) * 4


@pytest.mark.anyio
async def test_trl_signature_options_and_missing_keys() -> None:
    async with pool("trl", {"function": "with_options", "options": {"bonus": 0.5}}, "needs_answer") as rewards:
        scores = await score(rewards, prompt(answer="2"))
        assert scores.rewards["trl"] == (1.0,) * 4
        assert scores.rewards["with_options"] == (-1.0,) * 4  # the row's answer was passed, not the default
        # a row without the key that others have: None for who needs it, the default for who has one
        scores = await score(rewards, prompt())
        assert scores.rewards["needs_answer"] == (0.0,) * 4
        assert scores.rewards["with_options"] == (0.5,) * 4


@pytest.mark.anyio
async def test_what_user_code_prints_does_not_spoil_the_protocol(capfd: pytest.CaptureFixture[str]) -> None:
    async with pool("prints") as rewards:
        for _ in range(2):
            assert (await score(rewards)).totals == (1.0,) * 4
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("user code prints to stdout") == err.count("so does its child") == 2


@pytest.mark.anyio
async def test_a_function_may_change_its_arguments() -> None:
    async with pool("changes_arguments", columns=("meta",)) as rewards:
        for _ in range(2):
            assert (await score(rewards, prompt([{"role": "user", "content": "x"}], meta={}))).totals == (0.0, 1.0, 1.0, 1.0)


@pytest.mark.anyio
async def test_a_worker_imports_no_torch_and_is_kept() -> None:
    async with pool("torch_free", "same_worker") as rewards:
        first, second = await score(rewards), await score(rewards)
    assert first.rewards["torch_free"] == (1.0,) * 4
    assert first.rewards["same_worker"] == second.rewards["same_worker"]


# -- faults


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("one", "reward_length"),
        ("strings", "reward_type"),
        ("huge_int", "reward_not_finite"),
        ("all_none", "reward_none"),
        ("some_none", "reward_none"),  # two completions that no function covers: a reward may not be invented
        ("exits", "reward_error"),
    ],
)
async def test_a_fault_drops_the_group_by_name(function: str, reason: str) -> None:
    async with pool(function) as rewards:
        fault = await failure(rewards)
        assert (fault.reason, fault.function) == (reason, f"reward_inputs.py:{function}")


@pytest.mark.anyio
async def test_a_function_of_weight_0_covers_nothing() -> None:
    async with pool("all_none", {"function": "ints", "weight": 0.0}) as rewards:
        assert (await failure(rewards)).reason == "reward_none"
    async with pool("other", {"function": "ints", "weight": 0.0}) as rewards:
        scores = await score(rewards)
    assert (scores.totals, scores.rewards["ints"]) == ((0.0, 0.5, 0.0, 1.0), (1.0, 0.0, 0.0, 1.0))


@pytest.mark.anyio
async def test_a_sum_beyond_float32_is_not_finite() -> None:
    async with pool("near_float32", "near_float32") as rewards:
        assert (await failure(rewards)).reason == "reward_not_finite"


@pytest.mark.anyio
async def test_an_error_is_tried_again_before_the_group_is_dropped(tmp_path: Path) -> None:
    async with pool("raises_at_first", columns=("marker",)) as rewards:
        assert (await score(rewards, prompt(marker=str(tmp_path / "mark")))).totals == (1.0, 0.0, 0.0, 1.0)
    async with pool("raises") as rewards:
        fault = await failure(rewards)
    assert fault.reason == "reward_error"
    assert "ValueError: bad row" in fault.message
    assert "reward_inputs.py:" in fault.message


@pytest.mark.anyio
async def test_a_function_that_kills_its_process_is_an_error_and_the_next_group_is_scored() -> None:
    async with pool("dies") as rewards:
        fault = await failure(rewards)
        assert (await failure(rewards)).reason == "reward_error"
    assert fault.reason == "reward_error"
    assert f"signal {int(signal.SIGSEGV)}" in fault.message


@pytest.mark.anyio
async def test_the_first_fault_of_a_kind_is_logged_and_no_other() -> None:
    async with pool("by_prompt", give_up_after=100) as rewards:
        with structlog.testing.capture_logs() as logs:
            for text in ("bad", "good", "bad", "bad"):
                if text == "bad":
                    await failure(rewards, prompt(text))
                else:
                    await score(rewards, prompt(text))
    assert [log for log in logs if log["event"] == "reward_failed"] == [
        {
            "event": "reward_failed",
            "log_level": "warning",
            "reason": "reward_length",
            "function": "reward_inputs.py:by_prompt",
            "row": 7,
            "message": "got 1 value, wanted 4",
        }
    ]


@pytest.mark.anyio
async def test_a_run_whose_every_group_falls_to_one_fault_ends_by_itself() -> None:
    async with pool("one", give_up_after=3) as rewards:
        await failure(rewards)
        await failure(rewards)
        with pytest.raises(
            RewardsUseless, match=r"reward_length in all of the first 3 groups.*got 1 value, wanted 4"
        ) as caught:
            await score(rewards)
    assert caught.value.exit_code == 1


@pytest.mark.anyio
async def test_a_run_that_scored_once_goes_on() -> None:
    async with pool("by_prompt", give_up_after=2) as rewards:
        await score(rewards, prompt("good"))
        for _ in range(4):
            await failure(rewards, prompt("bad"))


# -- at start


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"function": "reward_inputs.py:needs_missing_column"}, ["needs_missing_column", "'no_such_column'", "answer"]),
        ({"function": "reward_inputs.py:no_such_function"}, ["no_such_function", "reward_inputs.py has no function"]),
        ({"function": "no_such_file.py:reward"}, ["no_such_file.py cannot be read"]),
        ({"function": "no_such_package.module:reward"}, ["no_such_package.module", "ModuleNotFoundError"]),
        ({"function": "exact_mach"}, ["'exact_mach' is not built in", "did you mean 'exact_match'?"]),
        ({"function": "reward_inputs.py:"}, ["'reward_inputs.py:'", "was expected"]),
        ({"function": "reward_inputs.py:with_options"}, ["'bonus'"]),
        ({"function": "reward_inputs.py:with_options", "options": {"bonus": 1, "malus": 2}}, ["no parameter 'malus'"]),
        ({"function": "reward_inputs.py:ints", "options": {"prompts": 1}}, ["'prompts' is what every function is given"]),
        ({"function": "length"}, ["'length'", "target"]),
        ({"function": "length", "options": {"tokens": 3}}, ["no option 'tokens'; it has target"]),
        ({"function": "exact_match", "options": {"column": "gold"}}, ["column 'gold'", "answer"]),
        ({"function": "reward_inputs.py:ints", "weight": 0.0}, ["every weight is 0"]),
    ],
)
async def test_a_function_that_cannot_be_called_is_refused_by_name(section: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        async with RewardPool([RewardSection(**section)], folder=HERE, columns=("answer",)):
            pass
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f(:\n", "SyntaxError"),
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit(0)\n", "SystemExit"),
        ("import os; os._exit(0)\n", "while they were imported: the reward function ended its process"),
        ("while True: pass\n", "did not end within 1 s"),
        ("f = 3\n", "has no function 'f'"),
    ],
)
async def test_a_file_that_cannot_be_imported_is_refused(tmp_path: Path, source: str, words: str) -> None:
    (tmp_path / "broken.py").write_text(source)
    limit_s = 1 if "while" in source else 60
    rewards = RewardPool([RewardSection(function="broken.py:f")], folder=tmp_path, columns=(), start_timeout_s=limit_s)
    with pytest.raises(ConfigError, match=words):
        async with rewards:
            pass


@pytest.mark.anyio
async def test_a_file_finds_what_lies_beside_it_and_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("SCORE = 1.0\n")
    file = tmp_path / "mine.py"
    file.write_text("from helper import SCORE\ndef f(completions, prompts):\n    1 / len(prompts[0])\n    return [SCORE] * 4\n")
    async with RewardPool([RewardSection(function="mine.py:f", timeout_s=30)], folder=tmp_path, columns=()) as rewards:
        file.write_text("broken half-way through a run(")
        for worker in rewards._workers:
            await worker.end()  # one that comes back runs the text of the start
        assert (await score(rewards)).totals == (1.0,) * 4


# -- hangs


@pytest.mark.anyio
async def test_hangs_of_every_kind_are_ended_by_name_and_the_others_are_scored() -> None:
    done: dict[str, str] = {}

    async def one(rewards: RewardPool, text: str) -> None:
        try:
            done[text] = str((await score(rewards, prompt(text))).totals)
        except RewardFailure as fault:
            done[text] = fault.reason

    texts = [f"good {i}" if i % 2 else f"HANG {i // 2}" for i in range(8)]
    async with pool({"function": "hangs", "timeout_s": 1.5}, workers=2) as rewards:
        async with anyio.create_task_group() as group:
            for text in texts:
                group.start_soon(one, rewards, text)
        workers = [worker._process.pid for worker in rewards._workers if worker._process]
    assert done == {text: "(0.0, 1.0, 0.0, 1.0)" if text.startswith("good") else "reward_timeout" for text in texts}
    assert await gone(workers)


@pytest.mark.anyio
async def test_what_a_hang_has_started_ends_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    async with pool({"function": "hangs_with_children", "timeout_s": 600.0}, columns=("pid_file",)) as rewards:
        async with anyio.create_task_group() as group:
            group.start_soon(score, rewards, prompt(pid_file=str(file)))
            pids = await anyio.to_thread.run_sync(_pids, file)
            assert len(pids) == 3
            group.cancel_scope.cancel()
        assert await gone(pids)


def _pids(file: Path) -> list[int]:
    """Waits for the three of `hangs_with_children`."""
    while not file.exists() or len(file.read_text().split()) < 3:
        time.sleep(0.02)
    return [int(word) for word in file.read_text().split()]


@pytest.mark.anyio
async def test_a_cancelled_group_ends_its_worker_and_the_next_is_scored() -> None:
    async with pool({"function": "hangs", "timeout_s": 60.0}) as rewards:
        with anyio.move_on_after(0.3) as scope:
            await score(rewards, prompt("HANG 1"))
        assert scope.cancelled_caught
        assert (await score(rewards)).totals == (0.0, 1.0, 0.0, 1.0)


@pytest.mark.anyio
async def test_a_service_stop_that_signals_every_process_lets_a_group_be_scored() -> None:
    async with pool("other") as rewards:
        process = rewards._workers[0]._process
        assert process is not None
        for pid in (process.pid, *children_of(process.pid)):
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        assert (await score(rewards)).totals == (0.0, 0.5, 0.0, 1.0)
        assert rewards._workers[0]._process is process


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


ORPHAN = """
import sys
import anyio
from tests.generator.test_reward import pool, prompt, score

async def main():
    async with pool({"function": "hangs_with_children", "timeout_s": 600.0}, columns=("pid_file",)) as rewards:
        await score(rewards, prompt(pid_file=sys.argv[1]))

anyio.run(main)
"""


def test_nothing_is_left_when_grpod_is_killed(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pids = tmp_path / "pids"
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN, str(pids)], cwd=request.config.rootpath)
    try:
        scorer, *children = _pids(pids)
        (keeper,) = children_of(parent.pid)
        assert scorer in children_of(keeper)
    finally:
        parent.kill()
        parent.wait()
    _wait_until_gone([keeper, scorer, *children])  # or the test's time-out
