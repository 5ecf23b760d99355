"""Texts of the dialect: a model folder without a tokenizer serves token ids all the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from grpod.replica.embedded.protocol import Problem

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


class Text:
    def __init__(self, folder: Path) -> None:
        there = any((folder / name).exists() for name in TOKENIZER_FILES)
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True) if there else None

    def encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise Problem(400, "this model has no tokenizer: send token ids", param="prompt")
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def decode_part(self, token_ids: Sequence[int], begin: int, end: int, *, last: bool) -> str:
        """What the tokens from `begin` to `end` add; half a character waits for its other half, the end excepted."""
        before, after = (self.decode(token_ids[:at]).rstrip("\ufffd") for at in (begin, end))
        return (self.decode(token_ids[:end]) if last else after)[len(before) :]
