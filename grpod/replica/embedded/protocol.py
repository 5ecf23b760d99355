"""vLLM's dialect of /v1/completions, pure: a request body -> Ask, a job's choices -> the answer's JSON.

A parameter that is not known here may be left at its neutral value; another value is refused, never ignored.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpod.replica.embedded.jobs import Job, Produced

NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "guided_choice": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "logit_bias": (None, {}),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "presence_penalty": (None, 0),
    "prompt_embeds": (None,),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "stop": (None, [], ""),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
}
MOST_CHOICES = 16_384  # vLLM's limit for n


class Problem(Exception):
    """Answered as vLLM's error JSON."""

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param

    def body(self) -> dict[str, Any]:
        kind = {400: "BadRequestError", 404: "NotFoundError"}.get(self.status, "InternalServerError")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.status}}


@dataclass(frozen=True, kw_only=True)
class Ask:
    model: str
    prompts: tuple[list[int], ...]
    n: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    """0 is off"""
    seed: int | None
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    stream: bool
    stream_usage: bool
    logprobs: bool
    prompt_logprobs: bool
    return_token_ids: bool


def parse(body: Any, *, encode: Callable[[str], list[int]], vocab_size: int, max_model_len: int) -> Ask:
    """Raises `Problem`."""
    if not isinstance(body, dict):
        raise Problem(400, "the body must be a JSON object")
    for name, values in NEUTRAL.items():
        if body.get(name) not in values:
            raise Problem(400, f"{name}={body[name]!r:.60} is not supported by the embedded replica", param=name)
    model = body.get("model")
    if not isinstance(model, str):
        raise Problem(400, f"model must be a name, got {model!r:.60}", param="model")
    max_tokens = _number(body, "max_tokens", 16, least=1, integer=True)
    prompts = tuple(_prompts(body.get("prompt"), encode))
    for prompt_ids in prompts:
        _check(prompt_ids, int(max_tokens), vocab_size, max_model_len)
    for name in ("logprobs", "prompt_logprobs"):
        if body.get(name) not in (None, 0):
            raise Problem(400, f"{name} must be 0: only log-probs of the tokens themselves are given", param=name)
    seed = body.get("seed")
    if seed is not None and type(seed) is not int:
        raise Problem(400, f"seed must be an integer, got {seed!r:.60}", param="seed")
    top_p = _number(body, "top_p", 1.0, least=0.0, most=1.0)
    if top_p == 0:
        raise Problem(400, "top_p must be in (0, 1], got 0", param="top_p")
    stop_token_ids = body.get("stop_token_ids") or []
    if not isinstance(stop_token_ids, list) or not all(type(token) is int for token in stop_token_ids):
        raise Problem(400, "stop_token_ids must be a list of token ids", param="stop_token_ids")
    options = body.get("stream_options")
    return Ask(
        model=model,
        prompts=prompts,
        n=int(_number(body, "n", 1, least=1, most=MOST_CHOICES, integer=True)),
        max_tokens=int(max_tokens),
        temperature=_number(body, "temperature", 1.0, least=0.0),
        top_p=top_p,
        top_k=max(0, int(_number(body, "top_k", 0, least=-1, integer=True))),
        seed=seed,
        stop_token_ids=frozenset(stop_token_ids),
        ignore_eos=bool(body.get("ignore_eos")),
        stream=bool(body.get("stream")),
        stream_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        logprobs=body.get("logprobs") is not None,
        prompt_logprobs=body.get("prompt_logprobs") is not None,
        return_token_ids=bool(body.get("return_token_ids")),
    )


def _number(
    body: Mapping[str, Any], name: str, default: float, *, least: float, most: float = math.inf, integer: bool = False
) -> float:
    value = body.get(name)
    if value is None:
        return default
    right_type = type(value) is int or (not integer and type(value) is float)
    if not right_type or not least <= value <= most or (isinstance(value, float) and not math.isfinite(value)):
        kind = "an integer" if integer else "a number"
        limit = f" and at most {most:g}" if most < math.inf else ""
        raise Problem(400, f"{name} must be {kind} of at least {least:g}{limit}, got {value!r:.60}", param=name)
    return float(value) if not integer else int(value)


def _prompts(prompt: Any, encode: Callable[[str], list[int]]) -> list[list[int]]:
    """A text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [encode(prompt)]
    if isinstance(prompt, list) and prompt:
        if all(type(token) is int for token in prompt):
            return [prompt]
        if all(isinstance(text, str) for text in prompt):
            return [encode(text) for text in prompt]
        if all(isinstance(ids, list) and all(type(token) is int for token in ids) for ids in prompt):
            return prompt
    raise Problem(
        400, f"prompt must be a text, token ids, or a list of either, and not empty; got {prompt!r:.60}", param="prompt"
    )


def _check(prompt_ids: Sequence[int], max_tokens: int, vocab_size: int, max_model_len: int) -> None:
    if not prompt_ids:
        raise Problem(400, "The decoder prompt cannot be empty", param="prompt")
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab_size:
        worst = max(prompt_ids) if max(prompt_ids) >= vocab_size else min(prompt_ids)
        raise Problem(400, f"Token id {worst} is out of vocabulary", param="prompt")
    if len(prompt_ids) + max_tokens > max_model_len:
        raise Problem(
            400,
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {max_tokens} output "
            f"tokens and your prompt contains at least {len(prompt_ids)} input tokens, for a total of at least "
            f"{len(prompt_ids) + max_tokens} tokens. Please reduce the length of the input prompt or the number of "
            "requested output tokens.",
            param="input_tokens",
        )


def head(ask: Ask) -> dict[str, Any]:
    return {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": ask.model}


def answer(ask: Ask, jobs: Sequence[Job], decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    choices = []
    for at, job in enumerate(jobs):
        for index, choice in enumerate(job.choices):
            whole = part(ask, job, choice, at * ask.n + index, 0, decode(choice.token_ids))
            whole["prompt_logprobs"] = prompt_logprobs(job) if ask.prompt_logprobs else None
            choices.append(whole)
    return {**head(ask), "choices": choices, "usage": usage(jobs)}


def part(ask: Ask, job: Job, choice: Produced, index: int, begin: int, text: str, end: int | None = None) -> dict[str, Any]:
    """A choice's tokens from `begin` on, as a choice of an answer or of a stream's event."""
    token_ids, logprobs = choice.token_ids[begin:end], choice.logprobs[begin:end]
    told = {
        "text_offset": [],
        "token_logprobs": logprobs,
        "tokens": [f"token_id:{token}" for token in token_ids],
        "top_logprobs": None,
    }
    return {
        "index": index,
        "text": text,
        "logprobs": told if ask.logprobs else None,
        "finish_reason": choice.finish_reason,
        "stop_reason": None,
        "token_ids": token_ids if ask.return_token_ids else None,
        "prompt_token_ids": list(job.prompt_ids) if ask.return_token_ids and begin == 0 else None,
    }


def prompt_logprobs(job: Job) -> list[dict[str, dict[str, float]] | None]:
    entries = zip(job.prompt_ids[1:], job.prompt_logprobs, strict=True)
    return [None, *({str(token): {"logprob": logprob}} for token, logprob in entries)]


def usage(jobs: Sequence[Job]) -> dict[str, int]:
    num_prompt = sum(len(job.prompt_ids) for job in jobs)
    num_completion = sum(len(choice.token_ids) for job in jobs for choice in job.choices)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_completion, "total_tokens": num_prompt + num_completion}
