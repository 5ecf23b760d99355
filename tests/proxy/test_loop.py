"""The role: its listener, its state object, and its end."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest

from grpod.errors import ConfigError, NotReady
from grpod.proxy import loop
from grpod.wire import keys
from grpod.wire.state import ProxyState
from tests.fakes import FakeReplica
from tests.proxy.running import announced, context, running, until

pytestmark = pytest.mark.anyio


async def failure(**config: Any) -> BaseException:
    """What `run` raises, out of its groups."""
    folder = config.pop("folder", Path("/"))
    error: BaseException
    with pytest.raises((ConfigError, NotReady, BaseExceptionGroup)) as caught, anyio.fail_after(10):
        await loop.run(context(config, folder=folder))
    error = caught.value
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    return error


async def test_a_taken_port_is_named_and_systemd_may_try_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        error = await failure(listen=listen)
    assert isinstance(error, NotReady)
    assert error.exit_code == 75
    assert listen in str(error)


@pytest.mark.parametrize("listen", ["0.0.0.0:0", ":0", "[::]:0", "192.0.2.1:0"])
async def test_others_may_reach_it_only_with_a_token(listen: str) -> None:
    error = await failure(listen=listen)
    assert isinstance(error, ConfigError)
    assert "proxy.token_file" in str(error)


@pytest.mark.parametrize("listen", ["8000", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", "::1:8000", "127.0.0.1:"])
async def test_an_address_that_is_none_is_a_config_error(listen: str) -> None:
    error = await failure(listen=listen)
    assert isinstance(error, ConfigError)
    assert repr(listen) in str(error)


def test_addresses_are_read() -> None:
    assert loop.parse_listen("127.0.0.1:8000") == ("127.0.0.1", 8000)
    assert loop.parse_listen("[::1]:0") == ("::1", 0)
    assert loop.parse_listen("localhost:80") == ("localhost", 80)


@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff"])
async def test_a_token_file_without_a_token_is_a_config_error(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    error = await failure(token_file="token", folder=tmp_path)
    assert isinstance(error, ConfigError)
    assert str(tmp_path / "token") in str(error)


async def test_a_replica_that_is_no_url_is_a_config_error() -> None:
    error = await failure(replicas=["127.0.0.1:8001"])
    assert isinstance(error, ConfigError)
    assert "127.0.0.1:8001" in str(error)


async def state_of(bucket: Any) -> ProxyState:
    return ProxyState.decode((await bucket.get(keys.PROXY_STATE)).data, keys.PROXY_STATE)


async def test_its_state_names_its_urls_goes_on_counting_and_ends_empty() -> None:
    async with FakeReplica() as one:
        ctx = context({"replicas": [one.url], "url": "http://front.example:80"}, grace_s=1.0)
        before = ProxyState(counter=41, urls=["http://127.0.0.1:1"], updated_at=0.0)
        await ctx.bucket.put({keys.PROXY_STATE: before.encode()})
        async with anyio.create_task_group() as tasks:
            await tasks.start(lambda task_status: loop.run(ctx, task_status=task_status))
            while (state := await state_of(ctx.bucket)).counter == 41:
                await ctx.bucket.changed(1.0)
            assert state.counter == 42
            assert state.urls[0] == "http://front.example:80"
            assert state.urls[1].startswith("http://127.0.0.1:")
            assert list(state.replicas) == [one.url]
            ctx.stop.request("enough")
        last = await state_of(ctx.bucket)
        assert last.urls == []
        assert last.counter > 42


async def test_what_runs_at_the_stop_may_finish_and_nothing_new_is_taken() -> None:
    answers = []
    async with FakeReplica() as one, anyio.create_task_group() as tasks:
        one.spoil("delay", 0.3)
        async with running([one]) as proxy:

            async def ask() -> None:
                answers.append(await proxy.complete())

            tasks.start_soon(ask)
            await until(lambda: one.count("/v1/completions"))
            proxy.stop.request("enough")
            while (await state_of(proxy.bucket)).urls:
                await proxy.bucket.changed(1.0)
            with pytest.raises(OSError, match=r"refused|failed"):
                await anyio.connect_tcp("127.0.0.1", int(proxy.url.rpartition(":")[2]))
            await until(lambda: answers)
    assert answers[0][0] == 200


async def test_a_request_that_does_not_end_does_not_hold_up_the_stop() -> None:
    async with FakeReplica() as one, anyio.create_task_group() as tasks:
        one.spoil("hang")
        async with running([one]) as proxy:

            async def ask() -> None:
                with pytest.raises(aiohttp.ServerDisconnectedError):
                    await proxy.complete()

            tasks.start_soon(ask)
            await until(lambda: one.count("/v1/completions"))
            proxy.stop.request("enough")
            await until(lambda: one.gone)


async def test_it_is_found_by_its_state() -> None:
    async with running() as proxy:
        assert await announced(proxy.bucket) == proxy.url
