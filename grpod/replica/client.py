"""The one client of a replica's HTTP dialect (vLLM's), used by generators and by the proxy.

    completions ─▶ connections of their own, any number ─┐
    control     ─▶ connections of their own ─────────────┼─▶ replica     load, unload, pause, health: never behind completions
    second try  ─▶ always a fresh connection ────────────┘

vLLM closes a connection that was idle for 5 s; ours are dropped before. If one is reset all the same before the first byte of
an answer, the request is sent once more on a fresh connection. There is no other retry here: callers know better what to do.
Who leaves the context makes what is still asked fail as `Unavailable`. Redirects are not followed: a token must not travel to
another host.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp

from grpod.replica.answers import Answer, Choice, CompletionRequest, parse_completion, parse_score
from grpod.replica.errors import Refused, Unavailable, UnknownAdapter, UnusableAnswer
from grpod.replica.load import Load, parse_load

__all__ = [
    "Answer",
    "Choice",
    "CompletionRequest",
    "Refused",
    "ReplicaClient",
    "ServerInfo",
    "Unavailable",
    "UnknownAdapter",
    "UnusableAnswer",
]

_NOT_FINITE = "float values are not JSON compliant"
IDLE_S = 3.0  # below vLLM's 5
RETRY_LATER = {408, 425, 429}  # 4xx that are about the moment, not about the request


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    max_loras: int
    """0: the server has no LoRA"""
    max_cpu_loras: int | None
    """None: the server does not tell"""
    max_lora_rank: int
    data_parallel_size: int
    dtype: str
    """float32, bfloat16, …; empty when it does not tell"""
    max_model_len: int | None
    logprobs_mode: str
    """processed_logprobs is what a learner needs; empty when it does not tell"""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds. Generous: a slow answer is not a fault; finite: nothing waits for ever."""

    connect: float = 10.0
    completion: float = 3600.0
    control: float = 900.0
    """load, unload, pause: vLLM may read an adapter from a slow disk, or wait for what runs"""
    query: float = 60.0
    """models, server_info: vLLM's first server_info takes seconds"""
    health: float = 10.0


