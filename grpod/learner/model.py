"""A folder of weights becomes a frozen base model with an untrained LoRA adapter inside, or a `ConfigError` that says what is
wrong with the folder or with `lora.target_modules`. What can be said without the weights is said before they are read.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors import SafetensorError

from grpod.config import Config, LoraSection
from grpod.errors import ConfigError

# Families whose decoder takes a ready attention mask as it is and whose head is one matrix product: each is compared with
# the model's own forward pass in tests/learner/test_forward.py. Others have a row a rollout and make their own logits.
_Auto: Any = transformers.AutoModelForCausalLM  # half typed there
STOCK = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3"})
TINY = 50_000_000  # parameters; below it more than one thread costs more than it gives


@dataclass(frozen=True, kw_only=True)
class Model:
    peft: Any
    causal: Any  # the transformers model inside, adapter included
    device: torch.device
    targets: tuple[str, ...]  # names of the modules that carry the adapter
    stock: bool
    num_parameters: int


def load(config: Config, base: Path, seed: int) -> Model:
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    targets = resolve_targets(base, config.lora)
    device = choose_device(config.learner.device)
    causal = _weights(base, _hf_config(base), config.model.dtype).to(device)
    num_parameters = sum(parameter.numel() for parameter in causal.parameters())
    if device.type == "cpu" and num_parameters < TINY:
        torch.set_num_threads(1)
    torch.manual_seed(seed)
    plain = peft.LoraConfig(
        r=config.lora.rank,
        lora_alpha=config.lora.alpha,  # type: ignore[arg-type]  # a float does as well
        lora_dropout=config.lora.dropout,
        target_modules=list(targets),
        bias="none",
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():  # names that transformers renames in version 6, and that peft and 5.0 know
        warnings.filterwarnings("ignore", message="`(is_)?gradient_checkpointing", category=FutureWarning)
        adapted = peft.get_peft_model(causal, plain)
        if _activation_bytes(causal.config, config.learner.token_budget) > _free_bytes(device) / 2:
            causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    adapted.train()
    return Model(
        peft=adapted,
        causal=causal,
        device=device,
        targets=targets,
        stock=_is_stock(causal),
        num_parameters=num_parameters,
    )


def adapter_of(adapted: Any) -> dict[str, torch.nn.Parameter]:
    """What is trained, by its name in the adapter's file."""
    parameters = adapted.named_parameters()
    return {name.replace(".default.", "."): parameter for name, parameter in parameters if parameter.requires_grad}


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"learner.device {name!r}: auto, cpu, cuda, cuda:1, …") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"learner.device {name!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def resolve_targets(base: Path, lora: LoraSection) -> tuple[str, ...]:
    """Module names for PEFT, sorted. Reads the base model's config only, no weights."""
    hf_config = _hf_config(base)
    with torch.device("meta"):
        empty = _Auto.from_config(hf_config)
    linear = [name for name, module in empty.named_modules() if isinstance(module, torch.nn.Linear)]
    ends = [name for name, module in empty.named_modules() if module in (_head(empty), empty.get_input_embeddings())]
    inner = [name for name in linear if name not in ends]
    if lora.target_modules == "all-linear":
        targets: Sequence[str] = sorted({name.rpartition(".")[2] for name in inner})
    else:
        targets = sorted(set(lora.target_modules))
    known = sorted({name.rpartition(".")[2] for name in inner})
    if not targets:
        raise ConfigError(f"lora.target_modules {lora.target_modules!r}: {base} has no module that can carry an adapter")
    for target in targets:
        if any(_matches(target, name) for name in ends):
            raise ConfigError(
                f"lora.target_modules {target!r}: embeddings and output head cannot be served as they are trained; "
                f"take some of {', '.join(known)}"
            )
        if not any(_matches(target, name) for name in inner):
            near = difflib.get_close_matches(target, known, n=3) or known
            raise ConfigError(f"lora.target_modules {target!r}: no such module in {base}; did you mean {', '.join(near)}?")
    return tuple(targets)


def _matches(target: str, name: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _head(model: Any) -> Any:
    return model.get_output_embeddings()


def _hf_config(base: Path) -> Any:
    if not (base / "config.json").is_file():
        raise ConfigError(f"base model {base}: no config.json there")
    try:
        config = transformers.AutoConfig.from_pretrained(base, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"base model {base}: config.json cannot be used: {error}") from error
    # log-probs must be those of the policy that samples, and engines have no dropout; the adapter's own is lora.dropout
    for name in [n for n in vars(config) if "dropout" in n or n.endswith("pdrop")]:
        if isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)
    return config


def _weights(base: Path, hf_config: Any, dtype: str) -> Any:
    if not any(base.glob("*.safetensors")):
        raise ConfigError(f"base model {base}: no *.safetensors there")
    try:
        model, found = _Auto.from_pretrained(
            base, config=hf_config, dtype=dtype, use_safetensors=True, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"base model {base}: weights cannot be loaded: {error}") from error
    if found["missing_keys"]:  # transformers would go on with random numbers in their place
        missing = sorted(found["missing_keys"])
        raise ConfigError(f"base model {base}: {len(missing)} weights are missing, the first is {missing[0]}")
    return model


def _is_stock(causal: Any) -> bool:
    config = causal.config
    full = all(kind == "full_attention" for kind in getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) if config.model_type == "mistral" else None
    plain_head = isinstance(_head(causal), torch.nn.Linear) and _head(causal).bias is None
    return config.model_type in STOCK and full and window is None and plain_head and config._attn_implementation == "sdpa"


def _activation_bytes(config: Any, token_budget: int) -> float:
    """Kept for the backward pass of one micro-batch: 34 bytes a token, layer and hidden unit at 16 bits (Korthikanti 2022);
    with norms in float32 and an adapter on every product 60, as measured on the shape of SmolLM2-135M."""
    width = {torch.float32: 2.0}.get(config.dtype, 1.0)
    return 60.0 * width * token_budget * int(config.num_hidden_layers) * int(config.hidden_size)


def _free_bytes(device: torch.device) -> float:
    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else float("inf")
