"""Fakes at the network's edge: real aiohttp servers on port 0 that can stall, refuse, lie and die.

    async with FakeReplica() as replica:
        replica.spoil("status", (500, "engine died"), path="/v1/completions", times=2)
        replica.spoil("edit", lambda answer: answer["choices"].reverse())
        ... ReplicaClient(replica.url) ...
        assert replica.count("/v1/completions") == 3

A spoiling matches requests by method, path and body; its `first`-th match up to `times` matches are spoilt:

    before the answer is made     refuse (close, not applied) · forget (drop all adapters, go on) · hang · delay s
                                  status (code, text[, headers]) · redirect url
    after it was applied          lose (close without a reply) · edit f(json) · raw f(bytes) -> bytes · gzip
                                  cut n (Content-Length full, n bytes sent) · chunk_cut n (chunked, no end)
    streams                       sse_cut n (close after n events) · sse_error n (an error event after n, then [DONE])
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import anyio
from aiohttp import web


@dataclass(frozen=True, kw_only=True)
class Seen:
    method: str
    path: str
    query: str
    headers: Mapping[str, str]  # names in lower case
    body: Any  # parsed JSON, else bytes


@dataclass(kw_only=True)
class Spoiling:
    do: str
    arg: Any
    method: str
    path: str
    when: Callable[[Any], bool]
    first: int
    times: int | None
    matched: int = 0  # counts matching requests; owned by the FakeReplica

    def hits(self, seen: Seen) -> bool:
        if not (re.fullmatch(self.method, seen.method) and re.fullmatch(self.path, seen.path) and self.when(seen.body)):
            return False
        self.matched += 1
        return self.first <= self.matched and (self.times is None or self.matched < self.first + self.times)


def random_choice(body: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A completion that depends on seed, index and model alone; ends with token 2 when it stops early."""
    dice, limit = random.Random(f"{body.get('seed')}/{index}/{body.get('model')}"), body.get("max_tokens", 16)
    token_ids = [dice.randint(3, 200) for _ in range(dice.randint(1, limit))]
    if len(token_ids) < limit:
        token_ids[-1] = 2
    return {"token_ids": token_ids, "logprobs": [-0.5 - (t % 7) / 10 for t in token_ids]}


def flat_score(model: str, token_ids: Sequence[int]) -> list[float]:
    """Prompt log-probs that tell the models apart."""
    shift = random.Random(model).random()
    return [-1.0 - shift - (token % 13) / 10 for token in token_ids[1:]]


