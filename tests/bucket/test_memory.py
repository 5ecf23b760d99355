"""The bucket in the process: the whole contract, and that the URL is what is shared."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import settings

from grpod.bucket.memory import MemoryBucket
from tests.bucket.contract import BucketContract, keys_of, machine

_numbers = itertools.count()


class TestMemoryBucket(BucketContract):
    @pytest.fixture
    def open_again(self) -> Callable[[], MemoryBucket]:
        url = f"memory://contract-{next(_numbers)}"
        return lambda: MemoryBucket(url)


TestMemoryMachine = machine(lambda: MemoryBucket(f"memory://machine-{next(_numbers)}")).TestCase
TestMemoryMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None, database=None)


@pytest.mark.anyio
async def test_another_url_is_another_bucket():
    await MemoryBucket("memory://one").put({"a": b""})
    assert await keys_of(MemoryBucket("memory://two")) == []
