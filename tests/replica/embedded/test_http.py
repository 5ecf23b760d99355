"""The embedded replica as its clients meet it: vLLM's dialect, over the wire, from a process of its own."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest

from grpod.replica.client import CompletionRequest, Refused, ReplicaClient, Unavailable, UnknownAdapter
from tests.replica.embedded.made import make_adapter

pytestmark = pytest.mark.anyio
PROMPT = [5, 6, 7, 8]
LONG = {"model": "base", "prompt": PROMPT, "n": 4, "max_tokens": 7900, "ignore_eos": True, "return_token_ids": True}
"""Work for a minute, if nobody stops it."""


@pytest.fixture(scope="module")
def adapters(two_ends: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed in (1, 2, 3):
        make_adapter(two_ends, folder / f"v{seed}", seed=seed)
    make_adapter(two_ends, folder / "rank16", seed=4, rank=16)
    return folder


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[tuple[ReplicaClient, aiohttp.ClientSession]]:
    async with ReplicaClient(url) as client, aiohttp.ClientSession(url) as http:
        yield client, http


async def post(http: aiohttp.ClientSession, path: str, body: object) -> tuple[int, Any]:
    async with http.post(path, data=json.dumps(body)) as response:
        text = await response.text()
        return response.status, json.loads(text) if text.startswith("{") else text


async def metric(http: aiohttp.ClientSession, name: str) -> int:
    async with http.get("/metrics") as response:
        (line,) = [line for line in (await response.text()).splitlines() if line.startswith(f"vllm:{name}{{")]
        return int(line.split()[-1])


async def until(http: aiohttp.ClientSession, name: str, wanted: int) -> None:
    for _ in range(3000):
        if await metric(http, name) == wanted:
            return
        await anyio.sleep(0.01)
    raise AssertionError(f"{name} did not come to {wanted}")


def request(model: str = "base", **changes: Any) -> CompletionRequest:
    return CompletionRequest(**{"model": model, "prompt_ids": PROMPT, "n": 4, "max_tokens": 6, "seed": 1, **changes})


async def test_it_tells_what_it_is(replica_url: str):
    async with connected(replica_url) as (client, _):
        assert await client.health()
        assert await client.models() == ["base"]
        info = await client.server_info()
        assert (info.max_loras, info.max_lora_rank, info.data_parallel_size) == (2, 8, 1)
        assert (info.dtype, info.max_model_len, info.logprobs_mode) == ("float32", 8000, "processed_logprobs")


async def test_completions_agree_with_scores_and_repeat_by_seed(replica_url: str, adapters: Path):
    async with connected(replica_url) as (client, _):
        await client.load_adapter("v1", str(adapters / "v1"))
        for model in ("base", "v1"):
            answer = await client.complete(request(model))
            assert answer == await client.complete(request(model))
            assert len({choice.token_ids for choice in answer.choices}) == 4
            for choice in answer.choices:
                score = await client.score(model, [*PROMPT, *choice.token_ids])
                assert score[len(PROMPT) - 1 :] == pytest.approx(choice.logprobs, abs=1e-4)
        base, adapted = [await client.score(model, PROMPT) for model in ("base", "v1")]
        assert max(abs(a - b) for a, b in zip(base, adapted, strict=True)) > 0.1
        await client.unload_adapter("v1")


async def test_both_end_tokens_end_a_completion_and_are_returned(replica_url: str):
    async with connected(replica_url) as (client, _):
        answer = await client.complete(request(n=256, max_tokens=100, temperature=1.5))
        ended = [choice for choice in answer.choices if choice.finish_reason == "stop"]
        assert {choice.token_ids[-1] for choice in ended} == {0, 2}
        assert not any({0, 2} & set(choice.token_ids[:-1]) for choice in answer.choices)
        assert all(len(choice.logprobs) == len(choice.token_ids) for choice in answer.choices)
        assert not any(choice.truncated({0, 2}) for choice in ended)


async def test_adapters_are_loaded_once_and_never_in_place_of_others(replica_url: str, adapters: Path, tmp_path: Path):
    async with connected(replica_url) as (client, http):
        await client.load_adapter("v1", str(adapters / "v1"))
        with pytest.raises(Refused, match="has already been loaded"):
            await client.load_adapter("v1", str(adapters / "v2"))
        with pytest.raises(Refused, match="has already been loaded"):
            await client.load_adapter("base", str(adapters / "v2"))
        with pytest.raises(Refused, match="No adapter found") as missing:
            await client.load_adapter("v2", str(tmp_path / "missing"))
        assert missing.value.status == 404
        with pytest.raises(Unavailable, match="rank 16 is greater") as refused:
            await client.load_adapter("v2", str(adapters / "rank16"))
        assert refused.value.status == 500
        before = await client.score("v1", PROMPT)
        await client.load_adapter("v2", str(adapters / "v2"))
        with pytest.raises(Refused, match="max_loras is 2"):
            await client.load_adapter("v3", str(adapters / "v3"))
        assert await client.models() == ["base", "v1", "v2"]
        assert await client.score("v1", PROMPT) == before
        body = {"lora_name": "v1", "lora_path": str(adapters / "v3"), "load_inplace": True}
        status, text = await post(http, "/v1/load_lora_adapter", body)
        assert (status, text[:7]) == (200, "Success")
        assert await client.score("v1", PROMPT) != before
        for name in ("v1", "v2"):
            await client.unload_adapter(name)
        with pytest.raises(UnknownAdapter):
            await client.unload_adapter("v1")
        with pytest.raises(UnknownAdapter, match="The model `v1` does not exist"):
            await client.complete(request("v1"))


async def test_a_request_finishes_under_the_adapter_that_it_began_with(replica_url: str, adapters: Path, tmp_path: Path):
    copied = shutil.copytree(adapters / "v1", tmp_path / "v1")
    async with connected(replica_url) as (client, http):
        await client.load_adapter("v1", str(copied))
        expected = await client.complete(request("v1", n=2, max_tokens=50))
        await client.pause("keep")
        answers = []

        async def ask() -> None:
            answers.append(await client.complete(request("v1", n=2, max_tokens=50)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(http, "num_requests_waiting", 2)
            await client.unload_adapter("v1")
            shutil.rmtree(copied)
            await client.resume()
        assert answers == [expected]


async def test_requests_that_cannot_be_right_are_refused_with_words(replica_url: str):
    async with connected(replica_url) as (client, http):
        for change, words in {
            '{"max_tokens": 7997}': "maximum context length is 8000 tokens",
            '{"prompt": []}': "prompt must be",
            '{"prompt": [[]]}': "cannot be empty",
            '{"prompt": [5, 512]}': "Token id 512 is out of vocabulary",
            '{"prompt": [5, -1]}': "Token id -1 is out of vocabulary",
            '{"prompt": [5, true]}': "prompt must be",
            '{"n": 0}': "n must be an integer of at least 1",
            '{"n": 1.5}': "n must be an integer",
            '{"temperature": -1}': "temperature must be",
            '{"temperature": NaN}': "temperature must be",
            '{"top_p": 0}': "top_p must be in",
            '{"top_k": -2}': "top_k must be",
            '{"logprobs": 5}': "logprobs must be 0",
            '{"repetition_penalty": 1.1}': "repetition_penalty=1.1 is not supported",
            '{"model": 7}': "model must be a name",
        }.items():
            status, answer = await post(http, "/v1/completions", {"model": "base", "prompt": PROMPT, **json.loads(change)})
            assert (status, answer["error"]["code"]) == (400, 400), change
            assert words in answer["error"]["message"]
        async with http.post("/v1/completions", data=b"{cut") as response:
            assert response.status == 400
        async with http.get("/v1/completions") as response:
            assert response.status == 405
        neutral = {"repetition_penalty": 1.0, "min_p": 0, "stop": None, "top_k": -1, "best_of": 1, "unheard_of": 3}
        status, _ = await post(http, "/v1/completions", {"model": "base", "prompt": PROMPT, "max_tokens": 1, **neutral})
        assert status == 200
        assert await client.health()


async def test_texts_and_several_prompts_are_answered_in_order(replica_url: str):
    async with connected(replica_url) as (_, http):
        options = {"model": "base", "n": 2, "max_tokens": 3, "seed": 5, "temperature": 0, "return_token_ids": True}
        status, both = await post(http, "/v1/completions", {**options, "prompt": [PROMPT, [9, 9]]})
        assert status == 200
        assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
        assert [choice["prompt_token_ids"] for choice in both["choices"]] == [PROMPT, PROMPT, [9, 9], [9, 9]]
        assert both["usage"]["prompt_tokens"] == 6
        for text in ("What is 1 + 2", ["What is", "1 + 2"]):
            status, answer = await post(http, "/v1/completions", {**options, "prompt": text})
            assert status == 200
            assert all(choice["prompt_token_ids"] for choice in answer["choices"])


async def test_a_stream_tells_the_same_as_a_whole_answer(replica_url: str):
    async with connected(replica_url) as (_, http):
        body = {
            "model": "base",
            "prompt": "1 + 2",
            "n": 3,
            "max_tokens": 12,
            "seed": 3,
            "logprobs": 0,
            "return_token_ids": True,
        }
        _, whole = await post(http, "/v1/completions", body)
        told: dict[int, dict[str, Any]] = {at: {"text": "", "token_ids": [], "logprobs": [], "finish": None} for at in range(3)}
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with http.post("/v1/completions", data=json.dumps(streamed)) as response:
            assert response.content_type == "text/event-stream"
            events = [line[6:] async for line in response.content if line.startswith(b"data: ")]
        assert events[-1].strip() == b"[DONE]"
        assert json.loads(events[-2])["usage"] == whole["usage"]
        for event in map(json.loads, events[:-2]):
            (delta,) = event["choices"]
            at = told[delta["index"]]
            assert at["finish"] is None
            at["text"] += delta["text"]
            at["token_ids"] += delta["token_ids"]
            at["logprobs"] += delta["logprobs"]["token_logprobs"]
            at["finish"] = delta["finish_reason"]
        for choice in whole["choices"]:
            at = told[choice["index"]]
            assert (at["text"], at["token_ids"], at["finish"]) == (choice["text"], choice["token_ids"], choice["finish_reason"])
            assert at["logprobs"] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)


async def test_a_client_that_leaves_takes_its_work_along(replica_url: str):
    async with connected(replica_url) as (_, http):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(post, http, "/v1/completions", LONG)
            await until(http, "num_requests_running", 4)
            tasks.cancel_scope.cancel()
        await until(http, "num_requests_running", 0)
        async with http.post("/v1/completions", data=json.dumps({**LONG, "stream": True})) as response:
            await response.content.readline()
            await until(http, "num_requests_running", 4)
            response.close()
        await until(http, "num_requests_running", 0)


async def test_pause_abort_ends_what_runs_and_queues_what_comes(replica_url: str):
    async with connected(replica_url) as (client, http):
        answers: list[Any] = []

        async def ask(body: dict[str, Any]) -> None:
            answers.append((await post(http, "/v1/completions", body))[1])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, LONG)
            await until(http, "num_requests_running", 4)
            await client.pause("abort")
        reasons = [choice["finish_reason"] for choice in answers[0]["choices"]]
        assert reasons == ["abort"] * 4
        assert all(choice["token_ids"] for choice in answers[0]["choices"])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, request().body())
            await until(http, "num_requests_waiting", request().n)
            assert len(answers) == 1
            await client.resume()
        assert all(choice["finish_reason"] != "abort" for choice in answers[1]["choices"])


@pytest.mark.parametrize("mode", ["wait", "keep"])
async def test_pause_wait_and_keep_lose_nothing(replica_url: str, mode: Any):
    async with connected(replica_url) as (client, http):
        body = {**LONG, "max_tokens": 300, "seed": 11}
        _, expected = await post(http, "/v1/completions", body)
        answers = []

        async def ask() -> None:
            answers.append((await post(http, "/v1/completions", body))[1])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(http, "num_requests_running", 4)
            await client.pause(mode)
            assert await metric(http, "num_requests_running") == (0 if mode == "wait" else 4)
            await client.resume()
        texts = [[choice["text"] for choice in answer["choices"]] for answer in (expected, answers[0])]
        assert texts[0] == texts[1]


async def test_many_at_once_are_all_answered_exactly(replica_url: str, adapters: Path):
    async with connected(replica_url) as (client, http):
        await client.load_adapter("v1", str(adapters / "v1"))
        before = await metric(http, "generation_tokens_total")
        total = 0

        async def ask(at: int) -> None:
            nonlocal total
            asked = request(["base", "v1"][at % 2], prompt_ids=list(range(3, 4 + at % 17)), n=3, seed=at, temperature=0.7)
            answer = await client.complete(asked)
            for choice in answer.choices:
                total += len(choice.token_ids)
                assert all(math.isfinite(logprob) for logprob in choice.logprobs)

        async with anyio.create_task_group() as tasks:
            for at in range(60):
                tasks.start_soon(ask, at)
        assert await metric(http, "generation_tokens_total") - before == total
        await client.unload_adapter("v1")
