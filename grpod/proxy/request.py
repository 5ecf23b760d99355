"""What a client sent: its whole body, within limits of size and time, and of that only what routing must know.

The bytes go on as they came. They are written anew only when the adapter has another name upstream (`Job.body_for`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import anyio
from aiohttp import web
from multidict import CIMultiDict

from grpod.proxy.answers import end_to_end

BODY_LIMIT = 64 << 20  # bytes, unpacked; 2,000,000 token ids are about 12 MB
BODY_S = 60.0  # for a body to arrive whole
ENCODINGS = {"", "identity", "gzip", "deflate"}  # what aiohttp unpacks with the standard library alone
# Host and length are made anew; Expect was answered here; the body goes on unpacked; the token was for the proxy
_OURS = frozenset({"host", "content-length", "expect", "content-encoding"})


class BadRequest(Exception):
    """Answered here, never sent on."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Job:
    method: str
    target: str  # path and query, raw
    headers: CIMultiDict[str]
    body: bytes
    document: dict[str, Any]
    model: str | None  # None: the client named none, so the base
    cost: int  # tokens: of the prompts, and the most that may come

    def body_for(self, upstream_name: str) -> bytes:
        if self.model is None or upstream_name == self.model:
            return self.body
        return json.dumps({**self.document, "model": upstream_name}).encode()


async def read_body(request: web.Request) -> bytes:
    """Raises `BadRequest`; one that is too long is told so before it is read."""
    if (request.content_length or 0) > BODY_LIMIT:
        raise BadRequest(413, f"a body of {request.content_length} bytes: at most {BODY_LIMIT} are taken")
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ENCODINGS:
        raise BadRequest(415, f"Content-Encoding {encoding!r}: gzip, deflate and identity are understood")
    try:
        with anyio.fail_after(BODY_S):
            return await request.read()
    except TimeoutError:
        raise BadRequest(408, f"the body did not arrive within {BODY_S:g} s") from None
    except web.HTTPRequestEntityTooLarge:
        raise BadRequest(413, f"the body is too long: at most {BODY_LIMIT} bytes are taken") from None
    except web.RequestPayloadError as error:
        raise BadRequest(400, f"the body cannot be read: {error}") from None


def document_of(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(400, f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(document, dict):
        raise BadRequest(400, f"the body is a JSON {type(document).__name__}, not an object")
    return document


async def read_document(request: web.Request) -> dict[str, Any]:
    return document_of(await read_body(request))


async def read_job(request: web.Request, *, keep_token: bool) -> Job:
    """`keep_token`: the proxy asks for none itself, so the client's is for the replica."""
    body = await read_body(request)
    document = document_of(body)
    model = document.get("model")
    if not isinstance(model, str | None):
        raise BadRequest(400, f"model: a name was expected, not {model!r:.80}")
    return Job(
        method=request.method,
        target=request.rel_url.raw_path_qs,
        headers=request_headers(request, keep_token=keep_token),
        body=body,
        document=document,
        model=model or None,
        cost=cost_of(document, len(body)),
    )


def request_headers(request: web.Request, *, keep_token: bool) -> CIMultiDict[str]:
    return end_to_end(request.headers, without=_OURS if keep_token else _OURS | {"authorization"})


def cost_of(document: dict[str, Any], size: int) -> int:
    """Tokens asked for, roughly: it only has to be fair between replicas. `size` is that of the body, in bytes."""
    prompt = document.get("prompt")
    if not isinstance(prompt, list) or not prompt:
        prompt_tokens = size // 4  # text, or messages
    elif isinstance(prompt[0], list):
        prompt_tokens = sum(len(ids) for ids in prompt if isinstance(ids, list))
    elif isinstance(prompt[0], str):
        prompt_tokens = sum(len(text) for text in prompt if isinstance(text, str)) // 4
    else:
        prompt_tokens = len(prompt)
    limit = document.get("max_tokens") or document.get("max_completion_tokens") or 16
    number = document.get("n") or 1
    new = limit * number if type(limit) is int and type(number) is int and 0 < limit < 1 << 24 and 0 < number < 1 << 16 else 16
    return prompt_tokens + new
