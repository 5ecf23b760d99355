"""Requests to replicas and their answers back, byte for byte.

    completion ─▶ choose ─▶ attempt ──whole answer, or a stream's first event──▶ client
                    ▲          │ refused, reset, cut, 502-504, spoilt: all of it before the client has seen a byte
                    └──────────┘ another replica, config.proxy.retries times

Laws: a client sees one answer, of one replica, whole; or a stream of one replica that ends as it ended there, and breaks when
it broke there (never an invented [DONE], never a replay). A client that leaves takes its request upstream with it. A replica
that answers 404 for a live adapter has lost it: it is repaired, and the client does not notice.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import aiohttp
import anyio
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from grpod.proxy.answers import end_to_end, problem
from grpod.proxy.replicas import Fleet, Replica
from grpod.proxy.request import Job, request_headers
from grpod.proxy.routing import Ask, choose
from grpod.proxy.stream import Relay, first_event, is_error
from grpod.proxy.upstream import Sessions
from grpod.proxy.wanted import Live
from grpod.telemetry.log import get_logger

FAULTS = (aiohttp.ClientError, TimeoutError, OSError)  # of the upstream; never raised around a write to the client
RETRIED = {502, 503, 504}
_LENGTH = frozenset({"content-length"})  # of a body that is held whole: made anew
log = get_logger(role="proxy")


class Spoilt(Exception):
    """This replica did not answer, or not whole, and the client has seen nothing yet."""

    def __init__(self, why: str, what: str, *, answer: web.Response | None = None) -> None:
        super().__init__(what)
        self.why = why  # one word, for metrics
        self.answer = answer  # as it came, when there is nobody else to ask


class Missing(Exception):
    """404: the replica does not hold what it was asked for."""

    def __init__(self, name: str, answer: web.Response, *, edits: int) -> None:
        super().__init__(name)
        self.name, self.answer = name, answer
        self.edits = edits  # the replica's, when it was asked


@dataclass(kw_only=True)
class Outcome:
    """Of one request; each ends as exactly one of ok, failed_over, failed, refused, client_left."""

    word: str = "client_left"


class Forwarder:
    def __init__(self, fleet: Fleet, sessions: Sessions, *, retries: int, keep_token: bool) -> None:
        self._fleet = fleet
        self._sessions = sessions
        self._retries = retries
        self._keep_token = keep_token

    # -- completions: any replica that holds the model

    async def complete(self, request: web.Request, job: Job) -> web.StreamResponse:
        outcome = Outcome()
        try:
            return await self._complete(request, job, outcome)
        finally:
            self._fleet.tally["requests", outcome.word] += 1

    async def _complete(self, request: web.Request, job: Job, outcome: Outcome) -> web.StreamResponse:
        fleet = self._fleet
        deadline = anyio.current_time() + fleet.timing.patience_s
        avoid: set[str] = set()
        repaired: set[str] = set()
        failures: list[Spoilt] = []
        while len(failures) <= self._retries:
            changes = fleet.changes
            model = job.model or next(iter(fleet.bases()), "")
            live = fleet.wanted.find(model)
            choice = choose(fleet.views(), Ask(model=model, known=live is not None, avoid=frozenset(avoid)))
            fleet.tally["routed", choice.reason] += 1
            if choice.url is not None:
                replica = fleet.replicas[choice.url]
                try:
                    answer = await self._attempt(request, job, replica, model, live, outcome)
                except Missing as missing:
                    if replica.url in repaired or anyio.current_time() > deadline:
                        outcome.word = "refused"
                        return missing.answer
                    if fleet.lost(replica, missing.name, edits=missing.edits):
                        repaired.add(replica.url)
                except Spoilt as spoilt:
                    log.warning("answer_spoilt", url=replica.url, why=spoilt.why, what=str(spoilt))
                    failures.append(spoilt)
                    avoid.add(replica.url)
                else:
                    outcome.word = "failed_over" if failures and outcome.word == "ok" else outcome.word
                    return answer
            elif choice.reason == "unknown_model":
                outcome.word = "refused"
                return problem(404, f"The model `{model}` does not exist.")
            elif choice.reason == "none_holds_it":  # one may be starting again, or catching up
                with anyio.CancelScope(deadline=deadline) as waiting:
                    await changes.wait()
                avoid.clear()
                if waiting.cancelled_caught:
                    break
            else:
                break
        outcome.word = "failed"
        return self._failure(failures)

    async def _attempt(
        self, request: web.Request, job: Job, replica: Replica, model: str, live: Live | None, outcome: Outcome
    ) -> web.StreamResponse:
        """Raises `Spoilt` or `Missing`, as long as the client has seen nothing."""
        name = model if live is None else replica.loaded[live]
        renamed, edits = name != model, replica.edits
        with self._in_flight(replica, job, live):
            async with self._opened(replica, job.method, job.target, job.headers, job.body_for(name)) as upstream:
                if upstream.status == 200 and upstream.content_type == "text/event-stream":
                    return await self._stream(request, upstream, replica, Relay(upstream_name=name, name=model), outcome)
                raw = await upstream.read()
                headers = end_to_end(upstream.headers, without=_LENGTH)
            answer = web.Response(status=upstream.status, body=raw, headers=headers)
            if answer.status in RETRIED:
                raise self._struck(replica, f"status_{answer.status}", raw[:200].decode(errors="replace"), answer)
            if answer.status == 404 and name.encode() in raw:
                raise Missing(name, answer, edits=edits)
            if answer.status == 200 and "Content-Encoding" not in headers:
                document = _completion(raw)
                if document is None:
                    raise self._struck(replica, "unusable", f"200 with {raw[:200]!r}", None)
                if renamed:
                    answer.body = json.dumps({**document, "model": model}).encode()
            if answer.status < 500:
                replica.strikes = 0
            outcome.word = "ok" if answer.status < 400 else "refused" if answer.status < 500 else "failed"
            return answer

    async def _stream(
        self, request: web.Request, upstream: aiohttp.ClientResponse, replica: Replica, relay: Relay, outcome: Outcome
    ) -> web.StreamResponse:
        opaque = "Content-Encoding" in upstream.headers  # packed: passed on unseen
        data = await (upstream.content.readany() if opaque else first_event(upstream.content))
        if not opaque and is_error(data):
            answer = problem(502, f"the stream failed before its first event: {data[:500].decode(errors='replace')}")
            raise self._struck(replica, "no_event", f"stream began with {data[:200]!r}", answer)
        response = web.StreamResponse(status=200, headers=end_to_end(upstream.headers))
        broken = ""
        try:
            await response.prepare(request)
            while data:
                if passed := data if opaque else relay.feed(data):
                    await response.write(passed)
                try:
                    data = await upstream.content.readany()
                except FAULTS as error:
                    broken = f"{type(error).__name__}: {error}"
                    break
            if not broken and (rest := relay.end()):
                await response.write(rest)
        except ConnectionError:
            return response  # the client left
        if not broken and not opaque and not relay.done:
            broken = "it ended without [DONE]"
        if broken or relay.error:
            self._struck(replica, "stream", broken or "error event", None)
            outcome.word = "failed"
        else:
            replica.strikes = 0
            outcome.word = "ok"
        if broken:
            log.warning("stream_broke", url=replica.url, what=broken)
            _break(request)
        return response

    # -- the rest: any replica

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """GET and HEAD of paths that the proxy does not know."""
        headers = request_headers(request, keep_token=self._keep_token)
        up = [replica for replica in self._fleet.replicas.values() if replica.up]
        failures: list[Spoilt] = []
        for replica in sorted(up, key=lambda replica: (replica.outstanding, replica.url))[: self._retries + 1]:
            try:
                async with self._opened(replica, request.method, request.rel_url.raw_path_qs, headers, None) as upstream:
                    return await self._copy(request, upstream)
            except Spoilt as spoilt:
                failures.append(spoilt)
        return self._failure(failures)

    async def _copy(self, request: web.Request, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(status=upstream.status, headers=end_to_end(upstream.headers))
        try:
            await response.prepare(request)
            while True:
                try:
                    chunk = await upstream.content.readany()
                except FAULTS as error:
                    log.warning("answer_broke", path=request.path, what=f"{type(error).__name__}: {error}")
                    _break(request)
                    break
                if not chunk:
                    break
                await response.write(chunk)
        except ConnectionError:
            pass  # the client left
        return response

    # -- shared

    @asynccontextmanager
    async def _opened(
        self, replica: Replica, method: str, target: str, headers: CIMultiDict[str], body: bytes | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer's headers have come. Faults of the upstream inside the block, too, become `Spoilt`."""
        try:
            upstream = await self._sessions.request(method, URL(replica.url + target, encoded=True), headers=headers, data=body)
            async with upstream:
                yield upstream
        except aiohttp.ClientConnectorError as error:
            self._fleet.down(replica, f"connection refused: {error}")
            raise self._struck(replica, "refused", str(error), None) from error
        except FAULTS as error:
            replica.look.set()
            raise self._struck(replica, "cut", f"{type(error).__name__}: {error}", None) from error

    @contextmanager
    def _in_flight(self, replica: Replica, job: Job, live: Live | None) -> Iterator[None]:
        replica.outstanding += job.cost
        replica.requests += 1
        if live is not None:
            self._fleet.wanted.begin(live)
        try:
            yield
        finally:
            replica.outstanding -= job.cost
            if live is not None and self._fleet.wanted.end(live):
                self._fleet.changed()  # it may be unloaded now

    def _struck(self, replica: Replica, why: str, what: str, answer: web.Response | None) -> Spoilt:
        self._fleet.struck(replica, why)
        return Spoilt(why, what, answer=answer)

    def _failure(self, failures: list[Spoilt]) -> web.Response:
        if failures:
            last = failures[-1]
            words = "; ".join(f"{spoilt.why}: {spoilt}" for spoilt in failures)
            return last.answer or problem(502, f"no replica gave a whole answer ({words})"[:2000])
        down: Mapping[str, str] = {replica.url: replica.error or "no answer yet" for replica in self._fleet.replicas.values()}
        return problem(503, f"no replica can take this now: {down or 'none is known'}", headers={"Retry-After": "1"})


def _completion(raw: bytes) -> dict[str, object] | None:
    """None: not the whole answer to a completion."""
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and document.get("choices") else None


def _break(request: web.Request) -> None:
    """End the connection so that the client sees that the answer is not whole."""
    if request.transport is not None:
        request.transport.close()
