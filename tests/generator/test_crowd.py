"""How many groups are in flight: the rule on single looks, on an engine that is made up, and the watcher over HTTP."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import anyio
import pytest

from grpod.generator import crowd
from grpod.generator.crowd import FIRST, RAREST, UNTOLD, Crowd, CrowdWatch
from grpod.replica.client import ReplicaClient
from grpod.replica.load import Load
from tests.fakes import FakeReplica

G = 8  # rollouts of a group


def load(running: int = 0, waiting: int = 0, kv: float = 0.2, preemptions: int = 0) -> Load:
    return Load(running=running, waiting=waiting, kv_usage=kv, preemptions=preemptions, tokens=0)


def look(state: Crowd, now: Load, *, in_flight: int | None = None, ended: int = 0, reached: bool = True) -> Crowd:
    return state.after(
        now, group_size=G, in_flight=state.limit if in_flight is None else in_flight, ended=ended, reached=reached
    )


# ---- single looks


def test_it_doubles_while_there_is_room() -> None:
    state = Crowd()
    for limit in (2 * FIRST, 4 * FIRST, 8 * FIRST):
        state = look(state, load(running=state.limit * G))
        assert (state.limit, state.growing) == (limit, True)


@pytest.mark.parametrize(
    ("now", "reached"), [(load(running=8), False), (load(running=8, kv=0.9), True), (load(running=80, waiting=9), True)]
)
def test_it_does_not_grow_unless_it_was_reached_with_room_and_no_queue(now: Load, reached: bool) -> None:
    assert look(Crowd(), now, reached=reached).limit == FIRST


@pytest.mark.parametrize(
    "now", [load(running=64, waiting=64, kv=0.8, preemptions=4), load(running=64, waiting=64, kv=0.97, preemptions=3)]
)
def test_when_the_cache_runs_over_it_shrinks_to_less_than_fits(now: Load) -> None:
    state = look(Crowd(preemptions=3), now)
    assert (state.limit, state.growing, state.wait) == (int(FIRST / 2 * 0.9), False, 2)


def test_the_preemptions_before_the_first_look_are_nobodys_fault() -> None:
    assert look(Crowd(), load(running=8, preemptions=100)).growing


def test_a_queue_counts_at_the_second_look() -> None:
    state = look(Crowd(limit=64), load(running=256, waiting=256))
    assert (state.limit, state.queued) == (64, 1)
    assert look(state, load(running=256, waiting=20)).queued == 0, "a tenth of what runs is no queue"
    state = look(state, load(running=256, waiting=256))
    assert (state.limit, state.growing, state.wait) == (33, False, 1)


def test_it_is_not_moved_again_before_what_is_in_flight_has_come_down_to_it() -> None:
    state = Crowd(limit=33, growing=False, queued=2, preemptions=0)
    later = look(state, load(running=256, waiting=200, kv=0.99, preemptions=7), in_flight=60)
    assert (later.limit, later.preemptions) == (33, 7)


def test_afterwards_it_grows_by_an_eighth_when_all_in_flight_have_ended_and_seldom_after_trouble() -> None:
    state = Crowd(limit=32, growing=False, moved_at=100, wait=1)
    assert look(state, load(running=200), ended=131) == replace(state, preemptions=0)
    grown = look(state, load(running=200), ended=132)
    assert (grown.limit, grown.moved_at) == (36, 132)
    careful = Crowd(limit=3, growing=False, moved_at=0, wait=RAREST)
    assert look(careful, load(running=20), ended=3 * RAREST - 1).limit == 3
    assert look(careful, load(running=20), ended=3 * RAREST).limit == 4
    assert look(careful, load(running=20, kv=0.99)).wait == RAREST


def test_it_is_never_less_than_one_and_stands_while_nothing_is_in_flight() -> None:
    assert look(Crowd(limit=1), load(running=1, waiting=7, kv=1.0)).limit == 1
    assert look(Crowd(limit=9, queued=5, preemptions=0), load(waiting=99, kv=1.0, preemptions=9), in_flight=0).limit == 9


# ---- an engine


@dataclass
class Engine:
    """Sequences decode together, a token a turn; one that finds no room in the KV cache is thrown out and waits."""

    kv_tokens: int
    max_seqs: int = 256
    lengths: tuple[int, int] = (50, 400)
    prompt: int = 50
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    running: list[list[int]] = field(default_factory=list)  # group, tokens, tokens at the end
    waiting: list[list[int]] = field(default_factory=list)
    groups: Counter[int] = field(default_factory=Counter)
    begun: int = 0
    preemptions: int = 0
    tokens: int = 0

    @property
    def ended(self) -> int:
        return self.begun - len(self.groups)

    def begin(self) -> None:
        self.begun += 1
        self.groups[self.begun] = G
        self.waiting += [[self.begun, self.prompt, self.prompt + self.dice.randint(*self.lengths)] for _ in range(G)]

    def turn(self) -> None:
        used = sum(tokens for _, tokens, _ in self.running)
        while self.waiting and len(self.running) < self.max_seqs and used + self.waiting[0][1] <= self.kv_tokens:
            self.running.append(self.waiting.pop(0))
            used += self.running[-1][1]
        while used + len(self.running) > self.kv_tokens:
            self.waiting.insert(0, self.running.pop())
            used -= self.waiting[0][1]
            self.preemptions += 1
        self.tokens += len(self.running)
        for sequence in self.running:
            sequence[1] += 1
        for group, tokens, end in self.running:
            self.groups[group] -= tokens >= end
        self.groups = Counter({group: left for group, left in self.groups.items() if left})
        self.running = [sequence for sequence in self.running if sequence[1] < sequence[2]]

    def load(self) -> Load:
        used = sum(tokens for _, tokens, _ in self.running)
        return Load(
            running=len(self.running),
            waiting=len(self.waiting),
            kv_usage=used / self.kv_tokens,
            preemptions=self.preemptions,
            tokens=self.tokens,
        )


@pytest.mark.parametrize(
    ("kv_tokens", "lengths", "least"),
    [(5_000, (50, 400), 0.4), (20_000, (50, 400), 0.6), (200_000, (50, 400), 0.8), (200_000, (300, 2000), 0.7)],
    ids=["a small cache", "a cache that fills first", "sequences that run out first", "both"],
)
def test_it_settles_where_the_queue_is_short_and_the_cache_holds(
    kv_tokens: int, lengths: tuple[int, int], least: float
) -> None:
    """`least`: of what the engine could run at all. Cut into groups, a small cache cannot be filled to the brim."""
    engine, state = Engine(kv_tokens=kv_tokens, lengths=lengths), Crowd()
    looks = []
    for _ in range(700):
        for _ in range(20):  # turns a second
            while len(engine.groups) < state.limit:
                engine.begin()
            engine.turn()
        now = engine.load()
        state = state.after(now, group_size=G, in_flight=len(engine.groups), ended=engine.ended, reached=True)
        looks.append((state.limit, now))
    settled = looks[400:]
    limits = [limit for limit, _ in settled]
    assert max(limits) <= 1.5 * min(limits) + 1
    assert settled[-1][1].preemptions - settled[0][1].preemptions <= 0.02 * engine.ended, "of thousands of rollouts"
    assert sum(now.waiting for _, now in settled) <= 0.15 * sum(now.running for _, now in settled)
    mean = engine.prompt + sum(lengths) / 4
    most = min(engine.max_seqs, kv_tokens / mean)
    assert sum(now.running for _, now in settled) / len(settled) >= least * most


# ---- the watcher


PAGE = """\
vllm:num_requests_running{{engine="0"}} {running}
vllm:num_requests_waiting{{engine="0"}} 0.0
vllm:kv_cache_usage_perc{{engine="0"}} 0.5
vllm:num_preemptions_total{{engine="0"}} 0.0
vllm:prompt_tokens_total{{engine="0"}} 1.0
vllm:generation_tokens_total{{engine="0"}} {tokens}
"""


class Talking(FakeReplica):
    """Its /metrics page says what the test says."""

    tokens, step = 0, 0

    async def _answer(self, request):  # type: ignore[no-untyped-def]
        answer = await super()._answer(request)
        if request.path == "/metrics" and answer.status == 200:
            self.tokens += self.step
            answer.text = PAGE.format(running=8, tokens=self.tokens)
        return answer


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowd, "EVERY_S", 0.005)
    monkeypatch.setattr(crowd, "HUNG_S", 0.05)


async def watch_while(
    replica: FakeReplica, watch: CrowdWatch, *, looks: int, in_flight: int = 1, asked: int | None = None
) -> bool:
    """Until so many looks were taken: did it say that the replica hangs?"""
    said = False
    async with ReplicaClient(replica.url) as client, anyio.create_task_group() as tasks:
        client.outstanding = in_flight if asked is None else asked

        async def run() -> None:
            nonlocal said
            await watch.watch(client, in_flight=lambda: in_flight, ended=lambda: 0)
            said = True
            tasks.cancel_scope.cancel()

        tasks.start_soon(run)
        await replica.until(lambda r: r.count("/metrics") > looks)
        tasks.cancel_scope.cancel()
    return said


@pytest.mark.anyio
@pytest.mark.usefixtures("quick")
async def test_a_replica_that_is_decoding_is_left_alone_and_its_limit_grows_when_reached() -> None:
    watch = CrowdWatch(fixed=None, group_size=G)
    async with Talking() as replica:
        replica.step = 7
        watch.reached = True
        assert not await watch_while(replica, watch, looks=30)
    assert watch.load is not None
    assert (watch.load.running, watch.limit, watch.reached) == (8, 2 * FIRST, False)


@pytest.mark.anyio
@pytest.mark.usefixtures("quick")
async def test_a_replica_that_holds_sequences_and_makes_no_token_hangs() -> None:
    async with Talking() as replica:
        assert await watch_while(replica, CrowdWatch(fixed=None, group_size=G), looks=10_000)


@pytest.mark.anyio
@pytest.mark.usefixtures("quick")
async def test_one_that_has_nothing_to_do_does_not() -> None:
    async with Talking() as replica:
        assert not await watch_while(replica, CrowdWatch(fixed=None, group_size=G), looks=30, in_flight=0)


@pytest.mark.anyio
@pytest.mark.usefixtures("quick")
async def test_one_whose_groups_wait_for_a_version_does_not() -> None:
    """As after a restart, while a large adapter comes from a slow bucket."""
    async with Talking() as replica:
        assert not await watch_while(replica, CrowdWatch(fixed=None, group_size=G), looks=30, in_flight=3, asked=0)


@pytest.mark.anyio
@pytest.mark.usefixtures("quick")
async def test_one_that_is_not_reached_is_somebody_elses_care() -> None:
    async with Talking() as replica:
        replica.spoil("refuse", path="/metrics")
        assert not await watch_while(replica, CrowdWatch(fixed=None, group_size=G), looks=30)


@pytest.mark.anyio
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("status", [200, 404])
async def test_where_nothing_is_told_the_limit_is_a_cautious_one(status: int) -> None:
    watch = CrowdWatch(fixed=None, group_size=G)
    assert watch.limit == FIRST
    async with FakeReplica() as replica, ReplicaClient(replica.url) as client:
        replica.spoil("status", (status, "# nothing here\n"), path="/metrics")
        with anyio.move_on_after(0.3) as waited:
            await watch.watch(client, in_flight=lambda: 1, ended=lambda: 0)
        assert waited.cancelled_caught, "nor is it said to hang"
        assert replica.count("/metrics") == 1
    assert (watch.limit, watch.load) == (UNTOLD, None)


@pytest.mark.anyio
@pytest.mark.usefixtures("quick")
async def test_a_limit_of_the_config_stands() -> None:
    watch = CrowdWatch(fixed=3, group_size=G)
    async with Talking() as replica:
        replica.step, watch.reached = 1, True
        assert not await watch_while(replica, watch, looks=5)
    assert watch.limit == 3


@pytest.mark.anyio
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/completions"])
async def test_a_replica_that_answers_no_load_and_no_score_hangs_as_well(path: str) -> None:
    """No group is in flight: all wait for that version."""
    watch = CrowdWatch(fixed=None, group_size=G)
    async with Talking() as replica, ReplicaClient(replica.url) as client, anyio.create_task_group() as tasks:
        replica.spoil("hang", path=path)
        tasks.start_soon(client.load_adapter, "v1", "/nowhere")
        tasks.start_soon(client.score, "base", [5, 6, 7])
        with anyio.fail_after(10):
            await watch.watch(client, in_flight=lambda: 0, ended=lambda: 0)
        assert client.outstanding == 1
        tasks.cancel_scope.cancel()
    assert client.outstanding == 0
