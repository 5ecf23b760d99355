"""The pool against user code of every kind: what comes out, and under which reason a group is dropped."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import structlog

from grpod.config import RewardSection
from grpod.generator import reward
from grpod.generator.reward import RewardPool, RewardsUseless, Scores
from tests.generator.scoring import HERE, failure, pool, prompt, score


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward, "RETRIES_S", (0.0, 0.0))


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


@pytest.mark.anyio
async def test_built_in_rewards_run_in_the_worker_too() -> None:
    sections = [RewardSection(function="math"), RewardSection(function="length", options={"target": 4}, weight=0.5)]
    async with RewardPool(sections, folder=HERE, columns=("answer",), workers=1) as rewards:
        scores = await rewards.score(prompt(answer="1/2"), ["0.5", "$\\frac{2}{4}$", "2", "?"], [[3, 4]] * 4)
    assert scores.rewards == {"math": (1.0, 1.0, 0.0, 0.0), "length": (0.5,) * 4}
    assert scores.totals == (1.25, 1.25, 0.25, 0.25)


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
    async with pool("dies_of_bad") as rewards:
        fault = await failure(rewards, prompt("bad"))
        await score(rewards, prompt("good"))
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
    assert caught.value.exit_code == 75


@pytest.mark.anyio
async def test_a_run_that_scored_once_goes_on() -> None:
    async with pool("by_prompt", give_up_after=2) as rewards:
        await score(rewards, prompt("good"))
        for _ in range(4):
            await failure(rewards, prompt("bad"))
