"""`vllm serve`'s command line and environment, made from the config. (tests/vllm starts it for real.)"""

from __future__ import annotations

from typing import Any

import pytest

from grpod.config import Config
from grpod.errors import ConfigError
from grpod.replica import vllm


def config(*args: str, env: dict[str, str] | None = None, **sections: dict[str, Any]) -> Config:
    served = {"engine": "vllm", "vllm": {"executable": "/opt/vllm/bin/vllm", "args": list(args), "env": env or {}}}
    return Config.model_validate({"generator": served, **sections})


def flags(command: list[str]) -> dict[str, str]:
    """As vLLM's parser reads them: the last one wins, `_` is `-`."""
    found: dict[str, str] = {}
    for at, word in enumerate(command):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            after = command[at + 1] if at + 1 < len(command) else "--"
            found[name.replace("_", "-")] = value if equals else "" if after.startswith("--") else after
    return found


def test_what_a_run_needs_is_asked_of_vllm() -> None:
    sections = {"run": {"max_lag": 3}, "lora": {"rank": 9}, "model": {"max_model_len": 4096, "dtype": "bfloat16"}}
    command = vllm.command(config(**sections), "/models/base", port=8123, gpus=["cuda:0"])
    assert command[:3] == ["/opt/vllm/bin/vllm", "serve", "/models/base"]
    assert flags(command) == {
        "--enable-lora": "",
        "--host": "127.0.0.1",
        "--port": "8123",
        "--served-model-name": "base",
        "--max-lora-rank": "16",
        "--max-loras": "5",
        "--max-cpu-loras": "7",
        "--max-model-len": "4096",
        "--dtype": "bfloat16",
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        "--uvicorn-log-level": "warning",
    }


@pytest.mark.parametrize(("gpus", "size"), [([], None), (["cuda:1"], None), (["cuda:0", "cuda:1"], "2")])
def test_several_gpus_are_one_replica_and_no_gpu_is_the_cpu(gpus: list[str], size: str | None) -> None:
    found = flags(vllm.command(config(), "base", port=1, gpus=gpus))
    assert found.get("--tensor-parallel-size") == size
    assert (found.keys() >= vllm.CPU_SWITCHES.keys()) == (not gpus)


def test_a_gpu_that_the_learner_works_on_too_is_shared() -> None:
    assert "--gpu-memory-utilization" not in flags(vllm.command(config(), "base", port=1, gpus=["cuda:0"]))
    assert flags(vllm.command(config(), "base", port=1, gpus=["cuda:0"], shared=True))["--gpu-memory-utilization"] == "0.45"
    asked = config("--gpu_memory_utilization", "0.3")
    assert flags(vllm.command(asked, "base", port=1, gpus=["cuda:0"], shared=True))["--gpu-memory-utilization"] == "0.3"


@pytest.mark.parametrize(
    ("args", "flag", "value"),
    [
        (["--max-loras", "9"], "--max-loras", "9"),
        (["--max_loras=9"], "--max-loras", "9"),
        (["--max_loras", "9"], "--max-loras", "9"),
        (["--max-model-len=64"], "--max-model-len", "64"),
        (["--dtype", "float16", "--seed", "3"], "--dtype", "float16"),
        (["--no-enforce-eager"], "--no-enforce-eager", ""),
    ],
)
def test_what_the_user_says_wins_however_it_is_spelt(args: list[str], flag: str, value: str) -> None:
    command = vllm.command(config(*args), "base", port=1, gpus=[])
    assert command[-len(args) :] == args
    assert flags(command)[flag] == value
    assert sum(vllm.flag(word) == flag for word in command) == 1, "said once: no parser has to choose"
    assert "--no-enforce-eager" not in args or "--enforce-eager" not in command


