"""The base models that other tests build on: what they promise."""

from __future__ import annotations

import json
from pathlib import Path

from tests.models import make_tiny_base


def test_the_same_weights_and_tokenizer_every_time(tiny_base: Path, tmp_path: Path) -> None:
    again = make_tiny_base(tmp_path / "again")
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / name).read_bytes() == (tiny_base / name).read_bytes(), name
    other = make_tiny_base(tmp_path / "other", seed=1)
    assert (other / "model.safetensors").read_bytes() != (tiny_base / "model.safetensors").read_bytes()


def test_any_text_is_encoded_and_decoded(tiny_base: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    assert tokenizer.decode(tokenizer.encode("é 漢 🍰\n")) == "é 漢 🍰\n"
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "1+2="}], add_generation_prompt=True, tokenize=False)
    assert asked == "<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n"


def test_variants(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = make_tiny_base(tmp_path, chat_template=False, eos_ids=(2, 0))
    assert AutoTokenizer.from_pretrained(folder).chat_template is None
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 2
