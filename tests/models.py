"""Base models for tests, made in about a second: the quickstart's model, smaller and untrained.

make_tiny_base(folder)                       Qwen2, random weights (always the same), byte-level BPE, chat template
make_tiny_base(folder, chat_template=False)  the tokenizer knows no chat template
make_tiny_base(folder, eos_ids=(2, 0))       generation_config.json lists several end tokens (config.json the first)
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def make_tiny_base(
    folder: Path,
    *,
    chat_template: bool = True,
    eos_ids: Sequence[int] | None = None,
    hidden: int = 32,
    layers: int = 2,
    seed: int = 0,
) -> Path:
    """Writes a transformers folder; the tokens 0, 1, 2 are <|endoftext|> (pad), <|im_start|>, <|im_end|> (eos)."""
    import torch  # here, so that tests without a model do not pay for it
    from transformers.utils.logging import disable_progress_bar

    prepare = example("quickstart/prepare.py")
    with torch.random.fork_rng():
        tokenizer = prepare.make_tokenizer(**({} if chat_template else {"chat_template": None}))
        model = prepare.make_model(tokenizer, hidden=hidden, layers=layers, heads=2, seed=seed)
    if eos_ids is not None:
        model.config.eos_token_id = eos_ids[0]
        model.generation_config.eos_token_id = list(eos_ids)
    disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def example(path: str) -> ModuleType:
    """The module `examples/<path>`, loaded by its path as grpod does."""
    name = "grpod_example_" + path.removesuffix(".py").replace("/", "_")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]
