"""The generator: prompt -> whole group under one version -> reward -> rollout object. It begins only what it has credit for.

    follower   state/learner.json, leases/ ─▶ newest version, credit, the end
    station    one replica each: fetches, loads and attests versions; says which one a new group may use
    loop       credit left, a version, room at a replica ─▶ begins a group       (consumes prompts, produces groups)
    outbox     finished groups ─▶ rollouts/, own state                           (unblocks the learner)

It ends when final/ stands, or drains when it is asked to stop: begins nothing, finishes what is in flight, ships.
"""

from __future__ import annotations

import math
import secrets
import tempfile
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup, TaskStatus

from grpod.context import Context
from grpod.errors import BucketError, GrpodError, NotReady
from grpod.generator.advertise import advertise, proxy_token
from grpod.generator.dataset import load_rows
from grpod.generator.engine import check_executable, open_engine
from grpod.generator.meter import Meter
from grpod.generator.prompts import Prompt, PromptSource
from grpod.generator.reward import RewardPool, RewardsUseless
from grpod.generator.rollouts import Workshop, make_group
from grpod.generator.ship import Outbox
from grpod.generator.station import Station
from grpod.generator.token_file import replica_token
from grpod.generator.tokens import load_tokenizer
from grpod.generator.trust import Trust
from grpod.replica.adapters import Served
from grpod.run.base_model import eos_ids, fingerprint, resolve_base
from grpod.run.follow import Follower
from grpod.run.join import join
from grpod.run.metrics_log import PERIOD_S, MetricWriter
from grpod.telemetry.log import get_logger
from grpod.wire import keys
from grpod.wire.rollout import Drop

_DRAIN, _SHIP = 0.6, 0.75  # of the grace period, until groups are cut off and shipping ends; the rest is the replica's


async def run(ctx: Context, *, index: int | None = None, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
    """Raises ConfigError (2) for its data and rewards, NotReady (75) without a learner or a replica."""
    config, log = ctx.config, get_logger()
    assert config.data is not None
    token, advertiser_token = replica_token(config, ctx.folder), proxy_token(ctx)
    if await _is_over(ctx):  # before a replica is started for nothing
        log.info("run_is_over", bucket=ctx.bucket.url)
        ctx.inputs_checked.set()
        task_status.started()
        return
    check_executable(config)
    base = await anyio.to_thread.run_sync(resolve_base, config, ctx.folder)
    tokenizer = await anyio.to_thread.run_sync(load_tokenizer, base)
    name = f"g{'' if index is None else index}-{secrets.token_hex(4)}"
    rows = await anyio.to_thread.run_sync(load_rows, config.data, ctx.folder)
    meter = Meter()
    prompts = await anyio.to_thread.run_sync(
        lambda: PromptSource(rows, tokenizer, config, generator=name, on_skip=meter.skipped)
    )
    async with AsyncExitStack() as stack:
        rewards = await stack.enter_async_context(
            RewardPool(config.rewards, folder=ctx.folder, columns=prompts.columns, workers=config.generator.reward_workers)
        )
        ctx.inputs_checked.set()
        devices = config.generator.devices if index is None else [config.generator.devices[index]]
        engines = [
            await stack.enter_async_context(
                open_engine(
                    config, base, device=device, name=f"{name}-replica{i}", token=token, learner_here="learner" in ctx.roles
                )
            )
            for i, device in enumerate(devices or [""])
        ]
        base_fingerprint = await anyio.to_thread.run_sync(fingerprint, base)
        joined = await ctx.stop.unless(
            lambda: join(ctx.bucket, config, base_fingerprint, may_create=False, timeout_s=config.run.startup_timeout_s)
        )
        if joined is None:
            return
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="grpod-")))
        follower = Follower(ctx.bucket)
        stations = [
            Station(engine, config, ctx.bucket, joined.run, follower, scratch / str(i), token)
            for i, engine in enumerate(engines)
        ]
        shop = Workshop(
            config=config,
            run=joined.run,
            tokenizer=tokenizer,
            rewards=rewards,
            eos_ids=await anyio.to_thread.run_sync(eos_ids, base),
        )
        generator = Generator(ctx, shop, stations, follower, prompts, meter, name)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follower.run)
            for station in stations:
                tasks.start_soon(station.run)
            tasks.start_soon(generator.wake_on_stop)
            tasks.start_soon(advertise, ctx, engines, advertiser_token)
            await generator.live(task_status)
            tasks.cancel_scope.cancel()
    log.info("generator_done", generator=generator.name, reason=generator.ended)