class ReplicaClient:
    """An async context manager. Each method raises the classes of `replica/errors.py`, as far as their calls can meet them."""

    def __init__(self, url: str, *, token: Callable[[], str | None] | None = None, timeouts: Timeouts | None = None) -> None:
        self.url = url.rstrip("/")
        self._token = token  # asked again for each request: tokens are rotated
        self._timeouts = timeouts or Timeouts()
        self._exits = AsyncExitStack()
        self.outstanding = 0  # completions, scores, loads and the like that were sent and are not answered yet

    async def __aenter__(self) -> Self:
        async def session(**connections: Any) -> aiohttp.ClientSession:
            return await self._exits.enter_async_context(
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0, **connections), cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
                )
            )

        self._completions = await session(keepalive_timeout=IDLE_S)
        self._control = await session(keepalive_timeout=IDLE_S)
        self._fresh = await session(force_close=True)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        await self._exits.aclose()

    async def complete(self, request: CompletionRequest, *, timeout_s: float | None = None) -> Answer:
        limit_s = timeout_s or self._timeouts.completion
        data = await self._post("/v1/completions", request.body(), self._completions, limit_s, request.model)
        return parse_completion(data, request)

    async def score(self, model: str, token_ids: Sequence[int]) -> list[float]:
        """log p(token_ids[i+1] | token_ids[..i]) at temperature 1: one value less than there are tokens."""
        body = {"model": model, "prompt": list(token_ids), "n": 1, "max_tokens": 1, "temperature": 1.0}
        body |= {"prompt_logprobs": 0, "return_token_ids": True}
        data = await self._post("/v1/completions", body, self._completions, self._timeouts.completion, model)
        return parse_score(data, model=model, token_ids=token_ids)

    async def load_adapter(self, name: str, path: str) -> None:
        """`path` is a folder on the replica's host. `Unavailable` with status 500: vLLM cannot use what lies there."""
        body = {"lora_name": name, "lora_path": path}
        tries = _Tries()
        try:
            await self._post("/v1/load_lora_adapter", body, self._control, self._timeouts.control, tries=tries)
        except Refused as refused:
            if not (tries.again and refused.status == 400 and "already been loaded" in refused.message):
                raise
            # Was it loaded by our own try whose answer was lost, or long ago with other files? Only a new load tells.
            await self.unload_adapter(name)
            await self._post("/v1/load_lora_adapter", body, self._control, self._timeouts.control)

    async def unload_adapter(self, name: str) -> None:
        """Requests that run under it finish. Raises `UnknownAdapter` when the replica does not hold it."""
        tries = _Tries()
        try:
            await self._post(
                "/v1/unload_lora_adapter", {"lora_name": name}, self._control, self._timeouts.control, name, tries=tries
            )
        except UnknownAdapter:
            if not tries.again:  # else the try whose answer was lost has unloaded it
                raise

    async def models(self) -> list[str]:
        """Names that the replica answers to, the base first."""
        return [str(entry["id"]) for entry in await self._listed_models()]

    async def health(self) -> bool:
        return not await self.ailment()

    async def ailment(self) -> str:
        """Why it is not healthy, in words; empty when it is."""
        try:
            await self._send("GET", "/health", None, self._control, self._timeouts.health)
        except Unavailable as error:
            return str(error)
        except Refused as error:
            return f"/health: {error}"
        return ""

    async def server_info(self) -> ServerInfo:
        info = await self._get_json("/server_info?config_format=json")
        vllm = _mapping(info.get("vllm_config"))
        lora, parallel, model = (_mapping(vllm.get(f"{part}_config")) for part in ("lora", "parallel", "model"))
        listed = await self._listed_models()
        limit = (listed[0] if listed else {}).get("max_model_len") or model.get("max_model_len")
        return ServerInfo(
            max_loras=int(lora.get("max_loras") or 0),
            max_cpu_loras=None if lora.get("max_cpu_loras") is None else int(lora["max_cpu_loras"]),
            max_lora_rank=int(lora.get("max_lora_rank") or 0),
            data_parallel_size=int(parallel.get("data_parallel_size") or 1),
            dtype=str(model.get("dtype") or "").removeprefix("torch."),
            max_model_len=None if limit is None else int(limit),
            logprobs_mode=str(model.get("logprobs_mode") or ""),
        )

    async def load(self) -> Load | None:
        """None: the server does not tell. Raises `UnusableAnswer` too."""
        data = await self._send("GET", "/metrics", None, self._control, self._timeouts.health)
        try:
            return parse_load(data.decode(errors="replace"))
        except ValueError as error:
            raise UnusableAnswer("metrics", f"/metrics: {error}") from None

    async def pause(self, mode: Literal["abort", "wait", "keep"] = "keep") -> None:
        await self._post(f"/pause?mode={mode}", None, self._control, self._timeouts.control)

    async def resume(self) -> None:
        await self._post("/resume", None, self._control, self._timeouts.control)

    async def _listed_models(self) -> list[Mapping[str, Any]]:
        listed = (await self._get_json("/v1/models")).get("data")
        if not isinstance(listed, list) or not all(isinstance(entry, dict) and "id" in entry for entry in listed):
            raise UnusableAnswer("json", f"/v1/models lists {listed!r:.80}")
        return listed

    async def _get_json(self, path: str) -> dict[str, Any]:
        data = await self._send("GET", path, None, self._control, self._timeouts.query)
        try:
            document = json.loads(data)
        except ValueError as error:
            raise UnusableAnswer("json", f"{path}: {error}") from None
        if not isinstance(document, dict):
            raise UnusableAnswer("json", f"{path}: a JSON object was expected, got {document!r:.80}")
        return document

    async def _post(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        session: aiohttp.ClientSession,
        timeout_s: float,
        model: str | None = None,
        *,
        tries: _Tries | None = None,
    ) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        self.outstanding += 1
        try:
            return await self._send("POST", path, data, session, timeout_s, tries)
        except Refused as refused:
            # a 404 may also be a wrong path: only one that speaks of the name says that the name is unknown
            if refused.status == 404 and model is not None and model in refused.message:
                raise UnknownAdapter(404, refused.message) from None
            if refused.status == 400 and _NOT_FINITE in refused.message:  # what vLLM says instead of NaN among the log-probs
                raise UnusableAnswer("logprobs_not_finite", f"{path}: {refused.message}") from None
            raise
        finally:
            self.outstanding -= 1

    async def _send(
        self,
        method: str,
        path: str,
        data: bytes | None,
        session: aiohttp.ClientSession,
        timeout_s: float,
        tries: _Tries | None = None,
    ) -> bytes:
        """The body of a 200. Raises `Unavailable` and `Refused`."""
        if session.closed:
            raise Unavailable(self.url, f"{path}: this client was left")
        token = self._token() if self._token is not None else None
        headers = {"Content-Type": "application/json"} if data is not None else {}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        options: dict[str, Any] = {
            "data": data,
            "headers": headers,
            "allow_redirects": False,
            "timeout": aiohttp.ClientTimeout(total=timeout_s, sock_connect=self._timeouts.connect),
        }
        try:
            try:
                response = await session.request(method, self.url + path, **options)
            except aiohttp.ClientConnectorError:
                raise  # nobody listens: a fresh connection is what just failed
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if self._fresh.closed:  # left meanwhile: it is we who have cut the connection
                    raise
                if tries is not None:
                    tries.again = True
                response = await self._fresh.request(method, self.url + path, **options)
            async with response:
                answer = await response.read()
        except TimeoutError:
            limits = f"{self._timeouts.connect:g} s to connect, {timeout_s:g} s in all"
            raise Unavailable(self.url, f"{path} was not answered in time ({limits})") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise Unavailable(self.url, f"{path}: {type(error).__name__}: {error}") from error
        if response.status == 200:
            return answer
        message = _message(answer)
        if response.status >= 500 or response.status in RETRY_LATER:
            raise Unavailable(self.url, f"{path} answered {response.status}: {message}", status=response.status)
        if 300 <= response.status < 400:
            message = f"redirects are not followed (to {response.headers.get('Location')!r})"
        raise Refused(response.status, message)


@dataclass
class _Tries:
    again: bool = False  # was the request sent a second time?


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _message(body: bytes) -> str:
    """The words in an error body, whichever of the usual shapes it has."""
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    if isinstance(document, dict):
        error = document.get("error", document)
        words = error.get("message") or error.get("detail") if isinstance(error, dict) else error
        if words:
            return str(words)[:2000]
    return body[:2000].decode(errors="replace")
