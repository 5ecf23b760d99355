"""Data, rewards and replicas as they are, against generator and learner as they run: what is asked, what is trained, what is
dropped by which name, and how it ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog

from grpod.errors import ConfigError, NotReady
from grpod.run.audit import audit
from tests.generator.loops import GROUP_SIZE, liar, loop
from tests.generator.spoilt import SPOILT, set_choice
from tests.models import make_tiny_base

pytestmark = pytest.mark.anyio


def a_group(body: Any) -> bool:
    return isinstance(body, dict) and body.get("n") == GROUP_SIZE


# ---- rows that cannot be asked


ROWS = [
    {"prompt": "1+1="},
    {"prompt": ""},
    {"prompt": None},
    {"answer": "no prompt"},
    {"prompt": "2+2="},
    {"prompt": "   "},
    {"prompt": "half a pair: \ud83d"},
    {"prompt": "7 " * 400},
    {"prompt": "nul \0 inside"},
    {"prompt": "REFUSE ME, PLEASE"},
    {"prompt": "3+3="},
]
ASKED, SKIPPED, REFUSED = {0, 4, 5, 8, 9, 10}, {1: "empty", 2: "null", 3: "missing", 6: "not_text", 7: "too_long"}, 9


async def test_rows_that_cannot_be_asked_are_counted_once_an_epoch_and_a_refused_one_is_dropped(
    tmp_path: Path, tiny_base: Path
) -> None:
    from transformers import AutoTokenizer

    refused = AutoTokenizer.from_pretrained(str(tiny_base))(ROWS[REFUSED]["prompt"])["input_ids"]
    async with liar() as replica:
        replica.spoil(
            "status",
            (400, '{"error": {"message": "this prompt is against the rules"}}'),
            when=lambda body: a_group(body) and body["prompt"] == refused,
        )
        with structlog.testing.capture_logs() as logs:
            # of 6 asked rows 5 are trained on: two epochs, and the first group of a third
            outcome = await loop(tmp_path, tiny_base, replica, prompts=ROWS, learner={"steps": 11}, run={"max_lag": 0})
        asked = [tuple(seen.body["prompt"]) for seen in replica.requests if a_group(seen.body)]
    assert outcome.error is None
    assert await outcome.drops() == {"replica_refused": 2}
    assert asked.count(tuple(refused)) == 2, "once an epoch: asking again changes nothing"
    assert {group.prompt_row for group in await outcome.groups()} == ASKED - {REFUSED}
    (said,) = [line for line in logs if line["event"] == "replica_refused" and line["log_level"] == "warning"]
    assert (said["error"], said["row"]) == ("this prompt is against the rules", REFUSED)
    first = {line["reason"]: line["row"] for line in logs if line["event"] == "row_skipped"}
    assert first == {f"prompt_{word}": row for row, word in SKIPPED.items()}
    metrics = await outcome.metrics()
    counts = {name.rpartition("/")[2]: count for name, count in metrics.items() if name.startswith("prompts/skipped_total/")}
    assert counts == dict.fromkeys(first, 2.0)
    found = await audit(outcome.bucket)
    assert found.violations == []
    assert found.groups.dropped["replica_refused"] == 2


async def test_a_file_of_unusable_rows_ends_with_the_counts_and_nothing_is_begun(tmp_path: Path, tiny_base: Path) -> None:
    rows = [{"prompt": ""}, {"prompt": None}, {"prompt": "7 " * 400}, {"prompt": ""}]
    async with liar() as replica:
        outcome = await loop(tmp_path, tiny_base, replica, prompts=rows)
        assert replica.requests == []
    assert isinstance(outcome.error, ConfigError)
    for words in ("none of its 4 rows", "prompt_empty 2", "prompt_null 1", "prompt_too_long 1"):
        assert words in str(outcome.error)
    assert [meta.key async for meta in outcome.bucket.list("")] == [], "the learner beside it has waited for the data"


@pytest.mark.parametrize(
    ("rows", "template", "words"),
    [
        ([{"prompt": [{"role": "user", "content": "1+1="}]}], False, ("chat_template", "'prompt'")),
        (
            [{"prompt": "1+1="}, {"prompt": [{"role": "user", "content": "1+1="}]}],
            True,
            ("a text in row 0", "a list of messages in row 1"),
        ),
        ([{"prompt": {"role": "user"}}, {"prompt": {}}], True, ("prompt_kind 2",)),
    ],
    ids=["messages without a template", "two kinds", "neither kind"],
)
async def test_prompts_of_the_wrong_kind_end_it_before_the_base_model_is_loaded(
    tmp_path: Path, rows: list[Any], template: bool, words: tuple[str, ...]
) -> None:
    base = make_tiny_base(tmp_path / "base", chat_template=template)
    with structlog.testing.capture_logs() as logs:
        async with liar() as replica:
            outcome = await loop(tmp_path, base, replica, prompts=rows)
    assert isinstance(outcome.error, ConfigError)
    assert all(word in str(outcome.error) for word in words)
    assert not [line for line in logs if line["event"] == "policy_loaded"]


# ---- rewards


async def test_a_reward_that_fails_for_every_group_ends_the_run_and_is_told_once(tmp_path: Path, tiny_base: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        async with liar() as replica:
            outcome = await loop(tmp_path, tiny_base, replica, reward="def reward(completions, **_):\n    return [1.0]\n")
    assert isinstance(outcome.error, NotReady)
    assert "got 1 value, wanted 4" in str(outcome.error)
    drops = await outcome.drops()
    assert drops.pop("reward_length") >= 16, "what is known of the groups is shipped before it ends"
    assert set(drops) <= {"interrupted"}
    assert len([line for line in logs if line["event"] == "reward_failed"]) == 1
    (state,) = await outcome.states()
    assert state.hopeless
    assert "got 1 value, wanted 4" in str(state.ended)


async def test_a_learner_elsewhere_ends_too_when_its_only_generator_found_the_rewards_useless(
    tmp_path: Path, tiny_base: Path
) -> None:
    """Two processes share nothing but the bucket, so the word goes through it."""
    async with liar() as replica:
        outcome = await loop(
            tmp_path, tiny_base, replica, reward="def reward(completions, **_):\n    return 1.0\n", together=False
        )
    assert isinstance(outcome.error, NotReady), "the learner's"
    assert "reward_type in all of the first 16 groups" in str(outcome.error)
    segments = [meta.key async for meta in outcome.bucket.list("ledger")]
    assert segments, "and how the groups ended is kept"


SOMETIMES = """
def reward(prompts, completions, **_):
    if "bad" in str(prompts[0]):
        raise ValueError("bad row")
    return [float(i % 2) for i, _ in enumerate(completions)]
