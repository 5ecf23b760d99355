"""What every backend promises, as one suite: a backend's test file subclasses `BucketContract` and says how to open one.

    class TestMemoryBucket(BucketContract):
        @pytest.fixture
        def open_again(self): ...      # called twice, it opens the same empty bucket twice

and the same promises as a random walk beside a dict: `machine(make)` is a hypothesis state machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from grpod.bucket.base import Bucket, ObjectMeta
from grpod.errors import AlreadyExists, BucketError, NotFound

UNSAFE = [
    "",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "a/../b",
    ".hidden",
    "a/.tmp",
    "a b",
    "é",
    "a\n",
    "a\\b",
    "a?b",
    "a#b",
    "a%2Fb",
    "x" * 201,
]


async def keys_of(bucket: Bucket, folder: str = "", after: str | None = None) -> list[str]:
    return [meta.key async for meta in bucket.list(folder, after=after)]


class BucketContract:
    @pytest.fixture
    def open_again(self, tmp_path: Path) -> Callable[[], Bucket]:
        raise NotImplementedError

    @pytest.fixture
    def bucket(self, open_again: Callable[[], Bucket]) -> Bucket:
        return open_again()

    @pytest.mark.anyio
    async def test_a_put_is_seen_by_every_reader_when_it_returns(self, bucket, open_again):
        await bucket.put({"run.json": b"{}", "a/b/c.bin": b"\x00\x01"})
        for reader in (bucket, open_again()):
            found = await reader.get("a/b/c.bin")
            assert (found.data, found.meta.key, found.meta.size) == (b"\x00\x01", "a/b/c.bin", 2)
            assert (await reader.stat(["a/b/c.bin"]))["a/b/c.bin"] == found.meta
            assert [meta async for meta in reader.list("a")] == [found.meta]

    @pytest.mark.anyio
    async def test_an_empty_object_is_an_object(self, bucket, tmp_path):
        await bucket.put({"a/empty": b""})
        assert (await bucket.get("a/empty")).data == b""
        assert (await bucket.stat(["a/empty"]))["a/empty"].size == 0
        await bucket.fetch({"a/empty": tmp_path / "out"})
        assert (tmp_path / "out").read_bytes() == b""

    @pytest.mark.anyio
    async def test_ten_megabytes_go_in_from_a_file_and_out_to_one(self, bucket, tmp_path):
        body = bytes(range(256)) * 40_000
        (tmp_path / "in").write_bytes(body)
        await bucket.put({"big/one": tmp_path / "in", "big/two": body})
        metas = await bucket.stat(["big/one", "big/two"])
        assert [meta.size for meta in metas.values()] == [len(body)] * 2
        await bucket.fetch({metas["big/one"]: tmp_path / "deep" / "er" / "one", "big/two": tmp_path / "two"})
        assert (tmp_path / "deep" / "er" / "one").read_bytes() == (tmp_path / "two").read_bytes() == body
        assert (await bucket.get("big/two")).data == body
        assert [p.name for p in (tmp_path / "deep/er").iterdir()] == ["one"]

    @pytest.mark.anyio
    async def test_a_fetch_that_finds_another_size_leaves_no_file(self, bucket, tmp_path):
        await bucket.put({"a/b": b"12345"})
        announced = ObjectMeta(key="a/b", size=6, tag="?")
        with pytest.raises(BucketError, match="5 bytes, not 6") as caught:
            await bucket.fetch({announced: tmp_path / "local" / "b"})
        assert caught.value.keys == ("a/b",)
        assert list((tmp_path / "local").rglob("*")) == []

    @pytest.mark.anyio
    async def test_what_is_missing_is_not_found_by_name(self, bucket, tmp_path):
        await bucket.put({"a/b": b""})
        for key in ("a", "a/b/c", "a/c", "z"):
            with pytest.raises(NotFound) as caught:
                await bucket.get(key)
            assert caught.value.keys == (key,)
            with pytest.raises(NotFound):
                await bucket.fetch({key: tmp_path / "local" / "x"})
        assert list(await bucket.stat(["a", "a/c", "a/b", "a/b/c", "z"])) == ["a/b"]
        assert await bucket.stat([]) == {}
        assert await keys_of(bucket, "nothing/here") == []

    @pytest.mark.anyio
    async def test_a_name_is_created_once(self, bucket):
        await bucket.put({"a/1": b"first"}, create=True)
        with pytest.raises(AlreadyExists) as caught:
            await bucket.put({"a/0": b"new", "a/1": b"second", "a/2": b"new"}, create=True)
        assert caught.value.keys == ("a/1",)
        assert [(await bucket.get(key)).data for key in ("a/0", "a/1", "a/2")] == [b"new", b"first", b"new"]
        await bucket.put({"a/1": b"overwritten"})
        assert (await bucket.get("a/1")).data == b"overwritten"
        await bucket.delete(["a/1"])
        await bucket.put({"a/1": b"again"}, create=True)

    @pytest.mark.anyio
    async def test_of_racing_creators_one_wins_each_name(self, bucket, open_again):
        won: dict[str, list[int]] = {f"leases/{i:02d}/claim.json": [] for i in range(20)}

        async def race(me: int) -> None:
            mine = open_again()
            for key, winners in won.items():
                try:
                    await mine.put({key: b"%d" % me}, create=True)
                except AlreadyExists:
                    continue
                winners.append(me)

        async with anyio.create_task_group() as tg:
            for me in range(4):
                tg.start_soon(race, me)
        for key, winners in won.items():
            assert [b"%d" % me for me in winners] == [(await bucket.get(key)).data]

    @pytest.mark.anyio
    async def test_a_batch_that_fails_in_part_names_what_failed_and_writes_the_rest(self, bucket, tmp_path):
        with pytest.raises(BucketError, match="a/gone") as caught:
            await bucket.put({"a/first": b"1", "a/gone": tmp_path / "no such file", "a/last": b"2"})
        assert caught.value.keys == ("a/gone",)
        assert await keys_of(bucket) == ["a/first", "a/last"]

    @pytest.mark.anyio
    async def test_a_list_is_in_key_order_and_takes_whole_segments(self, bucket):
        names = ["exp1/a", "exp1/a-b", "exp1/a.c", "exp1/a0", "exp1/b/c", "exp1/b-c/d", "exp1/b.d/e", "exp1/b0/f"]
        names += ["exp1/Z", "exp1/_", "exp10/a", "exp1-old/a", "exp1.x", "exp"]
        await bucket.put(dict.fromkeys(names, b""))
        assert await keys_of(bucket) == sorted(names)
        assert await keys_of(bucket, "exp1") == sorted(name for name in names if name.startswith("exp1/"))
        assert await keys_of(bucket, "exp1/b") == ["exp1/b/c"]
        assert await keys_of(bucket, "exp1/a") == []
        for after in [*names, "exp1/b", "exp1/b/", "exp1/b/zzz", "exp1", "", "zz"]:
            assert await keys_of(bucket, after=after) == sorted(name for name in names if name > after), after
            assert await keys_of(bucket, "exp1/b0", after=after) == [n for n in ["exp1/b0/f"] if n > after]

    @pytest.mark.anyio
    async def test_a_long_list_shows_each_object_once(self, bucket):
        names = [f"rollouts/g1/{i:010d}.parquet" for i in range(300)]
        await bucket.put(dict.fromkeys(reversed(names), b"x") | {"rollouts/g10/0000000000.parquet": b""})
        assert await keys_of(bucket, "rollouts/g1") == names
        assert await keys_of(bucket, "rollouts/g1", after=names[290]) == names[291:]

    @pytest.mark.anyio
    async def test_a_list_may_be_left_early(self, bucket):
        await bucket.put({f"a/{i}": b"" for i in range(5)})
        async for meta in bucket.list("a"):
            if meta.key == "a/1":
                break
        assert await keys_of(bucket, "a", after="a/1") == ["a/2", "a/3", "a/4"]

    @pytest.mark.anyio
    async def test_to_delete_what_is_missing_is_no_error(self, bucket):
        await bucket.put({"a/b": b"", "a/c": b""})
        await bucket.delete(["a/b", "a/never", "z/z", "a"])
        assert await keys_of(bucket) == ["a/c"]
        await bucket.delete([])

    @pytest.mark.parametrize("key", UNSAFE)
    @pytest.mark.anyio
    async def test_an_unsafe_key_is_refused_by_every_call(self, bucket, tmp_path, key):
        for call in (
            lambda: bucket.put({"good": b"", key: b""}),
            lambda: bucket.put({key: b""}, create=True),
            lambda: bucket.get(key),
            lambda: bucket.fetch({key: tmp_path / "x"}),
            lambda: bucket.stat(["good", key]),
            lambda: bucket.delete(["good", key]),
        ):
            with pytest.raises(BucketError, match="unsafe key") as caught:
                await call()
            assert not isinstance(caught.value, NotFound)
            assert key in caught.value.keys
        if key:
            with pytest.raises(BucketError, match="unsafe key"):
                await keys_of(bucket, key)
        assert await keys_of(bucket) == []  # "good" of the refused batch is not there either

    @pytest.mark.anyio
    async def test_no_body_moves_while_nothing_has_changed(self, bucket, open_again):
        await bucket.put({"state/learner.json": b"1"})
        first = await bucket.get("state/learner.json")
        assert await open_again().get("state/learner.json", if_changed_from=first.meta) is None
        for body in (b"2", b"1", b"1", b"3") * 20:  # also when the bytes or the length are the same, and at once
            before = await bucket.get("state/learner.json")
            await bucket.put({"state/learner.json": body})
            after = await bucket.get("state/learner.json", if_changed_from=before.meta)
            assert after is not None
            assert after.data == body

    @pytest.mark.anyio
    async def test_no_read_is_torn_while_it_is_overwritten(self, bucket, open_again, tmp_path):
        bodies = [bytes([65 + i]) * (50_000 + 997 * i) for i in range(8)]
        await bucket.put({"state/x": bodies[0]})
        done = False

        async def overwrite() -> None:
            nonlocal done
            for i in range(60):
                await bucket.put({"state/x": bodies[i % 8]})
            done = True

        reader = open_again()
        async with anyio.create_task_group() as tg:
            tg.start_soon(overwrite)
            while not done:
                found = await reader.get("state/x")
                assert found.data in bodies
                assert found.meta.size == len(found.data)
                await reader.fetch({"state/x": tmp_path / "copy"})
                assert (tmp_path / "copy").read_bytes() in bodies

    @pytest.mark.anyio
    async def test_a_waiter_wakes_at_a_put(self, bucket, open_again):
        async def wait(task_status: Any = anyio.TASK_STATUS_IGNORED) -> None:
            task_status.started()
            await bucket.changed(3600)

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tg:
                for _ in range(3):
                    await tg.start(wait)
                await open_again().put({"state/learner.json": b"1"})
            async with anyio.create_task_group() as tg:
                await tg.start(wait)
                await open_again().delete(["state/learner.json"])

    @pytest.mark.anyio
    async def test_a_change_between_a_look_and_the_wait_is_not_lost(self, bucket, open_again):
        await bucket.changed(0)
        async with anyio.create_task_group() as tg:
            tg.start_soon(open_again().put, {"state/learner.json": b"1"})
        with anyio.fail_after(20):
            await bucket.changed(3600)

    @pytest.mark.anyio
    async def test_nobody_is_woken_by_his_own_put(self, bucket):
        await bucket.put({"state/proxy.json": b"0"})
        await bucket.changed(0)
        for i in range(3):
            await bucket.put({"state/proxy.json": b"%d" % i})
            with anyio.move_on_after(0.2) as scope:
                await bucket.changed(3600)
            assert scope.cancelled_caught

    @pytest.mark.anyio
    async def test_a_put_in_another_event_loop_wakes(self, bucket, open_again):
        await bucket.changed(0)

        def elsewhere() -> None:
            anyio.run(open_again().put, {"state/learner.json": b"1"})

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tg:
                tg.start_soon(bucket.changed, 3600)
                await anyio.to_thread.run_sync(elsewhere)

    @pytest.mark.anyio
    async def test_a_wait_ends_after_its_time(self, bucket):
        with anyio.fail_after(20):
            await bucket.changed(0)
            await bucket.changed(0.01)

    @pytest.mark.anyio
    async def test_what_is_closed_may_be_opened_again(self, bucket, open_again):
        await bucket.put({"a": b"1"})
        await bucket.close()
        assert (await open_again().get("a")).data == b"1"


# A file and a folder of one name cannot stand side by side on a disk; keys.py never asks for it.
_KEYS = st.builds(
    lambda folders, name: "/".join([*folders, name]),
    st.lists(st.sampled_from(["a", "a-b", "b"]), max_size=2),
    st.sampled_from(["a-c", "a.d", "a0", "x", "_"]),
)
_FOLDERS = st.sampled_from(["", "a", "a-b", "b", "a/a", "a/b", "x"])


def machine(make: Callable[[], Bucket]) -> type[RuleBasedStateMachine]:
    class Beside(RuleBasedStateMachine):
        """Whatever is done to the bucket and to a dict, both tell the same."""

        def __init__(self) -> None:
            super().__init__()
            self.bucket = make()
            self.model: dict[str, bytes] = {}
            self.runner = asyncio.Runner()

        def run(self, call: Coroutine[Any, Any, Any]) -> Any:
            return self.runner.run(call)

        @rule(items=st.dictionaries(_KEYS, st.binary(max_size=5), min_size=1, max_size=4), create=st.booleans())
        def put(self, items: dict[str, bytes], create: bool) -> None:
            taken = [key for key in items if create and key in self.model]
            try:
                self.run(self.bucket.put(items, create=create))
                assert not taken
            except AlreadyExists as error:
                assert list(error.keys) == taken  # noqa: PT017 - the other outcome is asserted above
            self.model |= {key: body for key, body in items.items() if key not in taken}

        @rule(keys=st.lists(_KEYS, max_size=3))
        def delete(self, keys: list[str]) -> None:
            self.run(self.bucket.delete(keys))
            for key in keys:
                self.model.pop(key, None)

        @rule(key=_KEYS)
        def get(self, key: str) -> None:
            if key in self.model:
                found = self.run(self.bucket.get(key))
                assert found.data == self.model[key]
                assert self.run(self.bucket.get(key, if_changed_from=found.meta)) is None
            else:
                with pytest.raises(NotFound):
                    self.run(self.bucket.get(key))

        @rule(keys=st.lists(_KEYS, max_size=4))
        def stat(self, keys: list[str]) -> None:
            found = self.run(self.bucket.stat(keys))
            assert {key: meta.size for key, meta in found.items()} == {k: len(self.model[k]) for k in keys if k in self.model}

        @rule(folder=_FOLDERS, after=st.none() | _KEYS | _FOLDERS)
        def list(self, folder: str, after: str | None) -> None:
            below = [key for key in self.model if not folder or key.startswith(f"{folder}/")]
            wanted = sorted(key for key in below if after is None or key > after)
            assert self.run(keys_of(self.bucket, folder, after)) == wanted

        def teardown(self) -> None:
            self.run(self.bucket.close())
            self.runner.close()

    return Beside