@pytest.mark.parametrize(
    ("args", "cpu_loras"),
    [(["--max_loras=9"], "11"), (["--max-loras", "2"], "4"), (["--max-loras", "9", "--max-cpu-loras=30"], "30"), ([], "8")],
)
def test_vllm_is_not_asked_for_more_loras_on_the_gpu_than_in_memory(args: list[str], cpu_loras: str) -> None:
    """It ends at once when it is."""
    assert flags(vllm.command(config(*args), "base", port=1, gpus=["cuda:0"]))["--max-cpu-loras"] == cpu_loras


@pytest.mark.parametrize(
    ("rank", "holds"), [(1, 1), (2, 8), (8, 8), (9, 16), (64, 64), (65, 128), (257, 320), (321, 512), (512, 512)]
)
def test_the_rank_is_the_smallest_that_vllm_knows(rank: int, holds: int) -> None:
    assert vllm.lora_rank(rank) == holds


# ---- environment


def test_a_child_on_the_cpu_takes_little_of_the_machine_unless_the_user_says_so() -> None:
    made = vllm.environment(config(), gpus=[], outer={})
    assert made["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == made["VLLM_SERVER_DEV_MODE"] == "1"
    assert (made["VLLM_CPU_KVCACHE_SPACE"], made["TORCHDYNAMO_DISABLE"]) == ("1", "1")
    assert made["CUDA_VISIBLE_DEVICES"] == "", "a GPU that was not named is somebody else's"
    assert "VLLM_CPU_KVCACHE_SPACE" not in vllm.environment(config(), gpus=[], outer={"VLLM_CPU_KVCACHE_SPACE": "8"})
    asked = vllm.environment(config(env={"VLLM_CPU_KVCACHE_SPACE": "4"}), gpus=[], outer={"VLLM_CPU_KVCACHE_SPACE": "8"})
    assert asked["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert "VLLM_CPU_KVCACHE_SPACE" not in vllm.environment(config(), gpus=["cuda:0"], outer={})


@pytest.mark.parametrize(
    ("gpus", "outer", "seen"),
    [
        (["cuda:1"], None, "1"),
        (["cuda:1"], "4,6", "6"),
        (["cuda:0", "cuda:1"], "4, 6", "4,6"),
        (["cuda:0"], "GPU-8f2c,GPU-91aa", "GPU-8f2c"),
        (["GPU-91aa"], "GPU-8f2c,GPU-91aa", "GPU-91aa"),
    ],
)
def test_a_gpu_is_counted_among_those_that_grpod_may_see(gpus: list[str], outer: str | None, seen: str) -> None:
    env = {} if outer is None else {"CUDA_VISIBLE_DEVICES": outer}
    assert vllm.environment(config(), gpus=gpus, outer=env)["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.parametrize(("gpu", "outer"), [("cuda:2", "4,6"), ("cuda:0", "")])
def test_a_gpu_that_is_not_among_them_is_a_config_error(gpu: str, outer: str) -> None:
    with pytest.raises(ConfigError, match=f"generator.devices: {gpu} is not among CUDA_VISIBLE_DEVICES={outer}"):
        vllm.environment(config(), gpus=[gpu], outer={"CUDA_VISIBLE_DEVICES": outer})


# ---- its log


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("(EngineCore pid=797) WARNING 12-02 02:28:03 [x.py:1] something", "warning"),
        ("(APIServer pid=61) INFO 12-02 02:28:03 [api_server.py:1] Started", "debug"),
        ("(EngineCore pid=797) (Worker pid=8) ERROR 12-02 02:28:03 [x.py:1] died", "error"),
        ("CRITICAL 12-02 02:28:03 [launcher.py:105] gone", "error"),
        ("DEBUG 12-02 02:28:03 [x.py:1] y", "debug"),
        ("Traceback (most recent call last):", "info"),
        ("INFORMATION is no level", "info"),
        ("Loading safetensors: 100% ERROR", "info"),
    ],
)
def test_a_line_is_passed_on_at_its_level(line: str, level: str) -> None:
    assert vllm.level(line) == level
