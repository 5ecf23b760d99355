"""A server that cannot serve the run is told which flag is wrong, what it is, and what is needed: all of it at once."""

from __future__ import annotations

from typing import Any

import pytest

from grpod.config import Config
from grpod.errors import NotReady
from grpod.generator import settings
from grpod.generator.settings import base_name, unfit
from grpod.replica.client import ReplicaClient, ServerInfo
from tests.fakes import FakeReplica

GOOD: dict[str, Any] = {
    "max_loras": 6,
    "max_cpu_loras": 8,
    "max_lora_rank": 16,
    "data_parallel_size": 1,
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "logprobs_mode": "processed_logprobs",
}


def config(engine: str = "remote", dtype: str = "bfloat16", max_lag: int = 4) -> Config:
    generator = {"engine": engine, "remote": {"url": "http://127.0.0.1:1"}}
    return Config.model_validate(
        {
            "generator": generator,
            "model": {"dtype": dtype},
            "lora": {"rank": 9},
            "run": {"max_lag": max_lag, "startup_timeout_s": 0.5},
        }
    )


def wrong(*, models: tuple[str, ...] = ("base",), wanted: str = "bfloat16", **changes: Any) -> list[str]:
    return unfit(ServerInfo(**{**GOOD, **changes}), models, config(dtype=wanted))


def test_a_server_that_fits_is_fine() -> None:
    assert wrong() == []
    assert wrong(max_loras=9, max_lora_rank=64, max_model_len=4096) == []


def test_what_a_server_does_not_tell_is_not_held_against_it() -> None:
    assert wrong(max_cpu_loras=None, dtype="", max_model_len=None, logprobs_mode="") == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_loras": 0}, "LoRA is off: it needs --enable-lora --max-loras 6 --max-lora-rank 16"),
        ({"max_loras": 1}, "--max-loras is 1, run.max_lag 4 needs 6"),
        ({"max_cpu_loras": 5}, "--max-cpu-loras is 5, run.max_lag 4 needs 6"),
        ({"max_lora_rank": 8}, "--max-lora-rank is 8, lora.rank 9 needs 16"),
        ({"dtype": "float16"}, "--dtype is float16, model.dtype is bfloat16"),
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode is raw_logprobs, processed_logprobs is needed"),
        ({"max_model_len": 1024}, "--max-model-len is 1024, model.max_model_len is 2048"),
        ({"data_parallel_size": 2}, "--data-parallel-size is 2: only one of them would be attested; start one server for each"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_setting_is_named_with_its_value_and_what_is_needed(changes: dict[str, Any], message: str) -> None:
    assert wrong(**changes) == [message]


def test_all_that_is_wrong_comes_at_once() -> None:
    found = wrong(max_loras=1, max_lora_rank=1, dtype="float32", logprobs_mode="raw_logprobs", models=())
    assert [message.split(" is ")[0] for message in found] == [
        "it lists no model",
        "--max-loras",
        "--max-lora-rank",
        "--dtype",
        "--logprobs-mode",
    ]


def test_any_dtype_will_do_where_the_config_leaves_it_open() -> None:
    assert wrong(wanted="auto") == []


# ---- of a server that runs


async def ask(replica: FakeReplica, engine: str = "remote") -> str:
    async with ReplicaClient(replica.url) as client:
        return await base_name(client, config(engine=engine, dtype="float32", max_lag=2))


@pytest.mark.anyio
async def test_the_name_of_the_base_is_the_servers_own_where_somebody_else_has_started_it() -> None:
    async with FakeReplica(base="Qwen/Qwen2.5-Math-1.5B", max_lora_rank=16, max_model_len=2048) as replica:
        assert await ask(replica) == "Qwen/Qwen2.5-Math-1.5B"
        assert await ask(replica, "vllm") == "base"


@pytest.mark.anyio
async def test_what_is_wrong_names_the_replica() -> None:
    async with FakeReplica(max_loras=1, max_lora_rank=16, max_model_len=2048) as replica:
        with pytest.raises(NotReady) as caught:
            await ask(replica)
    words = "cannot serve this run: --max-loras is 1, run.max_lag 2 needs 4"
    assert str(caught.value) == f"replica {replica.url} {words}"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("status", "words"),
    [
        ((401, '{"error": "Unauthorized"}'), "Unauthorized; its token is wrong or missing"),
        ((403, "no"), "its token is wrong or missing"),
        ((404, '{"detail": "Not Found"}'), "vLLM needs VLLM_SERVER_DEV_MODE=1"),
    ],
    ids=["401", "403", "404"],
)
async def test_a_server_that_does_not_let_itself_be_asked(status: tuple[int, str], words: str) -> None:
    async with FakeReplica() as replica:
        replica.spoil("status", status, path="/server_info|/v1/models")
        with pytest.raises(NotReady, match=words):
            await ask(replica)
        assert len(replica.requests) == 1, "asking again changes nothing"


@pytest.mark.anyio
async def test_a_server_that_is_away_for_a_moment_is_asked_again_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_AGAIN_S", 0.01)
    async with FakeReplica(max_lora_rank=16, max_model_len=2048) as replica:
        replica.spoil("status", (503, "not now"), path="/server_info", times=1)
        assert await ask(replica) == "base"
        replica.spoil("raw", lambda _: b"<html>", path="/server_info")
        with pytest.raises(NotReady, match=r"does not tell its settings: .*server_info"):
            await ask(replica)
