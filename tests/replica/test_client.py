from __future__ import annotations

import json

import anyio
import pytest

from grpod.replica.client import (
    CompletionRequest,
    Refused,
    ReplicaClient,
    Timeouts,
    Unavailable,
    UnknownAdapter,
    UnusableAnswer,
)
from tests.fakes import FakeReplica, flat_score

pytestmark = pytest.mark.anyio
REQUEST = CompletionRequest(model="base", prompt_ids=[5, 6, 7], n=8, max_tokens=6, seed=1)


async def test_a_completion_is_asked_in_vllms_dialect_and_comes_back_by_index():
    async with FakeReplica() as replica, ReplicaClient(replica.url + "/") as client:
        replica.spoil("edit", lambda answer: answer["choices"].reverse())
        answer = await client.complete(REQUEST)
        assert replica.requests[0].body == {
            "model": "base",
            "prompt": [5, 6, 7],
            "n": 8,
            "max_tokens": 6,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "seed": 1,
            "stop_token_ids": [],
            "logprobs": 0,
            "return_token_ids": True,
        }
        assert [choice.index for choice in answer.choices] == list(range(8))
        expected = [replica.choose(REQUEST.body(), index)["token_ids"] for index in range(8)]
        assert [list(choice.token_ids) for choice in answer.choices] == expected


async def test_prompt_logprobs_are_read_as_a_score():
    async with FakeReplica() as replica, ReplicaClient(replica.url) as client:
        assert await client.score("base", [9, 8, 7, 9]) == flat_score("base", [9, 8, 7, 9])
        body = replica.requests[0].body
        assert (body["prompt_logprobs"], body["max_tokens"], body["temperature"]) == (0, 1, 1.0)
        replica.spoil("edit", lambda answer: answer["choices"][0]["prompt_logprobs"].pop())
        with pytest.raises(UnusableAnswer, match="logprobs_length"):
            await client.score("base", [9, 8, 7, 9])


async def test_vllms_way_to_say_that_a_logprob_is_no_number_is_an_unusable_answer():
    async with FakeReplica() as replica, ReplicaClient(replica.url) as client:
        replica.spoil("status", (400, '{"error": {"message": "Out of range float values are not JSON compliant"}}'))
        for ask in (lambda: client.complete(REQUEST), lambda: client.score("base", [9, 8, 7])):
            with pytest.raises(UnusableAnswer, match="logprobs_not_finite"):
                await ask()


async def test_the_token_is_read_anew_for_each_request_and_follows_no_redirect():
    tokens = iter(["one", "two", None])
    async with FakeReplica() as replica, FakeReplica() as elsewhere:
        async with ReplicaClient(replica.url, token=lambda: next(tokens)) as client:
            replica.spoil("redirect", elsewhere.url + "/v1/models", path="/v1/models", first=2, times=1)
            assert await client.models() == ["base"]
            with pytest.raises(Refused, match="redirects are not followed"):
                await client.models()
            await client.models()
        assert [seen.headers.get("authorization") for seen in replica.requests] == ["Bearer one", "Bearer two", None]
        assert elsewhere.requests == []


@pytest.mark.parametrize("spoiling", ["refuse", "lose"])
async def test_a_reset_before_the_first_byte_is_sent_once_more_on_a_fresh_connection(spoiling: str):
    async with FakeReplica() as replica, ReplicaClient(replica.url) as client:
        await client.complete(REQUEST)
        replica.spoil(spoiling, times=1)
        assert len((await client.complete(REQUEST)).choices) == 8
        assert replica.count("/v1/completions") == 3
        replica.spoil(spoiling)
        with pytest.raises(Unavailable):
            await client.complete(REQUEST)
        assert replica.count("/v1/completions") == 5


async def test_nobody_there_is_unavailable_at_once():
    replica = FakeReplica()
    await replica.start()
    await replica.die()
    async with ReplicaClient(replica.url) as client:
        assert not await client.health()
        with pytest.raises(Unavailable) as caught:
            await client.complete(REQUEST)
        assert caught.value.status is None


@pytest.mark.parametrize(
    "spoiling", [("cut", 40), ("chunk_cut", 40), ("status", (502, "bad gateway")), ("status", (429, "later"))]
)
async def test_what_may_be_tried_again_is_unavailable(spoiling: tuple[str, object]):
    async with FakeReplica() as replica, ReplicaClient(replica.url) as client:
        replica.spoil(*spoiling)
        with pytest.raises(Unavailable):
            await client.complete(REQUEST)
        assert replica.count("/v1/completions") == 1


