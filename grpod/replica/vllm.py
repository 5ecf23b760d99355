"""`vllm serve` as a child: the command line and environment that a run needs, from the config. Pure.

    slots      --max-loras          the newest, those within max_lag that still have requests, and one that is being attested
    rank       --max-lora-rank      the smallest that vLLM's kernels know and that holds lora.rank
    log-probs  --logprobs-mode      of the distribution that was sampled from, after temperature and cuts
    end        --generation-config  vllm: no sampling default of the model gets in; end tokens go with each request

What the user says in `generator.vllm` wins, but for what the supervisor itself relies on (`config_engine.OURS`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from grpod.config import Config
from grpod.config_engine import flag
from grpod.errors import ConfigError

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM's kernels know
ENV = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # /server_info, /pause, /resume
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_API_KEY": "",  # one in the user's shell is for another server
}
CPU_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; by itself it takes half of the machine
    "TORCHDYNAMO_DISABLE": "1",  # a model that a CPU can serve is not worth minutes of compiling
}
CPU_SWITCHES = {  # and their opposites
    "--enforce-eager": "--no-enforce-eager",
    # vLLM 0.32 dies of a seeded request whose prefill is cut: it turns the random generator back, which a CPU's cannot do
    "--no-enable-chunked-prefill": "--enable-chunked-prefill",
}
SHARED_GPU = 0.45  # share of a GPU's memory where the learner works on it too
_LEVEL = re.compile(r"^(?:\([^)]*\)\s*)*(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
_LEVELS = {"DEBUG": "debug", "INFO": "debug", "WARNING": "warning", "ERROR": "error", "CRITICAL": "error"}


def lora_rank(rank: int) -> int:
    """The smallest that vLLM knows and that holds `rank`."""
    return next(known for known in LORA_RANKS if known >= rank)


def slots(max_lag: int) -> int:
    return max_lag + 2


def command(config: Config, base: str, *, port: int, gpus: Sequence[str], shared: bool = False, dtype: str = "") -> list[str]:
    """`base`: the model's folder. `gpus` of this one replica: several are used as one (tensor parallel), none is the CPU.
    `shared`: the learner works on one of them, too. `dtype`: in place of model.dtype."""
    flags: dict[str, object] = {
        "--host": "127.0.0.1",
        "--port": port,
        "--served-model-name": "base",
        "--max-lora-rank": lora_rank(config.lora.rank),
        "--max-loras": slots(config.run.max_lag),
        "--max-cpu-loras": slots(config.run.max_lag) + 2,
        "--max-model-len": config.model.max_model_len,
        "--dtype": dtype or config.model.dtype,
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        "--uvicorn-log-level": "warning",
    }
    if len(gpus) > 1:
        flags["--tensor-parallel-size"] = len(gpus)
    if shared:
        flags["--gpu-memory-utilization"] = SHARED_GPU
    given = _given(config.generator.vllm.args)
    if (theirs := given.get("--max-loras", "")).isdigit():  # vLLM wants at least as many in the CPU's memory
        flags["--max-cpu-loras"] = int(theirs) + 2
    words = [word for name, value in flags.items() if name not in given for word in (name, str(value))]
    if not gpus:
        words += [switch for switch, other in CPU_SWITCHES.items() if given.keys().isdisjoint({switch, other})]
    return [config.generator.vllm.executable, "serve", base, "--enable-lora", *words, *config.generator.vllm.args]


def environment(config: Config, *, gpus: Sequence[str], outer: Mapping[str, str]) -> dict[str, str]:
    """What is added to `outer`, grpod's own environment; where that already names a CPU setting, it stays."""
    if gpus:
        chosen = {"CUDA_VISIBLE_DEVICES": ",".join(_visible(gpus, outer.get("CUDA_VISIBLE_DEVICES")))}
    else:
        chosen = {name: value for name, value in CPU_ENV.items() if name not in outer}
        chosen["CUDA_VISIBLE_DEVICES"] = ""  # a GPU that the config does not name is somebody else's
    return {**ENV, **chosen, **config.generator.vllm.env}


def _visible(gpus: Sequence[str], outer: str | None) -> list[str]:
    """cuda:1 is the second of those that grpod may see; an id such as GPU-8f2c… is that GPU. Raises ConfigError."""
    seen = None if outer is None else [name.strip() for name in outer.split(",") if name.strip()]
    names = []
    for gpu in gpus:
        number = gpu.removeprefix("cuda:")
        if seen is None or not number.isdigit():
            names.append(number)
        elif int(number) < len(seen):
            names.append(seen[int(number)])
        else:
            raise ConfigError(f"generator.devices: {gpu} is not among CUDA_VISIBLE_DEVICES={outer}")
    return names


def _given(args: Sequence[str]) -> dict[str, str]:
    """Flag -> value, as `--flag value` or `--flag=value`; empty where none follows."""
    values = {}
    for at, arg in enumerate(args):
        if name := flag(arg):
            after = next(iter(args[at + 1 :]), "")
            values[name] = arg.partition("=")[2] or ("" if flag(after) else after)
    return values


def level(line: str) -> str:
    """At which level a line of vLLM's output is passed on. Its INFO is grpod's debug; what bears no level (a traceback, a
    library's print) goes with what surrounds it: info."""
    found = _LEVEL.match(line)
    return _LEVELS[found[1]] if found else "info"
