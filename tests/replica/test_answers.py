"""Status 200 and no completion: each spoiling has one word, and whole answers pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from grpod.replica.answers import Choice, CompletionRequest, parse_completion, parse_score
from grpod.replica.client import ReplicaClient, UnusableAnswer
from tests.fakes import FakeReplica

PROMPT = [5, 6, 7]
REQUEST = CompletionRequest(model="v3", prompt_ids=PROMPT, n=8, max_tokens=4)


def whole() -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "text": "abcd",
            "finish_reason": "length",
            "token_ids": [17, 9, 4, 10 + index],
            "prompt_token_ids": PROMPT,
            "logprobs": {"token_logprobs": [-0.5, -1, -2.25, 0.0]},
        }
        for index in range(8)
    ]
    return {"model": "v3", "choices": choices}


def in_two(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda answer: [answer["choices"][index].update(changes) for index in (2, 5)]


def logprobs(*values: float | None) -> Callable[[dict[str, Any]], object]:
    return in_two(logprobs={"token_logprobs": list(values)})


EDITS: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "aborted with part of the tokens": (
        "abort",
        in_two(finish_reason="abort", token_ids=[17], logprobs={"token_logprobs": [-0.5]}),
    ),
    "no finish reason": ("finish_reason", in_two(finish_reason=None)),
    "an unknown finish reason": ("finish_reason", in_two(finish_reason="error")),
    "a null log-prob": ("logprobs_null", logprobs(-1.0, None, -1.0, -1.0)),
    "a NaN": ("logprobs_not_finite", logprobs(-1.0, float("nan"), -1.0, -1.0)),
    "minus infinity": ("logprobs_not_finite", logprobs(-1.0, -1.0, -1.0, float("-inf"))),
    "an integer that no float holds": ("logprobs_not_finite", logprobs(-1.0, -1.0, -1.0, -(10**400))),
    "above zero": ("logprobs_positive", logprobs(-1.0, 0.7, -1.0, -1.0)),
    "one log-prob more than tokens": ("logprobs_length", logprobs(-1.0, -1.0, -1.0, -1.0, -1.0)),
    "no log-probs": ("logprobs_missing", in_two(logprobs=None)),
    "empty log-probs": ("logprobs_missing", in_two(logprobs={})),
    "no tokens but log-probs": ("no_tokens", in_two(token_ids=[])),
    "tokens that are none": ("no_tokens", in_two(token_ids=[17, 9, True, 4])),
    "more tokens than allowed": (
        "too_many_tokens",
        in_two(token_ids=[17, 9, 4, 2, 2], logprobs={"token_logprobs": [-1.0] * 5}),
    ),
    "seven choices for eight": ("choices_missing", lambda answer: answer["choices"].pop()),
    "nine choices for eight": ("choices_missing", lambda answer: answer["choices"].append({"index": 8})),
    "choices is null": ("choices_missing", lambda answer: answer.update(choices=None)),
    "an index that cannot be one": ("choices_missing", in_two(index=[])),
    "one index twice": ("index_twice", lambda answer: answer["choices"][7].update(index=0)),
    "the base answered": ("model", lambda answer: answer.update(model="base")),
    "another prompt": ("prompt_ids", in_two(prompt_token_ids=[5, 6])),
    "no prompt at all": ("prompt_ids", lambda answer: [choice.pop("prompt_token_ids") for choice in answer["choices"]]),
    "an error with status 200": ("error_body", lambda answer: answer.update(error={"message": "engine died"})),
}
BODIES: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "cut JSON": ("json", lambda data: data[:-20]),
    "a list": ("json", lambda data: b"[1]"),
    "nested beyond reason": ("json", lambda data: b"[" * 100_000),
    "no text": ("json", lambda data: b"\xff\xfe"),
    "empty body": ("empty", lambda data: b""),
}


def test_a_whole_answer_passes():
    answer = parse_completion(json.dumps(whole()).encode(), REQUEST)
    assert [choice.token_ids[-1] for choice in answer.choices] == [10, 11, 12, 13, 14, 15, 16, 17]
    assert answer.choices[0].logprobs == (-0.5, -1.0, -2.25, 0.0)


@pytest.mark.parametrize("what", EDITS)
def test_a_spoilt_answer_is_refused_by_name(what: str):
    reason, edit = EDITS[what]
    answer = whole()
    edit(answer)
    with pytest.raises(UnusableAnswer) as caught:
        parse_completion(json.dumps(answer).encode(), REQUEST)
    assert caught.value.reason == reason


@pytest.mark.parametrize("what", BODIES)
def test_a_spoilt_body_is_refused_by_name(what: str):
    reason, spoil = BODIES[what]
    with pytest.raises(UnusableAnswer) as caught:
        parse_completion(spoil(json.dumps(whole()).encode()), REQUEST)
    assert caught.value.reason == reason


@pytest.mark.anyio
async def test_the_client_refuses_them_over_the_wire_too():
    def choose(body: Any, index: int) -> dict[str, Any]:
        return {"token_ids": [17, 9, 4, 10 + index], "logprobs": [-1.0] * 4}

    async with FakeReplica(adapters={"v3": ""}, choose=choose) as replica, ReplicaClient(replica.url) as client:
        for spoiling, cases in (("edit", EDITS), ("raw", BODIES)):
            for what, (reason, spoil) in cases.items():
                replica.spoilings.clear()
                replica.spoil(spoiling, spoil)
                with pytest.raises(UnusableAnswer) as caught:
                    await client.complete(REQUEST)
                assert (what, caught.value.reason) == (what, reason)


def test_noise_above_zero_is_clamped():
    answer = whole()
    logprobs(0.0009, -1.0, -1.0, 0.0)(answer)
    assert parse_completion(json.dumps(answer).encode(), REQUEST).choices[2].logprobs == (0.0, -1.0, -1.0, 0.0)


def test_only_a_completion_without_any_end_token_is_truncated():
    group = [
        ([17, 9, 4, 2], "stop"),
        ([17, 9, 4, 0], "stop"),
        ([17, 9, 4, 2], "length"),
        ([17, 9, 4, 5], "length"),
        ([9, 0], "stop"),
        ([17, 0, 9, 2], "stop"),
    ]
    answer = {"model": "v3", "choices": []}
    for index, (ids, reason) in enumerate(group):
        log_probs = {"token_logprobs": [-1.0] * len(ids)}
        choice = {"index": index, "token_ids": ids, "finish_reason": reason, "prompt_token_ids": PROMPT, "logprobs": log_probs}
        answer["choices"].append(choice)
    request = CompletionRequest(model="v3", prompt_ids=PROMPT, n=6, max_tokens=4)
    choices: tuple[Choice, ...] = parse_completion(json.dumps(answer).encode(), request).choices
    assert [list(choice.token_ids) for choice in choices] == [ids for ids, _ in group]
    assert [choice.truncated({2, 0}) for choice in choices] == [False, False, False, True, False, False]


def test_a_score_is_read_at_the_prompts_own_tokens():
    entries = [None, {"6": {"logprob": -1.5, "rank": 3}, "9": {"logprob": -0.1, "rank": 1}}, {"7": {"logprob": 0.0005}}]
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "prompt_token_ids": PROMPT, "prompt_logprobs": entries}
    answer = {"model": "v3", "choices": [choice]}

    def score() -> list[float]:
        return parse_score(json.dumps(answer).encode(), model="v3", token_ids=PROMPT)

    assert score() == [-1.5, 0.0]
    for reason, spoilt in {
        "logprobs_length": entries[:2],
        "logprobs_missing": [None, {"9": {"logprob": -0.1}}, entries[2]],
        "logprobs_not_finite": [None, {"6": {"logprob": float("nan")}}, entries[2]],
        "logprobs_positive": [None, {"6": {"logprob": 0.5}}, entries[2]],
        "logprobs_null": [None, {"6": {"logprob": None}}, entries[2]],
    }.items():
        choice["prompt_logprobs"] = spoilt
        with pytest.raises(UnusableAnswer) as caught:
            score()
        assert caught.value.reason == reason
    choice.update(prompt_logprobs=None, finish_reason="abort")
    with pytest.raises(UnusableAnswer, match="abort"):
        score()
