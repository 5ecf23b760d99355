"""Can this replica serve this run? Asked once for each incarnation, before the first adapter; answers name the flag that is
wrong, its value, and what is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from grpod.config import Config
from grpod.errors import NotReady
from grpod.replica import vllm
from grpod.replica.adapters import BASE
from grpod.replica.client import Refused, ReplicaClient, ServerInfo, Unavailable, UnusableAnswer

_AGAIN_S = 1.0


async def base_name(client: ReplicaClient, config: Config) -> str:
    """The name of its base model. Raises NotReady when it cannot serve this run."""
    info, models = await _ask(client, config.run.startup_timeout_s)
    if wrong := unfit(info, models, config):
        raise NotReady(f"replica {client.url} cannot serve this run: {'; '.join(wrong)}")
    return models[0] if config.generator.engine == "remote" else BASE


def unfit(info: ServerInfo, models: Sequence[str], config: Config) -> list[str]:
    """In words, all of it at once: a restart of a large model is dear."""
    slots, rank = vllm.slots(config.run.max_lag), vllm.lora_rank(config.lora.rank)
    wrong = [] if models else ["it lists no model"]
    if info.max_loras == 0:
        wrong.append(f"LoRA is off: it needs --enable-lora --max-loras {slots} --max-lora-rank {rank}")
    else:
        if info.max_loras < slots:
            wrong.append(f"--max-loras is {info.max_loras}, run.max_lag {config.run.max_lag} needs {slots}")
        if info.max_cpu_loras is not None and info.max_cpu_loras < slots:
            wrong.append(f"--max-cpu-loras is {info.max_cpu_loras}, run.max_lag {config.run.max_lag} needs {slots}")
        if info.max_lora_rank < config.lora.rank:
            wrong.append(f"--max-lora-rank is {info.max_lora_rank}, lora.rank {config.lora.rank} needs {rank}")
    if config.model.dtype != "auto" and info.dtype and info.dtype != config.model.dtype:
        wrong.append(f"--dtype is {info.dtype}, model.dtype is {config.model.dtype}")
    if info.logprobs_mode and info.logprobs_mode != "processed_logprobs":
        wrong.append(f"--logprobs-mode is {info.logprobs_mode}, processed_logprobs is needed")
    if info.max_model_len is not None and info.max_model_len < config.model.max_model_len:
        wrong.append(f"--max-model-len is {info.max_model_len}, model.max_model_len is {config.model.max_model_len}")
    if info.data_parallel_size > 1:
        wrong.append(
            f"--data-parallel-size is {info.data_parallel_size}: only one of them would be attested; start one server for each"
        )
    return wrong


async def _ask(client: ReplicaClient, timeout_s: float) -> tuple[ServerInfo, list[str]]:
    deadline = anyio.current_time() + timeout_s
    while True:
        try:
            return await client.server_info(), await client.models()
        except Refused as error:
            needs = "its token is wrong or missing" if error.status in (401, 403) else "vLLM needs VLLM_SERVER_DEV_MODE=1"
            raise NotReady(f"replica {client.url} does not tell its settings: {error}; {needs}") from error
        except (Unavailable, UnusableAnswer) as error:
            if anyio.current_time() + _AGAIN_S > deadline:
                raise NotReady(f"replica {client.url} does not tell its settings: {error}") from error
            await anyio.sleep(_AGAIN_S)
