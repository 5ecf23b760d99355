"""A prompt is a text or a list of messages; what is neither is refused with a reason. Pure, and asks no tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from grpod.generator.dataset import Row

Kind = Literal["text", "messages"]
KIND_WORDS: dict[Kind, str] = {"text": "a text", "messages": "a list of messages"}


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a row is passed over."""

    reason: str  # its word in counts and in the README's table
    message: str


def kind_of(row: Row, column: str) -> Kind | Refusal:
    if column not in row:
        return Refusal(reason="prompt_missing", message=f"it has no key {column!r}")
    prompt = row[column]
    if prompt is None:
        return Refusal(reason="prompt_null", message="the prompt is null")
    if prompt in ("", []):
        return Refusal(reason="prompt_empty", message="the prompt is empty")
    if isinstance(prompt, str):
        return _unreadable(prompt) or "text"
    if isinstance(prompt, list):
        for number, message in enumerate(prompt):
            if refusal := _message_fault(message, number):
                return refusal
        return _unreadable(json.dumps(prompt, ensure_ascii=False, default=str)) or "messages"
    return Refusal(reason="prompt_kind", message=f"a {type(prompt).__name__} is neither a text nor a list of messages")


def _message_fault(message: Any, number: int) -> Refusal | None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return Refusal(reason="prompt_kind", message=f"message {number} is no object with a role")
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        return Refusal(reason="prompt_null", message=f"message {number} has no content")
    if not isinstance(content, str | list | None):
        return Refusal(reason="prompt_kind", message=f"message {number}: its content is a {type(content).__name__}")
    return None


def _unreadable(text: str) -> Refusal | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return Refusal(reason="prompt_not_text", message=f"character {error.start} is half of a surrogate pair: no UTF-8")
    return None