async def _is_over(ctx: Context) -> bool:
    try:
        return keys.FINAL_MANIFEST in await ctx.bucket.stat([keys.FINAL_MANIFEST])
    except BucketError:  # not known yet: the follower goes on asking
        return False


class Generator:
    """Begins groups, one life (name) after the other: a learner that took it for dead has retired the name for ever."""

    def __init__(
        self,
        ctx: Context,
        shop: Workshop,
        stations: list[Station],
        follower: Follower,
        prompts: PromptSource,
        meter: Meter,
        name: str,
    ) -> None:
        self._ctx, self._shop, self._stations, self._follower, self._prompts = ctx, shop, stations, follower, prompts
        self._notice, self._meter = follower.notice, meter
        self._log = get_logger()
        self._trust = {station: Trust(patience_s=shop.config.run.startup_timeout_s) for station in stations}
        self._failure: GrpodError | None = None  # what ends this generator, once all that it knows is shipped
        self._ship_until = math.inf  # how long what is ready is tried to be shipped, once it has ended
        self._credit_at = 0.0  # when there was credit last
        self.name = name
        self.ended = ""

    async def live(self, task_status: TaskStatus[None]) -> None:
        await self._ready()
        if self._failure:
            raise self._failure
        task_status.started()
        while not self.ended:
            outbox = Outbox(
                self._ctx.bucket,
                self._shop.config,
                name=self.name,
                base_fingerprint=self._shop.run.base_fingerprint,
                device=",".join(self._shop.config.generator.devices) or self._shop.config.generator.engine,
                notice=self._notice,
                awaited=lambda: self._awaited(outbox),  # noqa: B023  # called only while this outbox lives
                describe=self._describe,
                reward_names=self._shop.rewards.names,
                epoch=lambda: self._follower.view.state.epoch if self._follower.view.state else 0,
            )
            async with anyio.create_task_group() as beside:
                beside.start_soon(self._measure, outbox)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(outbox.run)
                    async with anyio.create_task_group() as groups:
                        await self._begin_groups(outbox, groups)
                        self._ship_until = anyio.current_time() + self._shop.config.run.grace_s
                        if self._ctx.stop.requested:
                            await self._drain(outbox, groups)
                        else:
                            groups.cancel_scope.cancel()
                    for group_id in sorted(outbox.open) if self._ctx.stop.requested or self._failure else ():
                        outbox.give_up(Drop(group_id=group_id, reason="interrupted"))
                    outbox.close(self.ended or "retired", hopeless=isinstance(self._failure, RewardsUseless))
                    if self.ended:  # a bucket that is away does not keep it
                        tasks.cancel_scope.deadline = self._ship_until
                beside.cancel_scope.cancel()
            if self._failure:
                raise self._failure
            if not self.ended:
                self._log.warning("retired_by_learner", generator=self.name)
                self.name = f"{self.name.partition('-')[0]}-{secrets.token_hex(4)}"

    async def _ready(self) -> None:
        """The learner has a version, and a replica serves it; or the run is over, or a stop was asked for."""
        timeout_s = self._shop.config.run.startup_timeout_s
        with anyio.move_on_after(timeout_s) as waiting:
            await self._notice.until(
                lambda: self._over() or any(station.ready_version() is not None for station in self._stations)
            )
        if waiting.cancelled_caught:
            missing = (
                "no learner has published a version"
                if self._follower.view.state is None
                else "no replica serves the newest version"
            )
            troubles = "; ".join(station.trouble for station in self._stations if station.trouble)
            raise NotReady(f"{missing} after run.startup_timeout_s {timeout_s:g} s{troubles and ': '}{troubles}")

    async def _begin_groups(self, outbox: Outbox, groups: TaskGroup) -> None:
        """Returns when this life is over; `ended` says why, or is empty when the name was retired."""
        self._credit_at = anyio.current_time()
        while not self._over():
            state = self._follower.view.state
            if state is not None and outbox.name in state.retired:
                return
            credit = state.credits.get(outbox.name, 0) if state is not None else 0
            chosen = self._choose() if outbox.begun < credit else None
            if outbox.begun < credit or outbox.in_flight:
                self._credit_at = anyio.current_time()
            if chosen is None:
                if self._idle_too_long():
                    return
                waited_from, spent = anyio.current_time(), outbox.begun >= credit
                await self._notice.wait(1.0)
                if spent:
                    self._meter.waited(anyio.current_time() - waited_from)
                continue
            station, served = chosen
            group_id, prompt = outbox.begin(), self._prompts.next()
            groups.start_soon(self._make, outbox, station, served, group_id, prompt)
            await anyio.lowlevel.checkpoint()  # lets it be counted as in flight

    async def _make(self, outbox: Outbox, station: Station, served: Served, group_id: str, prompt: Prompt) -> None:
        try:
            result = await make_group(self._shop, station, served, group_id, prompt)
        except RewardsUseless as useless:
            result = Drop(group_id=group_id, reason=useless.reason)
            self._fail(useless)
        outbox.done(result)
        trust, now = self._trust[station], anyio.current_time()
        if isinstance(result, Drop):
            trust.failed(result.reason, now)
        else:
            trust.sound()
            station.praise()
            self._meter.done(result)
        why = trust.given_up(now)
        if why is not None and station.failure is None:
            station.give_up(NotReady(f"replica {station.url} {why}"))

    def _fail(self, failure: GrpodError) -> None:
        self._failure = self._failure or failure
        self._notice.tell()

    async def _measure(self, outbox: Outbox) -> None:
        """Rows of metrics until it is cancelled; then the last one, if the bucket takes it at once."""
        writer = MetricWriter(self._ctx.bucket, outbox.name)

        def add() -> None:
            state = self._follower.view.state
            unproven = len({key for station in self._stations for key in station.unproven})
            for station in self._stations:
                while station.brought:
                    self._meter.brought(station.brought.popleft())
            row = self._meter.row(
                anyio.current_time(),
                in_flight=outbox.in_flight,
                unproven=unproven,
                limit=sum(station.crowd.limit for station in self._stations),
                loads=[station.crowd.load for station in self._stations if station.crowd.load],
            )
            writer.add(state.step if state else 0, row)

        add()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(writer.run)
            try:
                while True:
                    await anyio.sleep(PERIOD_S)
                    add()
            finally:
                add()
                with anyio.move_on_after(2.0, shield=True), suppress(BucketError):
                    await writer.flush()

    async def _drain(self, outbox: Outbox, groups: TaskGroup) -> None:
        grace_s = _DRAIN * self._shop.config.run.grace_s
        self._ship_until = anyio.current_time() + _SHIP * self._shop.config.run.grace_s
        self._log.info("draining", in_flight=outbox.in_flight, grace_s=grace_s)
        with anyio.move_on_after(grace_s):
            await self._notice.until(lambda: outbox.in_flight == 0 or self._follower.view.ended)
        groups.cancel_scope.cancel()

    def _choose(self) -> tuple[Station, Served] | None:
        """The replica with the most room that serves a version under which a group may begin."""
        now = anyio.current_time()
        for station in sorted(self._stations, key=lambda s: s.in_flight / s.crowd.limit):
            served = station.ready_version()
            if served is None:
                continue
            if station.in_flight < self._trust[station].room(station.crowd.limit, now):
                return station, served
            station.crowd.reached |= station.in_flight >= station.crowd.limit
        return None

    def _awaited(self, outbox: Outbox) -> int:
        """Groups that somebody waits for: the learner, or this generator for new credit."""
        state = self._follower.view.state
        if state is None:
            return 0
        spent = outbox.begun >= state.credits.get(outbox.name, 0) and outbox.in_flight == 0
        return max(state.waiting_for, int(spent))

    def _describe(self) -> tuple[list[str], list[str]]:
        resident = {f"{v}-{e}" for station in self._stations if station.adapters for v, e in station.adapters.resident}
        refused = {f"{v}-{e}" for station in self._stations for v, e in station.refused}
        return sorted(resident), sorted(refused)

    def _over(self) -> bool:
        failures = [station.failure for station in self._stations]
        if self._failure is None and None not in failures:
            self._failure = NotReady("; ".join(str(failure) for failure in failures))
        if not self.ended and self._failure is not None:
            self.ended = str(self._failure)
        elif not self.ended and self._follower.view.ended:
            self.ended = "run ended"
        elif not self.ended and self._ctx.stop.requested:
            self.ended = "stopped"
        return bool(self.ended)

    def _idle_too_long(self) -> bool:
        limit = self._shop.config.generator.idle_exit_s
        if limit is None or anyio.current_time() - self._credit_at < limit:
            return False
        self.ended = f"no credit for {limit:g} s (generator.idle_exit_s)"
        return True

    async def wake_on_stop(self) -> None:
        await self._ctx.stop.wait()
        self._notice.tell()
