"""A token lies beside the config, is read anew for each request, and its absence is told by key and path."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog

from grpod.errors import ConfigError
from grpod.generator.token_file import TokenFile
from tests.generator.loops import liar, loop


def test_it_is_read_again_and_the_last_one_goes_on_when_it_is_gone(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one\n")
    token = TokenFile("proxy.token_file", "token", tmp_path)
    assert token() == "one"
    file.write_text("two")
    assert token() == "two"
    file.unlink()
    with structlog.testing.capture_logs() as logs:
        assert [token(), token()] == ["two", "two"]
    assert [(line["event"], line["path"]) for line in logs] == [("token_unreadable", str(file))]
    file.write_text("three")
    assert token() == "three"
    assert TokenFile("proxy.token_file", None, tmp_path)() is None


@pytest.mark.anyio
async def test_a_replicas_token_lies_beside_the_config(tmp_path: Path, tiny_base: Path) -> None:
    (tmp_path / "token").write_text("secret")
    async with liar() as replica:
        remote = {"url": replica.url, "token_file": "token"}
        outcome = await loop(tmp_path, tiny_base, replica, learner={"steps": 1}, generator={"remote": remote})
        assert outcome.error is None
        assert {seen.headers.get("authorization") for seen in replica.requests} == {"Bearer secret"}


@pytest.mark.anyio
@pytest.mark.parametrize("content", [None, " \n"], ids=["missing", "empty"])
async def test_a_token_that_is_not_there_is_a_config_error(tmp_path: Path, tiny_base: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "token").write_text(content)
    async with liar() as replica:
        remote = {"url": replica.url, "token_file": "token"}
        outcome = await loop(tmp_path, tiny_base, replica, generator={"remote": remote})
    assert isinstance(outcome.error, ConfigError)
    assert f"generator.remote.token_file {tmp_path / 'token'}" in str(outcome.error)
