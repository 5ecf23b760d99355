"""A real vLLM under the supervisor, met by the client: the dialect that the fakes and the embedded replica imitate."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import psutil
import pytest
import structlog

from grpod.replica.client import CompletionRequest, Refused, ReplicaClient, Unavailable, UnknownAdapter, UnusableAnswer
from grpod.replica.supervise import ChildSpec, supervised
from tests.models import make_tiny_base
from tests.replica.embedded.made import make_adapter, plain_logprobs

VLLM = os.environ.get("VLLM_EXECUTABLE", "")
FLAGS = "--enable-lora --max-lora-rank 8 --max-loras 3 --max-cpu-loras 4 --max-model-len 512 --dtype float32 --enforce-eager"
FLAGS += " --served-model-name base --logprobs-mode processed_logprobs --generation-config vllm"
ENV = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
PROMPT = list(range(5, 21))

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.vllm,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not VLLM, reason="VLLM_EXECUTABLE names no vllm"),
]


def spec(base: Path) -> ChildSpec:
    return ChildSpec(
        name="vllm",
        command=lambda port: [VLLM, "serve", str(base), "--host", "127.0.0.1", "--port", str(port), *FLAGS.split()],
        env=ENV,
        startup_timeout_s=200.0,
    )


def near(values: list[float], wanted: object) -> bool:
    return values == pytest.approx(wanted, abs=1e-3)


async def check_completions(client: ReplicaClient, base: Path, adapter: Path) -> None:
    for model, path in (("base", None), ("v1", adapter)):
        request = CompletionRequest(
            model=model, prompt_ids=PROMPT, n=4, max_tokens=8, seed=3, temperature=0.7, top_k=50, top_p=0.9
        )
        answer = await client.complete(request)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        plain = plain_logprobs(base, path, PROMPT)
        score = await client.score(model, PROMPT)
        assert near(score, [float(plain[at, token]) for at, token in enumerate(PROMPT[1:])])
        request = CompletionRequest(model=model, prompt_ids=PROMPT, n=4, max_tokens=8, seed=3)
        for choice in (await client.complete(request)).choices:
            whole = plain_logprobs(base, path, [*PROMPT, *choice.token_ids])
            at = len(PROMPT) - 1
            assert near(list(choice.logprobs), [float(whole[at + i, token]) for i, token in enumerate(choice.token_ids)])


async def check_refusals(client: ReplicaClient, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="already been loaded"):
        await client.load_adapter("v1", str(tmp_path / "v1"))
    with pytest.raises(Refused) as missing:
        await client.load_adapter("v2", str(tmp_path / "missing"))
    assert missing.value.status == 404
    with pytest.raises(Unavailable) as rank:
        await client.load_adapter("v2", str(tmp_path / "rank16"))
    assert rank.value.status == 500
    with pytest.raises(Refused, match="maximum context length"):
        await client.complete(CompletionRequest(model="base", prompt_ids=PROMPT * 40, n=1, max_tokens=1))
    with pytest.raises(UnknownAdapter):
        await client.complete(CompletionRequest(model="v9", prompt_ids=PROMPT, n=1, max_tokens=1))
    with pytest.raises(UnknownAdapter):
        await client.unload_adapter("v9")


async def check_pauses(client: ReplicaClient) -> None:
    async def aborted() -> None:
        with pytest.raises(UnusableAnswer, match="abort"):
            await client.complete(CompletionRequest(model="base", prompt_ids=PROMPT, n=1, max_tokens=490, seed=1))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(aborted)
        await anyio.sleep(0.3)  # it has no event for "it runs"
        await client.pause("abort")
    await client.resume()
    assert (await client.complete(CompletionRequest(model="base", prompt_ids=PROMPT, n=1, max_tokens=2))).choices


async def test_the_client_and_the_supervisor_meet_a_real_vllm(tmp_path: Path):
    base = make_tiny_base(tmp_path / "base", hidden=128)
    make_adapter(base, tmp_path / "v1", seed=1)
    make_adapter(base, tmp_path / "rank16", seed=2, rank=16)
    log = structlog.wrap_logger(structlog.PrintLogger(), processors=[structlog.processors.JSONRenderer()])
    async with supervised(spec(base), log=log) as child:
        first = await child.ready()
        async with ReplicaClient(child.url) as client:
            info = await client.server_info()
            assert (info.max_loras, info.max_lora_rank, info.max_model_len) == (3, 8, 512)
            assert (info.dtype, info.data_parallel_size, info.logprobs_mode) == ("float32", 1, "processed_logprobs")
            await client.load_adapter("v1", str(tmp_path / "v1"))
            assert await client.models() == ["base", "v1"]
            await check_completions(client, base, tmp_path / "v1")
            await check_refusals(client, tmp_path)
            await check_pauses(client)
            await client.unload_adapter("v1")
        reaper, api, *workers = below = psutil.Process().children(recursive=True)
        assert "reaper.py" in " ".join(reaper.cmdline())
        assert len(workers) >= 2  # of other names: EngineCore, Worker
        api.kill()
        await child.lost(first)
        assert await child.ready() == first + 1
        assert not alive(below)
        below = psutil.Process().children(recursive=True)
    assert not alive(below)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