"""


async def test_groups_whose_reward_fails_are_dropped_and_the_others_train(tmp_path: Path, tiny_base: Path) -> None:
    rows = [{"prompt": "good 1"}, {"prompt": "bad 2"}, {"prompt": "good 3"}]
    async with liar() as replica:
        outcome = await loop(
            tmp_path, tiny_base, replica, prompts=rows, reward=SOMETIMES, learner={"steps": 5}, run={"max_lag": 0}
        )
    assert outcome.error is None
    assert (await outcome.drops())["reward_error"] == 2
    assert {group.prompt_row for group in await outcome.groups()} == {0, 2}
    assert all(rollout.reward in (0.0, 1.0) for group in await outcome.groups() for rollout in group.rollouts)
    found = await audit(outcome.bucket)
    assert (found.violations, found.groups.trained) == ([], 5)


FLAT_FIRST = """
def reward(prompts, completions, **_):
    return [1.0 if "flat" in prompts[0] else float(i % 2) for i, _ in enumerate(completions)]
"""


@pytest.mark.parametrize("max_lag", [0, 1])
async def test_groups_without_a_spread_free_their_room_at_once(tmp_path: Path, tiny_base: Path, max_lag: int) -> None:
    rows = [{"prompt": f"flat {n}"} for n in range(200)] + [{"prompt": f"good {n}"} for n in range(20)]
    async with liar() as replica:
        outcome = await loop(
            tmp_path,
            tiny_base,
            replica,
            prompts=rows,
            reward=FLAT_FIRST,
            learner={"steps": 2, "groups_per_step": 4},
            run={"max_lag": max_lag},
        )
    assert outcome.error is None
    ends = Counter(end.reason or end.end for end in await outcome.ends())
    assert (ends["zero_spread"], ends["trained"]) == (200, 8)


async def test_a_run_in_which_no_group_ever_has_a_spread_says_so_and_ends_with_75(tmp_path: Path, tiny_base: Path) -> None:
    async with liar() as replica:
        outcome = await loop(
            tmp_path, tiny_base, replica, prompts=[{"prompt": "flat"}], reward=FLAT_FIRST, learner={"give_up_after": 60}
        )
    assert isinstance(outcome.error, NotReady)
    assert "gave nothing to learn from" in str(outcome.error)
    assert "zero_spread" in str(outcome.error)


# ---- answers


async def test_spoilt_answers_are_asked_again_under_the_same_version_and_trained(tmp_path: Path, tiny_base: Path) -> None:
    """Every way in one run: the first answer of each group is spoilt in the next way."""
    async with liar() as replica:
        asked: set[int] = set()  # seeds: one for each group

        def spoils(number: int) -> Callable[[Any], bool]:
            def when(body: Any) -> bool:
                if not a_group(body) or body["seed"] in asked or len(asked) != number:
                    return False
                asked.add(body["seed"])
                return True

            return when

        for number, (do, arg) in enumerate(SPOILT.values()):
            replica.spoil(do, arg, when=spoils(number))
        replica.spoil("edit", lambda answer: answer["choices"].reverse(), when=a_group)
        # one group after the other, and no two under way: so each way meets one group
        outcome = await loop(
            tmp_path, tiny_base, replica, learner={"steps": len(SPOILT)}, run={"max_lag": 0}, generator={"max_in_flight": 1}
        )
        bodies = [seen.body for seen in replica.requests if a_group(seen.body)]
    assert outcome.error is None
    assert await outcome.drops() == Counter()
    assert len(asked) == len(SPOILT)
    assert Counter(body["seed"] for body in bodies) == dict.fromkeys(asked, 2)
    assert len({(body["seed"], body["model"]) for body in bodies}) == len(SPOILT), "under the version that it began with"
    groups = await outcome.groups()
    wanted = {body["seed"]: [tuple(replica.choose(body, i)["token_ids"]) for i in range(GROUP_SIZE)] for body in bodies}
    for group in groups:
        assert [r.completion_ids for r in group.rollouts] == wanted[group.rollouts[0].seed], "in the order of their index"


@pytest.mark.parametrize(
    "spoil",
    [("edit", set_choice(finish_reason="abort"), a_group), ("raw", lambda data: b"", lambda body: True)],
    ids=["completions only", "everything"],
)
async def test_a_replica_that_never_gives_a_usable_answer_ends_it_with_75_and_is_not_hammered(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch, spoil: tuple[str, Any, Callable[[Any], bool]]
) -> None:
    monkeypatch.setattr("grpod.generator.trust.UNUSABLE_S", 1.0)
    monkeypatch.setattr("grpod.generator.rollouts._PAUSE_S", 0.02)
    async with liar() as replica:
        replica.spoil(spoil[0], spoil[1], when=spoil[2])
        outcome = await loop(tmp_path, tiny_base, replica, reward="def reward(completions, **_):\n    open('seen', 'w')\n")
        requests = replica.count("/v1/completions")
    assert isinstance(outcome.error, NotReady)
    assert outcome.error.exit_code == 75
    assert "gives no usable answer" in str(outcome.error)
    assert requests < 60
    assert not (tmp_path / "seen").exists(), "reward code never sees a stump"
    if spoil[2] is a_group:
        drops = await outcome.drops()
        assert drops["unusable_answer"] >= 8
        assert set(drops) <= {"unusable_answer", "interrupted"}


async def test_a_replica_that_fails_for_a_while_costs_a_few_groups_and_no_more(tmp_path: Path, tiny_base: Path) -> None:
    async with liar() as replica:
        replica.spoil("status", (500, "engine died"), when=a_group, times=12)
        outcome = await loop(tmp_path, tiny_base, replica, learner={"steps": 4})
    assert outcome.error is None
    drops = await outcome.drops()
    assert set(drops) == {"replica_unavailable"}
    assert drops["replica_unavailable"] <= 12 // 4, "one group at a time asks whether it is back"
    assert (await audit(outcome.bucket)).violations == []


async def test_a_server_that_ignores_adapters_makes_no_rollout(tmp_path: Path, tiny_base: Path) -> None:
    async with liar() as replica:
        score = replica.score
        replica.score = lambda model, token_ids: score("base", token_ids)
        outcome = await loop(tmp_path, tiny_base, replica)
    assert isinstance(outcome.error, NotReady)
    assert outcome.error.exit_code == 75
    assert "ignores adapters" in str(outcome.error)
    assert await outcome.groups() == []


async def test_weights_that_every_generator_refuses_are_offered_again_and_then_it_ends_with_75(
    tmp_path: Path, tiny_base: Path
) -> None:
    async with liar() as replica:
        score = replica.score

        def off_for_all_but_the_first(model: str, token_ids: Sequence[int]) -> list[float]:
            by = 0.0 if model in ("base",) or "-v0-" in model else 0.5
            return [value - by for value in score(model, token_ids)]

        replica.score = off_for_all_but_the_first
        with structlog.testing.capture_logs() as logs:
            outcome = await loop(tmp_path, tiny_base, replica, learner={"steps": 9})
    assert isinstance(outcome.error, NotReady)
    assert outcome.error.exit_code == 75
    assert "under 4 version numbers" in str(outcome.error)
    refused = [line["version"] for line in logs if line["event"] == "version_refused"]
    assert len(refused) == len(set(refused)) >= 4, "each once"
    assert {group.policy_version for group in await outcome.groups()} == {0}


# ---- several end tokens


ANSWERS = [
    ([17, 9, 4, 2], "stop"),
    ([17, 9, 4, 0], "stop"),
    ([17, 9, 4, 2], "length"),
    ([17, 9, 4, 5], "length"),
    ([9, 0], "stop"),
    ([17, 0, 9, 2], "stop"),
]


@pytest.mark.parametrize("masked", [True, False])
async def test_a_completion_is_truncated_when_it_ends_with_no_end_token(tmp_path: Path, masked: bool) -> None:
    base = make_tiny_base(tmp_path / "base", eos_ids=(2, 0))

    def choose(body: Any, index: int) -> dict[str, Any]:
        ids, reason = ANSWERS[index % len(ANSWERS)]
        return {"token_ids": ids, "logprobs": [-0.5] * len(ids), "finish_reason": reason}

    async with liar(choose=choose) as replica:
        outcome = await loop(
            tmp_path,
            base,
            replica,
            learner={"steps": 1, "groups_per_step": 1, "loss": {"mask_truncated": masked}},
            generator={"group_size": len(ANSWERS), "sampling": {"max_new_tokens": 4}},
        )
    assert outcome.error is None
    group = (await outcome.groups())[0]
    assert [rollout.finish_reason for rollout in group.rollouts] == ["stop", "stop", "stop", "length", "stop", "stop"]
    assert [set(rollout.loss_mask) for rollout in group.rollouts] == [{1}] * 3 + [{0} if masked else {1}] + [{1}] * 2
    assert (await outcome.metrics())["completions/clipped_ratio"] == pytest.approx(1 / 6)


async def test_generator_metrics_stand_in_the_bucket(tmp_path: Path, tiny_base: Path) -> None:
    async with liar() as replica:
        outcome = await loop(tmp_path, tiny_base, replica, learner={"steps": 3})
    metrics = await outcome.metrics()
    assert metrics["rollout/duration_s"] > 0
    assert metrics["rollout/score_s"] > 0
    assert metrics["rollout/generated_tok_s"] > 0
    assert metrics["rollout/inflight"] >= 0


async def test_token_ids_are_shipped_as_the_engine_gave_them(tmp_path: Path, tiny_base: Path) -> None:
    """Text is for rewards alone: a sampled `h`, `e` is written `he`, and read again it would be another token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(tiny_base))
    h, e, he, half = tokenizer.convert_tokens_to_ids(["h", "e", "he", "Ã"])  # the last: a byte that is no character
    sampled = [(h, e, 2), (half, h, e, 2), (he, 2), (h, e, h, e, 2)]
    assert tokenizer.encode(tokenizer.decode(sampled[0][:2])) == [he] != list(sampled[0][:2])

    def choose(body: Any, index: int) -> dict[str, Any]:
        ids = list(sampled[index % GROUP_SIZE])
        return {"token_ids": ids, "logprobs": [-0.5] * len(ids), "text": "something else"}

    reward = (
        "def reward(completions, completion_ids, **_):\n"
        "    return [float(text == 'he' and len(ids) == 3) for text, ids in zip(completions, completion_ids)]\n"
    )
    async with liar(choose=choose) as replica:
        outcome = await loop(tmp_path, tiny_base, replica, reward=reward, learner={"steps": 1})
    assert outcome.error is None
    group = (await outcome.groups())[0]
    assert [rollout.completion_ids for rollout in group.rollouts] == sampled
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 0.0, 0.0, 0.0], "of what these ids say, and of these ids"
    assert group.prompt_ids == tuple(tokenizer("1+1=")["input_ids"])