@dataclass(kw_only=True)
class FakeReplica:
    """One vLLM-dialect server. Fields may be changed while it runs."""

    base: str = "base"
    max_loras: int = 6
    max_lora_rank: int = 8
    max_model_len: int = 1024
    choose: Callable[[Mapping[str, Any], int], dict[str, Any]] = random_choice  # token_ids, logprobs[, finish_reason, text]
    score: Callable[[str, Sequence[int]], list[float]] = flat_score
    adapters: dict[str, str] = field(default_factory=dict)  # name -> path
    healthy: bool = True
    paused: bool = False
    requests: list[Seen] = field(default_factory=list)
    open_now: int = 0  # requests being answered
    gone: int = 0  # clients that left before their answer
    port: int = 0
    spoilings: list[Spoiling] = field(default_factory=list)
    _moved: anyio.Event = field(default_factory=anyio.Event)  # set and replaced when a request came or went
    _runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def spoil(
        self,
        do: str,
        arg: Any = None,
        *,
        method: str = ".*",
        path: str = "/v1/completions",
        when: Callable[[Any], bool] = lambda body: True,
        first: int = 1,
        times: int | None = None,
    ) -> Spoiling:
        spoiling = Spoiling(do=do, arg=arg, method=method, path=path, when=when, first=first, times=times)
        self.spoilings.append(spoiling)
        return spoiling

    def count(self, path: str) -> int:
        return sum(seen.path == path for seen in self.requests)

    async def until(self, condition: Callable[[Self], bool], *, timeout_s: float = 30.0) -> None:
        """Looks again whenever a request came or went; raises TimeoutError."""
        with anyio.fail_after(timeout_s):
            while not condition(self):
                await self._moved.wait()

    def _move(self) -> None:
        self._moved.set()
        self._moved = anyio.Event()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        await self.die()

    async def start(self) -> None:
        """Also after `die`: on the same port, with no adapter left."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0, keepalive_timeout=5)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def die(self) -> None:
        """As kill -9: listening socket and all connections gone, adapters lost."""
        runner, self._runner = self._runner, None
        self.adapters.clear()
        if runner is not None:
            for protocol in list(runner.server.connections) if runner.server else []:
                if protocol.transport is not None:
                    protocol.transport.abort()
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.open_now += 1
        self._move()
        try:
            return await self._answer(request)
        except (anyio.get_cancelled_exc_class(), ConnectionError):
            self.gone += 1
            raise
        finally:
            self.open_now -= 1
            self._move()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        try:
            body = json.loads(raw) if raw else None
        except ValueError:
            body = raw
        headers = {name.lower(): value for name, value in request.headers.items()}
        seen = Seen(method=request.method, path=request.path, query=request.query_string, headers=headers, body=body)
        self.requests.append(seen)
        self._move()
        spoiling = next((s for s in self.spoilings if s.hits(seen)), None)
        do, arg = (spoiling.do, spoiling.arg) if spoiling else ("", None)
        match do:
            case "refuse":
                return drop(request)
            case "forget":
                self.adapters.clear()
            case "hang":
                await anyio.sleep_forever()
            case "delay":
                await anyio.sleep(arg)
            case "status":
                code, text, *more = arg
                return web.Response(
                    status=code, text=text, headers={"Content-Type": "application/json", **(more[0] if more else {})}
                )
            case "redirect":
                return web.Response(status=307, headers={"Location": arg})
        answer = self._route(seen)
        if answer.status == 200 and isinstance(body, dict) and body.get("stream"):
            return await self._stream(request, json.loads(bytes(answer.body)), do, arg)
        return await self._spoilt(request, answer, do, arg)

    async def _spoilt(self, request: web.Request, answer: web.Response, do: str, arg: Any) -> web.StreamResponse:
        data = bytes(answer.body or b"")
        match do:
            case "lose":
                return drop(request)
            case "edit":
                parsed = json.loads(data)
                arg(parsed)
                answer.body = json.dumps(parsed).encode()
            case "raw":
                answer.body = arg(data)
            case "gzip":
                answer.body = gzip.compress(data)
                answer.headers["Content-Encoding"] = "gzip"
            case "cut" | "chunk_cut":
                partial = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
                if do == "cut":
                    partial.content_length = len(data)
                else:
                    partial.enable_chunked_encoding()
                await partial.prepare(request)
                await partial.write(data[:arg])
                if request.transport is not None:
                    request.transport.close()
                return partial
        return answer

    def _route(self, seen: Seen) -> web.Response:
        body = seen.body if isinstance(seen.body, dict) else {}
        name = body.get("lora_name", "")
        match seen.path:
            case "/health":
                return web.Response(status=200 if self.healthy else 503)
            case "/v1/models":
                base = {"id": self.base, "object": "model", "max_model_len": self.max_model_len}
                return web.json_response(
                    {"object": "list", "data": [base] + [{"id": n, "parent": self.base} for n in self.adapters]}
                )
            case "/server_info":
                lora = {"max_lora_rank": self.max_lora_rank, "max_loras": self.max_loras}
                model = {"dtype": "torch.float32", "logprobs_mode": "processed_logprobs"}
                parallel = {"data_parallel_size": 1}
                return web.json_response(
                    {"vllm_config": {"lora_config": lora, "parallel_config": parallel, "model_config": model}}
                )
            case "/pause" | "/resume":
                self.paused = seen.path == "/pause"
                return web.json_response({"status": seen.path[1:] + "d"})
            case "/metrics":
                text = f'vllm:num_requests_running{{model_name="{self.base}"}} {self.open_now - 1}\n'
                return web.Response(text=text)
            case "/v1/load_lora_adapter":
                if name in self.adapters and not body.get("load_inplace"):
                    return problem(400, f"The lora adapter '{name}' has already been loaded.")
                self.adapters[name] = body["lora_path"]
                return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")
            case "/v1/unload_lora_adapter":
                if self.adapters.pop(name, None) is None:
                    return problem(404, f"The lora adapter '{name}' cannot be found.")
                return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")
            case "/v1/completions":
                model = body.get("model")
                if model != self.base and model not in self.adapters:
                    return problem(404, f"The model `{model}` does not exist.")
                return web.json_response(self._complete(body))
        return problem(404, "no such path")

    def _complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        choices = []
        for index in range(body.get("n", 1)):
            chosen, prompt = self.choose(body, index), body.get("prompt")
            ids = chosen["token_ids"]
            finish = "length" if len(ids) >= body.get("max_tokens", 16) and ids[-1] != 2 else "stop"
            choice = {
                "index": index,
                "text": chosen.get("text", "".join(chr(97 + t % 26) for t in ids)),
                "finish_reason": chosen.get("finish_reason", finish),
                "token_ids": ids,
                "prompt_token_ids": prompt if prompt and not isinstance(prompt, str) else None,
                "logprobs": {
                    "token_logprobs": chosen["logprobs"],
                    "tokens": [f"token_id:{t}" for t in ids],
                    "top_logprobs": None,
                },
            }
            if body.get("prompt_logprobs") is not None and isinstance(prompt, list):
                scores = self.score(body["model"], prompt)
                entries = [{str(token): {"logprob": value, "rank": 1}} for token, value in zip(prompt[1:], scores, strict=True)]
                choice["prompt_logprobs"] = [None, *entries]
            choices.append(choice)
        return {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 1,
            "model": body["model"],
            "choices": choices,
            "usage": {},
        }

    async def _stream(self, request: web.Request, whole: dict[str, Any], do: str, arg: Any) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        stream.enable_chunked_encoding()
        await stream.prepare(request)
        choice = whole["choices"][0]
        for at, token in enumerate(choice["token_ids"]):
            if do in ("sse_cut", "sse_error") and at == arg:
                break
            last = at == len(choice["token_ids"]) - 1
            delta = {"index": 0, "text": choice["text"][at : at + 1], "token_ids": [token]}
            delta["finish_reason"] = choice["finish_reason"] if last else None
            await stream.write(event({"model": whole["model"], "choices": [delta]}))
        if do == "sse_cut":
            if request.transport is not None:
                request.transport.close()
            return stream
        if do == "sse_error":
            await stream.write(event({"error": {"message": "engine died", "type": "InternalServerError", "code": 500}}))
        await stream.write(b"data: [DONE]\n\n")
        await stream.write_eof()
        return stream


def event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def drop(request: web.Request) -> web.Response:
    """Close the connection without a reply."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def problem(code: int, message: str) -> web.Response:
    kind = {400: "BadRequestError", 404: "NotFoundError"}.get(code, "InternalServerError")
    return web.json_response({"error": {"message": message, "type": kind, "param": None, "code": code}}, status=code)