async def test_a_silent_replica_is_given_up_in_the_end():
    async with FakeReplica() as replica, ReplicaClient(replica.url, timeouts=Timeouts(completion=0.1, health=0.1)) as client:
        replica.spoil("hang", path=".*")
        with pytest.raises(Unavailable, match="not answered in time"):
            await client.complete(REQUEST)
        assert not await client.health()


async def test_a_request_whose_client_is_left_is_unavailable():
    """A group outlives the replica's incarnation that it was sent to."""
    told: list[Unavailable] = []

    async def ask() -> None:
        with pytest.raises(Unavailable) as error:
            await client.complete(REQUEST)
        told.append(error.value)

    async with FakeReplica() as replica, anyio.create_task_group() as tasks:
        replica.spoil("hang")
        async with ReplicaClient(replica.url) as client:
            tasks.start_soon(ask)
            await replica.until(lambda r: r.count("/v1/completions") == 1)
        await ask()
    assert len(told) == 2
    assert replica.count("/v1/completions") == 1


async def test_refusals_carry_the_servers_words_and_an_unknown_name_has_its_own_class():
    async with FakeReplica() as replica, ReplicaClient(replica.url) as client:
        replica.spoil("status", (400, json.dumps({"error": {"message": "too long"}})), times=1)
        with pytest.raises(Refused, match="too long") as caught:
            await client.complete(REQUEST)
        assert (type(caught.value), caught.value.status, caught.value.message) == (Refused, 400, "too long")
        with pytest.raises(UnknownAdapter, match="v9"):
            await client.complete(CompletionRequest(model="v9", prompt_ids=[1], n=1, max_tokens=1))
        with pytest.raises(UnknownAdapter, match="v9"):
            await client.unload_adapter("v9")
        replica.spoil("status", (404, "no such route"))
        with pytest.raises(Refused) as caught:
            await client.complete(REQUEST)
        assert type(caught.value) is Refused


async def test_adapters_come_and_go():
    async with FakeReplica() as replica, ReplicaClient(replica.url) as client:
        await client.load_adapter("v1", "/adapters/v1")
        assert await client.models() == ["base", "v1"]
        with pytest.raises(Refused, match="already been loaded"):
            await client.load_adapter("v1", "/adapters/v1")
        await client.unload_adapter("v1")
        assert replica.adapters == {}


async def test_a_load_whose_answer_was_lost_is_loaded_anew_and_an_unload_is_done():
    async with FakeReplica(adapters={"v1": "/other/files"}) as replica, ReplicaClient(replica.url) as client:
        replica.spoil("lose", path="/v1/load_lora_adapter", times=1)
        await client.load_adapter("v1", "/adapters/v1")
        assert replica.adapters == {"v1": "/adapters/v1"}
        replica.spoil("lose", path="/v1/unload_lora_adapter", first=1, times=1)
        await client.unload_adapter("v1")
        assert replica.adapters == {}


async def test_server_info_is_told_in_plain_numbers():
    async with FakeReplica(max_loras=3, max_lora_rank=16, max_model_len=77) as replica, ReplicaClient(replica.url) as client:
        info = await client.server_info()
        assert (info.max_loras, info.max_lora_rank, info.max_model_len) == (3, 16, 77)
        assert (info.data_parallel_size, info.dtype, info.logprobs_mode) == (1, "float32", "processed_logprobs")
        await client.pause("keep")
        assert replica.paused
        assert replica.requests[-1].query == "mode=keep"
        await client.resume()
        assert not replica.paused


async def test_control_calls_pass_three_hundred_waiting_completions():
    """A pool of 100 connections would deadlock: the load waits for the completions, these for the load."""
    async with FakeReplica() as replica, ReplicaClient(replica.url) as client, anyio.create_task_group() as tasks:
        replica.spoil("hang")
        for _ in range(300):
            tasks.start_soon(client.complete, REQUEST)
        with anyio.fail_after(30):
            await replica.until(lambda r: r.open_now == 300)
            await client.load_adapter("v1", "/adapters/v1")
            await client.resume()
        assert replica.adapters == {"v1": "/adapters/v1"}
        tasks.cancel_scope.cancel()


async def test_a_cancelled_completion_closes_its_connection():
    async with FakeReplica() as replica, ReplicaClient(replica.url) as client:
        replica.spoil("hang")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.complete, REQUEST)
            await replica.until(lambda r: r.open_now == 1)
            tasks.cancel_scope.cancel()
        await replica.until(lambda r: r.gone == 1)
