"""Requests and answers through the proxy: the same bytes, whole or not at all."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import anyio
import pytest
from aiohttp import web
from yarl import URL

from tests.fakes import FakeReplica
from tests.proxy.running import Proxy, running, until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def pair() -> AsyncIterator[tuple[FakeReplica, FakeReplica, Proxy]]:
    """A is asked first: a tie goes to the lowest URL."""
    async with FakeReplica() as one, FakeReplica() as two, running([one, two]) as proxy:
        first, second = sorted((one, two), key=lambda replica: replica.url)
        yield first, second, proxy


def asked(replica: FakeReplica) -> list[Any]:
    return [seen.body for seen in replica.requests if seen.path == "/v1/completions"]


class Recorder:
    """A server that keeps what it got, byte for byte, and answers as told."""

    def __init__(self) -> None:
        self.got: list[tuple[web.Request, bytes]] = []
        self.answer: Any = lambda request: web.json_response({"choices": [{"text": "x"}]})
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        match request.path:
            case "/health":
                return web.Response()
            case "/v1/models":
                return web.json_response({"data": [{"id": "base", "max_model_len": 64}]})
            case "/server_info":
                return web.json_response({})
        self.got.append((request, await request.read()))
        answer: web.StreamResponse = self.answer(request)
        return answer


@pytest.fixture
async def recorder() -> AsyncIterator[Recorder]:
    recorder = Recorder()
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", recorder.handle)
    runner = web.AppRunner(app, auto_decompress=False)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    recorder.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield recorder
    await runner.cleanup()


async def test_body_and_query_arrive_byte_for_byte(recorder: Recorder) -> None:
    body = b'{ "model":"base",\n "prompt" : "\xc3\xa9 \\u00e9", "x": 1e400, "max_tokens":1, "max_tokens": 2}'
    async with running([recorder.url]) as proxy:
        url = URL(proxy.url + "/v1/completions?a=%2F&b=+", encoded=True)
        async with proxy.http.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
            assert answer.status == 200
    request, got = recorder.got[0]
    assert got == body
    assert request.raw_path == "/v1/completions?a=%2F&b=+"
    assert request.headers["Content-Length"] == str(len(body))


async def test_no_hop_by_hop_header_crosses_in_either_direction(recorder: Recorder) -> None:
    hop = {"Keep-Alive": "9", "Upgrade": "x", "Trailer": "x", "Proxy-Authenticate": "x", "X-Secret-Hop": "1"}
    recorder.answer = lambda request: web.json_response(
        {"error": {}}, status=400, headers={"Connection": "keep-alive, X-Secret-Hop", **hop, "X-End": "yes"}
    )
    sent = {"Connection": "close, X-Hop", "X-Hop": "1", "TE": "x", "Proxy-Authorization": "x", "X-End": "yes"}
    async with (
        running([recorder.url]) as proxy,
        proxy.http.post(proxy.url + "/v1/completions", json={"model": "base"}, headers=sent) as answer,
    ):
        assert answer.status == 400
        assert await answer.json() == {"error": {}}
        assert answer.headers["X-End"] == "yes"
        assert not hop.keys() & answer.headers.keys()
        assert "X-Secret-Hop" not in answer.headers.get("Connection", "")
        assert ("Content-Length" in answer.headers) != ("Transfer-Encoding" in answer.headers)
    got = recorder.got[0][0].headers
    assert got["X-End"] == "yes"
    assert not {"X-Hop", "TE", "Proxy-Authorization"} & got.keys()
    assert "X-Hop" not in got.get("Connection", "")


@pytest.mark.parametrize("accepted", ["gzip", "identity"])
async def test_a_packed_answer_is_passed_on_with_the_header_that_is_true_of_it(recorder: Recorder, accepted: str) -> None:
    answer = json.dumps({"choices": [{"text": "packed"}]}).encode()
    recorder.answer = lambda request: web.Response(
        body=gzip.compress(answer), headers={"Content-Encoding": "gzip", "Content-Type": "application/json"}
    )
    async with running([recorder.url]) as proxy:
        code, got = await proxy.post("/v1/completions", {"model": "base"}, headers={"Accept-Encoding": accepted})
    assert (code, got) == (200, json.loads(answer))
    assert recorder.got[0][0].headers["Accept-Encoding"] == accepted


async def test_a_packed_request_is_understood_and_an_unknown_packing_is_415(recorder: Recorder) -> None:
    body = b'{"model": "base", "prompt": "' + b"x" * 5000 + b'"}'
    async with running([recorder.url]) as proxy:
        code, _ = await proxy.post("/v1/completions", data=gzip.compress(body), headers={"Content-Encoding": "gzip"})
        assert code == 200
        code, error = await proxy.post("/v1/completions", data=b"xx", headers={"Content-Encoding": "snappy"})
        assert (code, error["error"]["code"]) == (415, 415)
    (request, got), *more = recorder.got
    assert not more
    assert got == body
    assert "Content-Encoding" not in request.headers


async def test_a_large_body_arrives_and_one_over_the_limit_is_413_as_json(recorder: Recorder) -> None:
    ids = json.dumps({"model": "base", "prompt": list(range(700_000))}).encode()  # 5 MB
    async with running([recorder.url]) as proxy:
        code, _ = await proxy.post("/v1/completions", data=io.BytesIO(ids))
        assert code == 200
        assert recorder.got.pop()[1] == ids

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(80):
                yield b" " * (1 << 20)

        for data in (io.BytesIO(b" " * (80 << 20)), endless()):
            code, error = await proxy.post("/v1/completions", data=data)
            assert (code, error["error"]["code"]) == (413, 413)
    assert not recorder.got


async def test_a_hundred_requests_on_one_connection_get_a_hundred_answers(recorder: Recorder) -> None:
    async with running([recorder.url]) as proxy, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as http:
        for number in range(100):
            async with http.post(proxy.url + "/v1/completions", json={"model": "base", "prompt": [number]}) as answer:
                assert answer.status == 200
    assert [json.loads(body)["prompt"] for _, body in recorder.got] == [[number] for number in range(100)]


async def test_an_unknown_model_is_404_without_an_upstream_call(pair: tuple[FakeReplica, FakeReplica, Proxy]) -> None:
    first, second, proxy = pair
    code, error = await proxy.complete("v9")
    assert code == 404
    assert "v9" in error["error"]["message"]
    assert not asked(first) + asked(second)


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b'{"model": 5}', b"[" * 100_000])
async def test_a_bad_body_is_400_without_an_upstream_call(pair: tuple[FakeReplica, FakeReplica, Proxy], body: bytes) -> None:
    first, second, proxy = pair
    code, error = await proxy.post("/v1/completions", data=body)
    assert (code, error["error"]["code"]) == (400, 400)
    assert not asked(first) + asked(second)


async def test_a_request_without_a_model_goes_to_the_base(recorder: Recorder) -> None:
    async with running([recorder.url]) as proxy:
        assert (await proxy.post("/v1/completions", {"prompt": [1]}))[0] == 200
    assert json.loads(recorder.got[0][1]) == {"prompt": [1]}


async def test_the_least_loaded_replica_is_asked(pair: tuple[FakeReplica, FakeReplica, Proxy]) -> None:
    first, second, proxy = pair
    first.spoil("hang", times=1)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(proxy.complete)
            await proxy.until(lambda status: any(r["outstanding_tokens"] for r in status["replicas"]))
            for _ in range(3):
                assert (await proxy.complete())[0] == 200
            scope.cancel()
    assert (len(asked(first)), len(asked(second))) == (1, 3)


@pytest.mark.parametrize(
    ("do", "arg"),
    [
        ("refuse", None),
        ("lose", None),
        ("status", (502, "bad gateway")),
        ("status", (503, "busy")),
        ("status", (504, "late")),
        ("cut", 10),
        ("chunk_cut", 10),
        ("raw", lambda data: data[:20]),
        ("raw", lambda data: b""),
        ("raw", lambda data: b'{"error": {"message": "no"}}'),
    ],
)
async def test_an_answer_that_is_not_whole_comes_from_the_other_replica(
    pair: tuple[FakeReplica, FakeReplica, Proxy], do: str, arg: Any
) -> None:
    first, second, proxy = pair
    code, right = await proxy.complete(seed=7)
    assert code == 200
    first.spoil(do, arg)
    for number in range(4):
        assert await proxy.complete(seed=7) == (200, right), number
    assert asked(second)[0] == asked(first)[0]
    assert (await proxy.status())["replicas"][0]["strikes"] + (await proxy.status())["replicas"][1]["strikes"] >= 3
    counters = await proxy.counters()
    assert counters["ok"] + counters["failed_over"] == 5
    assert counters["failed_over"] >= 1


async def test_a_dead_replica_is_failed_over_and_back_when_it_is_up_again(
    pair: tuple[FakeReplica, FakeReplica, Proxy],
) -> None:
    first, second, proxy = pair
    await first.die()
    assert (await proxy.complete())[0] == 200
    await proxy.until(lambda status: [r["state"] for r in status["replicas"] if r["url"] == first.url] == ["down"])
    assert len(asked(second)) == 1
    await first.start()
    await proxy.all_up(2)
    assert (await proxy.complete())[0] == 200
    assert len(asked(first)) == 1


async def test_when_every_replica_fails_the_last_answer_goes_back(pair: tuple[FakeReplica, FakeReplica, Proxy]) -> None:
    first, second, proxy = pair
    for replica in (first, second):
        replica.spoil("status", (503, '{"error": {"message": "busy"}}'))
    assert await proxy.complete() == (503, {"error": {"message": "busy"}})
    assert len(asked(first)) == len(asked(second)) == 1
    first.spoilings.clear()
    second.spoilings.clear()
    for replica in (first, second):
        replica.spoil("cut", 10)
    code, error = await proxy.complete()
    assert code == 502
    assert "cut" in error["error"]["message"]
    assert await proxy.counters() == {"failed": 2}


async def test_a_400_or_500_is_passed_on_as_it_came(pair: tuple[FakeReplica, FakeReplica, Proxy]) -> None:
    first, second, proxy = pair
    first.spoil("status", (400, '{"error": {"message": "too long"}}'), times=1)
    assert await proxy.complete() == (400, {"error": {"message": "too long"}})
    first.spoil("status", (500, '{"error": {"message": "engine"}}'), times=1)
    assert await proxy.complete() == (500, {"error": {"message": "engine"}})
    assert not asked(second)
    assert await proxy.counters() == {"refused": 1, "failed": 1}


async def test_redirects_are_not_followed(pair: tuple[FakeReplica, FakeReplica, Proxy]) -> None:
    first, second, proxy = pair
    first.spoil("redirect", second.url + "/v1/completions")
    async with proxy.http.post(proxy.url + "/v1/completions", json={"model": "base"}, allow_redirects=False) as answer:
        assert answer.status == 307
    assert not asked(second)


# -- streams


async def test_a_stream_passes_event_by_event() -> None:
    gates = [anyio.Event() for _ in range(3)]
    events = [b'data: {"choices": [{"text": "a"}]}\n\n', b"data: [DONE]\n\n"]

    async def slow(request: web.Request) -> web.StreamResponse:
        if request.path != "/v1/completions":
            return web.json_response({"data": [{"id": "base"}]})
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        for gate, event in zip(gates, events, strict=False):
            await gate.wait()
            await stream.write(event)
        return stream

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", slow)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with running([f"http://127.0.0.1:{runner.addresses[0][1]}"]) as proxy:
        gates[0].set()
        async with proxy.http.post(proxy.url + "/v1/completions", json={"model": "base", "stream": True}) as answer:
            assert answer.content_type == "text/event-stream"
            assert await answer.content.readany() == events[0]  # while the replica has not sent the second
            gates[1].set()
            assert await answer.content.read() == events[1]
        assert await proxy.counters() == {"ok": 1}
    await runner.cleanup()


@pytest.mark.parametrize("do", ["sse_cut", "sse_error"])
async def test_a_stream_that_fails_before_its_first_event_comes_from_the_other_replica(
    pair: tuple[FakeReplica, FakeReplica, Proxy], do: str
) -> None:
    first, second, proxy = pair
    first.spoil(do, 0)
    code, text = await proxy.complete(stream=True)
    assert code == 200
    assert text.endswith("data: [DONE]\n\n")
    assert "error" not in text
    assert len(asked(first)) == len(asked(second)) == 1
    assert await proxy.counters() == {"failed_over": 1}


async def test_a_stream_that_breaks_later_breaks_for_the_client(pair: tuple[FakeReplica, FakeReplica, Proxy]) -> None:
    first, second, proxy = pair
    for replica in (first, second):
        replica.choose = lambda body, index: {"token_ids": [5, 6, 7, 8], "logprobs": [-1.0] * 4}
        replica.spoil("sse_cut", 2)
    async with proxy.http.post(proxy.url + "/v1/completions", json={"model": "base", "prompt": [1], "stream": True}) as answer:
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    assert len(asked(first) + asked(second)) == 1
    assert await proxy.counters() == {"failed": 1}


async def test_an_error_event_in_a_stream_is_passed_on_as_it_came(pair: tuple[FakeReplica, FakeReplica, Proxy]) -> None:
    first, second, proxy = pair
    for replica in (first, second):
        replica.choose = lambda body, index: {"token_ids": [5, 6, 7, 8], "logprobs": [-1.0] * 4}
        replica.spoil("sse_error", 2)
    code, text = await proxy.complete(stream=True)
    assert code == 200
    assert text.count("choices") == 2
    assert "engine died" in text
    assert await proxy.counters() == {"failed": 1}


# -- clients that leave


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_takes_its_request_upstream_with_it(
    pair: tuple[FakeReplica, FakeReplica, Proxy], stream: bool
) -> None:
    first, second, proxy = pair
    first.spoil("hang")
    second.spoil("hang")
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                await proxy.complete(stream=stream)

            for _ in range(10):
                tasks.start_soon(ask)
            await until(lambda: len(asked(first) + asked(second)) == 10)
            scope.cancel()
    await proxy.until(lambda status: not any(r["outstanding_tokens"] for r in status["replicas"]))
    await until(lambda: first.gone + second.gone == 10)
    status = await proxy.status()
    assert [r["strikes"] for r in status["replicas"]] == [0, 0]
    assert await proxy.counters() == {"client_left": 10}


# -- the rest


async def test_other_gets_reach_a_replica_and_other_posts_do_not(pair: tuple[FakeReplica, FakeReplica, Proxy]) -> None:
    first, second, proxy = pair
    first.spoil("status", (200, "{}", {"X-From": "replica"}), path="/version", method="GET|HEAD")
    assert await proxy.get("/version") == (200, {})
    async with proxy.http.head(proxy.url + "/version") as answer:
        assert (answer.status, answer.headers["X-From"], await answer.read()) == (200, "replica", b"")
    for path in ("/reset_prefix_cache", "/sleep", "/collective_rpc", "/init_weight_transfer_engine"):
        assert (await proxy.post(path))[0] in (404, 501)
        assert first.count(path) + second.count(path) == 0
    assert (await proxy.get("/get_world_size"))[0] == 501


async def test_a_204_has_no_body(recorder: Recorder) -> None:
    recorder.answer = lambda request: web.Response(status=204)
    async with running([recorder.url]) as proxy, proxy.http.get(proxy.url + "/anything") as answer:
        assert (answer.status, await answer.read()) == (204, b"")
        assert "Transfer-Encoding" not in answer.headers
