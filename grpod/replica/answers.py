"""The law: an answer is a completion only if all of it fits the request that was sent. Pure: bytes in, values out.

A server under stress answers 200 with stumps: aborted requests, nulls and NaN among the log-probs (Python's json reads `NaN`
and `-Infinity`), another model, another prompt, cut bodies. Whatever does not fit raises `UnusableAnswer` with one word.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpod.replica.errors import UnusableAnswer

NOISE = 1e-3  # a log-prob so little above 0 is rounding: it is clamped, not refused


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    model: str
    prompt_ids: Sequence[int]
    n: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 is off"""
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    """all end tokens of the model: a server may know one of several, or none"""

    def body(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": list(self.prompt_ids),
            "n": self.n,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "stop_token_ids": list(self.stop_token_ids),
            "logprobs": 0,
            "return_token_ids": True,
        }


@dataclass(frozen=True, kw_only=True)
class Choice:
    index: int
    token_ids: tuple[int, ...]
    """at least one; the end token included when there is one"""
    logprobs: tuple[float, ...]
    """one for each token: finite, at most 0"""
    finish_reason: str
    """stop or length, as the server says it: see `truncated`"""
    text: str

    def truncated(self, end_ids: Collection[int]) -> bool:
        """Servers say `length` also of a completion whose last allowed token is an end token: that one is whole."""
        return self.finish_reason == "length" and self.token_ids[-1] not in end_ids


@dataclass(frozen=True, kw_only=True)
class Answer:
    choices: tuple[Choice, ...]
    """by index, whatever order they came in"""


def parse_completion(data: bytes, request: CompletionRequest) -> Answer:
    """Raises `UnusableAnswer`."""
    raw_choices = _choices(data, model=request.model, n=request.n)
    _check_prompt(raw_choices, request.prompt_ids)
    return Answer(choices=tuple(_choice(raw, index, request.max_tokens) for index, raw in enumerate(raw_choices)))


def parse_score(data: bytes, *, model: str, token_ids: Sequence[int]) -> list[float]:
    """`prompt_logprobs` is a list of {token id: {logprob}}, its first entry null. Raises `UnusableAnswer`."""
    (raw,) = raw_choices = _choices(data, model=model, n=1)
    if raw.get("finish_reason") == "abort":
        raise UnusableAnswer("abort", "the server aborted the request")
    _check_prompt(raw_choices, token_ids)
    entries = raw.get("prompt_logprobs")
    if not isinstance(entries, list):
        raise UnusableAnswer("logprobs_missing", f"prompt_logprobs is {entries!r:.80}")
    if len(entries) != len(token_ids):
        raise UnusableAnswer("logprobs_length", f"{len(entries)} prompt log-probs for {len(token_ids)} tokens")
    values = []
    for at, token in enumerate(token_ids[1:], start=1):
        entry = entries[at].get(str(token)) if isinstance(entries[at], dict) else None
        if not isinstance(entry, dict):
            raise UnusableAnswer("logprobs_missing", f"no prompt log-prob of token {token} at position {at}")
        values.append(_logprob(entry.get("logprob"), at))
    return values


def _choices(data: bytes, *, model: str, n: int) -> list[Mapping[str, Any]]:
    """The `n` raw choices by index."""
    if not data.strip():
        raise UnusableAnswer("empty", "the body is empty")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise UnusableAnswer("json", f"{error}: {data[-60:]!r}") from None
    if not isinstance(document, dict):
        raise UnusableAnswer("json", f"a JSON object was expected, got {document!r:.80}")
    if document.get("error") is not None or document.get("object") == "error":
        raise UnusableAnswer("error_body", f"{document.get('error') or document.get('message')!r:.300}")
    if document.get("model") != model:
        raise UnusableAnswer("model", f"asked {model!r}, answered by {document.get('model')!r}")
    listed = document.get("choices")
    if not isinstance(listed, list) or not all(isinstance(raw, dict) for raw in listed):
        raise UnusableAnswer("choices_missing", f"choices is {listed!r:.80}")
    by_index: dict[int, Mapping[str, Any]] = {}
    for raw in listed:
        index = raw.get("index")
        if type(index) is not int:
            raise UnusableAnswer("choices_missing", f"a choice has index {index!r:.40}")
        if index in by_index:
            raise UnusableAnswer("index_twice", f"two choices have index {index!r}")
        by_index[index] = raw
    if set(by_index) != set(range(n)):
        raise UnusableAnswer("choices_missing", f"indices {list(by_index)!r:.80} where 0..{n - 1} were asked for")
    return [by_index[index] for index in range(n)]


def _check_prompt(raw_choices: Sequence[Mapping[str, Any]], prompt_ids: Sequence[int]) -> None:
    """At least one choice must show the prompt that it answers, and none another."""
    told = [raw["prompt_token_ids"] for raw in raw_choices if raw.get("prompt_token_ids") is not None]
    if not told:
        raise UnusableAnswer("prompt_ids", "no prompt_token_ids came back (is return_token_ids known to the server?)")
    for ids in told:
        if ids != list(prompt_ids):
            raise UnusableAnswer("prompt_ids", f"{ids!r:.60} came back for {list(prompt_ids)!r:.60}")


def _choice(raw: Mapping[str, Any], index: int, max_tokens: int) -> Choice:
    finish_reason = raw.get("finish_reason")
    if finish_reason == "abort":
        raise UnusableAnswer("abort", f"the server aborted choice {index}")
    if finish_reason not in ("stop", "length"):
        raise UnusableAnswer("finish_reason", f"choice {index} ended by {finish_reason!r}")
    token_ids = raw.get("token_ids")
    if not isinstance(token_ids, list) or not token_ids or not all(map(_is_token, token_ids)):
        raise UnusableAnswer("no_tokens", f"token_ids of choice {index}: {token_ids!r:.80}")
    if len(token_ids) > max_tokens:
        raise UnusableAnswer("too_many_tokens", f"choice {index} has {len(token_ids)} tokens, {max_tokens} were allowed")
    logprobs = raw.get("logprobs")
    values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
    if not isinstance(values, list):
        raise UnusableAnswer("logprobs_missing", f"log-probs of choice {index}: {logprobs!r:.80}")
    if len(values) != len(token_ids):
        raise UnusableAnswer("logprobs_length", f"choice {index} has {len(values)} log-probs for {len(token_ids)} tokens")
    return Choice(
        index=index,
        token_ids=tuple(token_ids),
        logprobs=tuple(_logprob(value, at) for at, value in enumerate(values)),
        finish_reason=finish_reason,
        text=str(raw.get("text") or ""),
    )


def _logprob(value: object, at: int) -> float:
    if value is None:
        raise UnusableAnswer("logprobs_null", f"the log-prob at position {at} is null")
    if type(value) is int and abs(value) < 10**9:  # JSON has integers that no float holds: they fall through
        value = float(value)
    if not isinstance(value, float) or not math.isfinite(value):
        raise UnusableAnswer("logprobs_not_finite", f"the log-prob at position {at} is {value!r:.40}")
    if value > NOISE:
        raise UnusableAnswer("logprobs_positive", f"the log-prob at position {at} is {value!r:.40}")
    return min(value, 0.0)


def _is_token(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31
