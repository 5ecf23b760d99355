"""Prompt to token ids, completion ids to text. The tokenizer is the base model's, and nothing is cut, padded or repaired.

a text               tokenizer(text)
messages             the chat template, with the opening of the assistant's turn
... assistant last   the chat template, with that last turn left open: the completion continues it
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpod.errors import ConfigError
from grpod.imports import IMPORTING

Message = dict[str, Any]


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a local base model. Blocks (it reads files, and imports transformers)."""
    with IMPORTING:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"model.base: {folder} holds no tokenizer that transformers can read: {error}") from error


def has_chat_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def prompt_ids(tokenizer: Any, prompt: str | list[Message]) -> tuple[int, ...]:
    if isinstance(prompt, str):
        # verbose: the length is checked by the caller, against model.max_model_len and not against the tokenizer's guess
        return tuple(tokenizer(prompt, verbose=False)["input_ids"])
    goes_on = prompt[-1]["role"] == "assistant"
    ids = tokenizer.apply_chat_template(
        prompt, add_generation_prompt=not goes_on, continue_final_message=goes_on, tokenize=True, return_dict=False
    )
    return tuple(ids)


def prompt_id(ids: Sequence[int]) -> str:
    """Equal ids, equal name: on every machine and in every run with the same tokenizer."""
    return hashlib.sha256(array("q", ids).tobytes()).hexdigest()[:16]


def completion_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """What a reward function is shown: special tokens left out, spaces as they were sampled."""
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text
