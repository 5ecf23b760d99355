"""vLLM's routes over one engine, on the event loop: it parses, waits, answers, and computes nothing.

A client that leaves cancels its work. An adapter is read in a thread of its own and appears whole; requests keep the one that
they began with. A name is never given to other weights unless the caller says `load_inplace`, and nothing is evicted.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, cast

import anyio
from aiohttp import web

from grpod.replica.embedded.engine import Engine
from grpod.replica.embedded.jobs import Job, seeded
from grpod.replica.embedded.lora import BadAdapter, Lora, NoAdapter
from grpod.replica.embedded.model import Model
from grpod.replica.embedded.protocol import Ask, Problem, answer, head, parse, part, usage
from grpod.replica.embedded.sampling import Sampling
from grpod.replica.embedded.text import Text

BODY_LIMIT = 64 << 20  # bytes
LONG_BODY = 256 << 10  # bytes from which on parsing leaves the event loop


class Server:
    """Owns the adapters' names. `engine` is set before it serves."""

    engine: Engine

    def __init__(self, model: Model, text: Text, *, name: str, max_model_len: int, max_loras: int, max_lora_rank: int) -> None:
        self._model, self._text = model, text
        self._name = name
        self._max_model_len, self._max_loras, self._max_lora_rank = max_model_len, max_loras, max_lora_rank
        self._loras: dict[str, Lora] = {}
        self._loading: set[str] = set()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=BODY_LIMIT, middlewares=[_problems])
        app.add_routes(
            [
                web.post("/v1/completions", self._completions),
                web.post("/v1/load_lora_adapter", self._load),
                web.post("/v1/unload_lora_adapter", self._unload),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/server_info", self._server_info),
                web.get("/metrics", self._metrics),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
            ]
        )
        return app

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        ask = await anyio.to_thread.run_sync(self._parse, raw) if len(raw) > LONG_BODY else self._parse(raw)
        lora = self._loras.get(ask.model)
        if ask.model != self._name and lora is None:
            raise Problem(404, f"The model `{ask.model}` does not exist.", param="model")
        async with self._submitted(ask, lora) as (jobs, moved):
            if ask.stream:
                return await self._stream(request, ask, jobs, moved)
            while not all(job.finished for job in jobs):
                await moved()
        return web.json_response(answer(ask, jobs, self._text.decode))

    def _parse(self, raw: bytes) -> Ask:
        return parse(_json(raw), encode=self._text.encode, vocab_size=self._model.vocab_size, max_model_len=self._max_model_len)

    @asynccontextmanager
    async def _submitted(self, ask: Ask, lora: Lora | None) -> AsyncIterator[tuple[list[Job], Callable[[], Awaitable[object]]]]:
        """One job a prompt; cancelled on leaving, unless finished. The function waits until some of them have moved on."""
        event = anyio.Event()

        async def moved() -> None:
            nonlocal event
            await event.wait()
            event = anyio.Event()

        jobs = [
            Job(
                prompt_ids=prompt_ids,
                choices=seeded(ask.n, ask.seed),
                max_tokens=ask.max_tokens,
                sampling=Sampling(temperature=ask.temperature, top_p=ask.top_p, top_k=ask.top_k),
                end_ids=ask.stop_token_ids | (frozenset() if ask.ignore_eos else self._model.end_ids),
                lora=lora,
                score=ask.prompt_logprobs,
                notify=lambda: event.set(),
                stream=ask.stream,
            )
            for prompt_ids in ask.prompts
        ]
        for job in jobs:
            self.engine.submit(job)
        try:
            yield jobs, moved
        finally:
            if not all(job.finished for job in jobs):
                for job in jobs:
                    job.cancelled = True
                self.engine.look()

    async def _stream(
        self, request: web.Request, ask: Ask, jobs: Sequence[Job], moved: Callable[[], Awaitable[object]]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        frame = head(ask)
        choices = [(job, choice) for job in jobs for choice in job.choices]
        sent = [0] * len(choices)
        ended = [False] * len(choices)
        while not all(ended):
            for index, (job, choice) in enumerate(choices):
                finish_reason = choice.finish_reason  # read first: once it is set, no token follows
                end = len(choice.logprobs)
                if ended[index] or (end == sent[index] and finish_reason is None):
                    continue
                text = self._text.decode_part(choice.token_ids, sent[index], end, last=finish_reason is not None)
                delta = part(ask, job, choice, index, sent[index], text, end)
                delta["finish_reason"] = finish_reason
                sent[index], ended[index] = end, finish_reason is not None
                await response.write(_event({**frame, "choices": [delta]}))
            if not all(ended):
                await moved()
        if ask.stream_usage:
            await response.write(_event({**frame, "choices": [], "usage": usage(jobs)}))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _load(self, request: web.Request) -> web.Response:
        body = _json(await request.read())
        name, path = (body.get("lora_name"), body.get("lora_path")) if isinstance(body, dict) else (None, None)
        if not (isinstance(name, str) and name and isinstance(path, str) and path):
            raise Problem(400, "Both 'lora_name' and 'lora_path' must be provided.")
        again = name in self._loras and body.get("load_inplace")
        if name in {self._name, *self._loading} or (name in self._loras and not again):
            hint = "If you want to load the adapter in place, set 'load_inplace' to True."
            raise Problem(400, f"The lora adapter '{name}' has already been loaded. {hint}")
        if not again and len(self._loras) + len(self._loading) >= self._max_loras:
            raise Problem(400, f"max_loras is {self._max_loras}, and as many adapters are loaded; unload one first.")
        self._loading.add(name)
        try:
            self._loras[name] = await anyio.to_thread.run_sync(self._read, name, path)
        except NoAdapter as error:
            raise Problem(404, f"Loading lora {name} failed: {error}") from None
        except BadAdapter as error:
            raise Problem(500, f"Loading lora {name} failed: {error}") from None
        finally:
            self._loading.discard(name)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    def _read(self, name: str, path: str) -> Lora:
        return self._model.loras.load(name, path, max_rank=self._max_lora_rank)

    async def _unload(self, request: web.Request) -> web.Response:
        body = _json(await request.read())
        name = body.get("lora_name") if isinstance(body, dict) else None
        if not isinstance(name, str) or self._loras.pop(name, None) is None:
            raise Problem(404, f"The lora adapter '{name}' cannot be found.")
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _models(self, request: web.Request) -> web.Response:
        def entry(name: str, **more: Any) -> dict[str, Any]:
            return {"id": name, "object": "model", "owned_by": "grpod", "permission": [], **more}

        base = entry(self._name, root=self._name, parent=None, max_model_len=self._max_model_len)
        loras = [entry(lora.name, root=lora.path, parent=self._name, max_model_len=None) for lora in self._loras.values()]
        return web.json_response({"object": "list", "data": [base, *loras]})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()  # an engine that failed has ended the process

    async def _server_info(self, request: web.Request) -> web.Response:
        model = {"dtype": self._model.dtype, "logprobs_mode": "processed_logprobs", "max_model_len": self._max_model_len}
        lora = {"max_lora_rank": self._max_lora_rank, "max_loras": self._max_loras}
        vllm = {"model_config": model, "lora_config": lora, "parallel_config": {"data_parallel_size": 1}}
        return web.json_response({"vllm_config": vllm})

    async def _metrics(self, request: web.Request) -> web.Response:
        engine = self.engine
        values = {
            "num_requests_running": ("gauge", engine.num_running),
            "num_requests_waiting": ("gauge", engine.num_waiting),
            "prompt_tokens_total": ("counter", engine.prompt_tokens),
            "generation_tokens_total": ("counter", engine.generated_tokens),
        }
        label = f'{{model_name="{self._name}"}}'
        lines = [f"# TYPE vllm:{name} {kind}\nvllm:{name}{label} {value}\n" for name, (kind, value) in values.items()]
        return web.Response(text="".join(lines))

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            raise Problem(400, f"mode must be abort, wait or keep, got {mode!r}")
        paused = anyio.Event()
        self.engine.pause(cast(Literal["abort", "wait", "keep"], mode), paused.set)
        await paused.wait()
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        self.engine.resume()
        return web.json_response({"status": "resumed"})


@web.middleware
async def _problems(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except Problem as problem:
        return web.json_response(problem.body(), status=problem.status)
    except web.HTTPException as error:  # no such route, wrong method, body too large
        return web.json_response(Problem(error.status, error.reason).body(), status=error.status)


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Problem(400, f"the body is not JSON: {error}") from None


def _event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"
