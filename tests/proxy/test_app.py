"""What the proxy says of itself, who may speak to it, and the calls of a stock TRL trainer in their order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from grpod.proxy.app import is_loopback
from tests.fakes import FakeReplica
from tests.proxy.running import adapter, running

pytestmark = pytest.mark.anyio


async def test_the_calls_of_a_stock_trl_trainer(tmp_path: Path) -> None:
    async with (
        FakeReplica(max_loras=6, max_lora_rank=16, max_model_len=2048) as one,
        FakeReplica(max_loras=4, max_lora_rank=8, max_model_len=1024) as two,
        running([one, two]) as proxy,
    ):
        assert (await proxy.get("/health"))[0] == 200
        code, info = await proxy.get("/server_info?config_format=json")
        assert code == 200
        vllm = info["vllm_config"]
        assert vllm["lora_config"] == {"max_loras": 4, "max_lora_rank": 8}
        assert vllm["parallel_config"] == {"data_parallel_size": 1}
        _, models = await proxy.get("/v1/models")
        assert (models["data"][0]["id"], models["data"][0]["max_model_len"]) == ("base", 1024)
        staleness = 2
        for step in range(1, 6):
            name = f"trl-policy-v{step}"
            path = adapter(tmp_path / name, name.encode())
            assert (await proxy.post("/pause?mode=keep"))[0] == 200
            assert (await proxy.load(name, path))[0] == 200
            assert (await proxy.post("/resume"))[0] == 200
            for seed in range(8):
                body = {"model": name, "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": -1}
                body |= {"repetition_penalty": 1.0, "n": 1, "return_token_ids": True, "logprobs": 0, "seed": seed}
                code, answer = await proxy.post("/v1/completions", body)
                assert code == 200
                choice = answer["choices"][0]
                assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"])
            if step > staleness + 1:
                assert (await proxy.unload(f"trl-policy-v{step - staleness - 1}"))[0] == 200
        assert set(one.adapters) == set(two.adapters) == {f"trl-policy-v{step}" for step in (3, 4, 5)}
        assert not one.paused
        assert not two.paused
        assert await proxy.counters() == {"ok": 40}


async def test_health_is_503_until_there_is_a_quorum() -> None:
    async with FakeReplica() as replica, running() as proxy:
        code, error = await proxy.get("/health")
        assert code == 503
        assert "0 of 0" in error["error"]["message"]
        assert (await proxy.status())["state"] == "waiting for replicas"
        assert (await proxy.get("/server_info"))[0] == 503
        code, error = await proxy.complete()
        assert code == 503
        answer = await proxy.post("/grpod/v1/replicas", {"url": replica.url + "/", "owner": "generator"})
        assert answer[0] == 200
        await proxy.all_up(1)
        assert (await proxy.get("/health"))[0] == 200
        assert (await proxy.complete())[0] == 200


async def test_a_member_that_stops_beating_or_leaves_is_gone() -> None:
    async with FakeReplica() as one, FakeReplica() as two, running() as proxy:
        for replica in (one, two):
            await proxy.post("/grpod/v1/replicas", {"url": replica.url, "owner": "generator"})
        await proxy.all_up(2)
        async with proxy.http.delete(proxy.url + "/grpod/v1/replicas", json={"url": one.url}) as answer:
            assert await answer.json() == {"left": True}
        assert one.url not in {r["url"] for r in (await proxy.status())["replicas"]}
        await proxy.until(lambda status: not status["replicas"])


@pytest.mark.parametrize(
    ("document", "code"),
    [
        ({"url": "http://127.0.0.1:1", "owner": "proxy"}, 409),
        ({"url": "ftp://127.0.0.1:1", "owner": "proxy"}, 400),
        ({"url": "http://u:p@127.0.0.1:1", "owner": "proxy"}, 400),
        ({"url": "http://127.0.0.1:99999", "owner": "proxy"}, 400),
        ({"url": 5, "owner": "proxy"}, 400),
        ({"url": "http://127.0.0.1:2", "owner": "me"}, 400),
        ({}, 400),
    ],
)
async def test_who_may_not_register(document: Any, code: int) -> None:
    async with running() as proxy:
        assert (await proxy.post("/grpod/v1/replicas", {"url": "http://127.0.0.1:1", "owner": "generator"}))[0] == 200
        assert (await proxy.post("/grpod/v1/replicas", document))[0] == code


async def test_a_token_is_asked_of_everybody_and_not_passed_on(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    async with FakeReplica() as one, running([one], wait=False, token_file="token", folder=tmp_path) as proxy:
        right = {"Authorization": "Bearer s3cret"}
        for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Basic s3cret"}, {"Authorization": "Bearer é"}):
            for path in ("/v1/models", "/grpod/v1/status", "/metrics", "/"):
                assert (await proxy.get(path, headers=headers))[0] == 401, (headers, path)
        while (await proxy.get("/health"))[0] != 200:  # open: it says only up or not
            pass
        assert (await proxy.post("/v1/completions", {"model": "base", "prompt": [1]}, headers=right))[0] == 200
        (seen,) = [seen for seen in one.requests if seen.path == "/v1/completions"]
        assert "authorization" not in seen.headers


async def test_without_a_token_of_its_own_the_proxy_passes_the_clients_on() -> None:
    async with FakeReplica() as one, running([one]) as proxy:
        await proxy.post("/v1/completions", {"model": "base", "prompt": [1]}, headers={"Authorization": "Bearer theirs"})
        (seen,) = [seen for seen in one.requests if seen.path == "/v1/completions"]
        assert seen.headers["authorization"] == "Bearer theirs"


async def test_metrics_status_and_page_tell_of_the_replicas(tmp_path: Path) -> None:
    async with FakeReplica() as one, FakeReplica() as two, running([one, two]) as proxy:
        await proxy.load("v1", adapter(tmp_path / "v1"))
        await proxy.complete("v1")
        status = await proxy.until(lambda status: len(status["adapters"][0]["held_by"]) == 2)
        assert status["adapters"][0]["attested"] is False
        assert status["quorum"] == {"need": 2, "up": 2, "of": 2}
        code, text = await proxy.get("/metrics")
        assert code == 200
        samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert samples["grpod_proxy_requests_total", "ok"] == 1
        assert samples["grpod_proxy_broadcasts_total", "load", "ok"] == 1
        assert samples["grpod_proxy_replica_up", one.url] == 1
        assert samples["grpod_proxy_replica_adapters", two.url] == 1
        assert samples[("grpod_proxy_adapters",)] == 1
        code, page = await proxy.get("/")
        assert code == 200
        assert one.url in page


async def test_paths_of_our_own_that_do_not_exist_are_404(tmp_path: Path) -> None:
    async with FakeReplica() as one, running([one]) as proxy:
        before = len(one.requests)
        assert (await proxy.get("/grpod/v1/nothing"))[0] == 404
        assert not [seen for seen in one.requests[before:] if seen.path.startswith("/grpod")]


def test_loopback_is_known_in_all_its_spellings() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1", "localhost"]))
    assert not any(map(is_loopback, ["", "0.0.0.0", "10.0.0.1", "::ffff:10.0.0.1", "::", "example.org"]))
