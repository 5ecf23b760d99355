"""snapshot -> probe scored -> bucket, one at a time beside the next steps; the newest snapshot wins.

    (1) adapter data   (2) adapter manifest ─▶ state goes out (announce.py)   (4+5) ledger segment and checkpoint data
    (6) checkpoint manifest: only now are the ends durable   then old checkpoints go
    before the first of them: a checkpoint of step 0

Killed before (2): the number is skipped. Between (2) and (6): the version is orphaned, its rollouts stay usable, its groups are
trained again. After (6): nothing is repeated. Every put is fenced by the lease (the bucket handed in is).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import anyio
import anyio.to_thread

from grpod.bucket.base import Bucket
from grpod.errors import AlreadyExists, BucketError
from grpod.learner.book import Book
from grpod.learner.checkpoint import delete_checkpoints
from grpod.learner.versions import Version, Versions
from grpod.run.notice import Notice
from grpod.telemetry.log import get_logger
from grpod.wire import keys
from grpod.wire.adapter import Adapter, Lora, Probe, file_ref
from grpod.wire.checkpoint import Checkpoint, Cursor, Trainer
from grpod.wire.tables import End, encode_ledger

_ATTEMPTS = 5  # for one snapshot; then its number is given up and the next snapshot goes out under another


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything that must be resumed together, taken between two steps."""

    step: int
    adapter: Mapping[str, bytes]  # adapter_model.safetensors, adapter_config.json
    publish: bool
    checkpoint: bool
    republished: bool = False  # the same weights under a new number: pos stays
    optimizer: bytes = b""
    scheduler: Mapping[str, object] = field(default_factory=dict)
    rng: Mapping[str, object] = field(default_factory=dict)
    ends: tuple[End, ...] = ()  # not durable when it was taken: a prefix of book.fresh
    cursors: Mapping[str, Cursor] = field(default_factory=dict)
    granted: Mapping[str, int] = field(default_factory=dict)
    ended: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What every manifest of this learner says alike."""

    run_id: str
    epoch: int
    base_fingerprint: str
    lora: Lora
    probe_ids: list[int]
    base_logprobs: list[float]
    keep_checkpoints: int


class Publisher:
    def __init__(
        self,
        bucket: Bucket,
        identity: Identity,
        *,
        book: Book,
        versions: Versions,
        next_version: int,
        next_pos: int,
        segments: list[str],
        kept: list[str],
        score: Callable[[Mapping[str, bytes], Sequence[int]], list[float]],
        on_landed: Callable[[Version, Snapshot, float], None],
        fence: Callable[[], Awaitable[None]],
    ) -> None:
        """`score`: log-probs of token ids under an adapter, called in a worker thread beside the training.
        `fence`: raises LeaseLost unless the lease is held at this moment."""
        self._bucket, self._id, self._book, self._versions = bucket, identity, book, versions
        self._next_version, self._next_pos = next_version, next_pos
        self.segments = segments  # of the ledger: every key that counts
        self._kept = kept  # checkpoint folders, oldest first
        self._score, self._on_landed, self._fence = score, on_landed, fence
        self._offered: Snapshot | None = None
        self._working = False
        self._notice = Notice()
        self._log = get_logger()
        self.published_step = -1
        self.checkpointed_step = -1
        self.latest: Snapshot | None = None  # whose weights are the newest version
        self.origin: Snapshot | None = None  # step 0 of a new run, until a checkpoint holds it or a later one
        self._failed: Snapshot | None = None  # the last one, if it could not be uploaded
        self._complained = False
        self._tried: set[str] = set()  # keys of this epoch that were put, whatever came of it

    @property
    def busy(self) -> bool:
        return self._working or self._offered is not None

    def take_failed(self) -> Snapshot | None:
        """What could not be uploaded, told once."""
        failed, self._failed = self._failed, None
        return failed

    def offer(self, snapshot: Snapshot) -> None:
        self._offered = snapshot
        self._notice.tell()

    async def drain(self) -> None:
        await self._notice.until(lambda: not self.busy)

    async def run(self) -> None:
        while True:
            await self._notice.until(lambda: self._offered is not None)
            snapshot, self._offered, self._working = self._offered, None, True
            assert snapshot is not None
            try:
                await self.upload(snapshot)
                self._failed, self._complained = None, False
            except BucketError as error:  # training goes on; the loop offers another snapshot, which goes out under new numbers
                self._failed = snapshot
                self._complain("upload_failed", step=snapshot.step, error=str(error))
            finally:
                self._working = False
                self._notice.tell()

    async def upload(self, snapshot: Snapshot) -> None:
        begun = anyio.current_time()
        if self.origin is not None and snapshot.step > self.origin.step:
            await self._checkpoint(self.origin)  # whoever finds a version that was trained finds a checkpoint to resume from
        if snapshot.publish:
            await self._publish(snapshot, begun)
        if snapshot.checkpoint and snapshot.step > self.checkpointed_step:  # what is durable is not written again
            await self._checkpoint(snapshot)

    async def _publish(self, snapshot: Snapshot, begun: float) -> None:
        version, self._next_version = self._next_version, self._next_version + 1
        logprobs = await anyio.to_thread.run_sync(self._score, snapshot.adapter, self._id.probe_ids)
        pos = self._next_pos - 1 if snapshot.republished else self._next_pos
        manifest = Adapter(
            run_id=self._id.run_id,
            version=version,
            epoch=self._id.epoch,
            pos=pos,
            step=snapshot.step,
            base_fingerprint=self._id.base_fingerprint,
            lora=self._id.lora,
            files={name: file_ref(data) for name, data in snapshot.adapter.items()},
            probe=Probe(token_ids=self._id.probe_ids, logprobs=logprobs, base_logprobs=self._id.base_logprobs),
            created_at=time.time(),
        )
        await self._put({keys.adapter(version, self._id.epoch, name): data for name, data in snapshot.adapter.items()})
        await self._put({keys.adapter(version, self._id.epoch, keys.MANIFEST): manifest.encode()})
        self._next_pos = pos + 1
        self.published_step, self.latest = snapshot.step, snapshot
        seconds = anyio.current_time() - begun
        self._log.debug("adapter_published", version=version, step=snapshot.step, seconds=round(seconds, 3))
        self._on_landed(self._versions.note(manifest), snapshot, seconds)

    async def _checkpoint(self, snapshot: Snapshot) -> None:
        newest = self._versions.newest
        assert newest is not None
        trainer = Trainer(
            step=snapshot.step,
            version=newest.version,
            pos=newest.pos,
            cursors=dict(snapshot.cursors),
            begun=dict(snapshot.granted),
            ended=dict(snapshot.ended),
            scheduler=dict(snapshot.scheduler),
            rng=dict(snapshot.rng),
        )
        files = {
            keys.ADAPTER_WEIGHTS: snapshot.adapter[keys.ADAPTER_WEIGHTS],
            keys.OPTIMIZER: snapshot.optimizer,
            keys.TRAINER: trainer.encode(),
        }
        step, epoch = snapshot.step, self._id.epoch
        segment = keys.ledger(epoch, step)
        segments = [*self.segments, segment] if snapshot.ends else list(self.segments)
        manifest = Checkpoint(
            run_id=self._id.run_id,
            step=step,
            epoch=epoch,
            version=newest.version,
            version_epoch=newest.epoch,
            pos=newest.pos,
            base_fingerprint=self._id.base_fingerprint,
            files={name: file_ref(data) for name, data in files.items()},
            ledger=segments,
            created_at=time.time(),
        )
        data = {keys.checkpoint(step, epoch, name): content for name, content in files.items()}
        await self._put({**({segment: encode_ledger(snapshot.ends)} if snapshot.ends else {}), **data})
        await self._put({keys.checkpoint(step, epoch, keys.MANIFEST): manifest.encode()})
        self.segments = segments
        self.checkpointed_step, self.origin = step, None
        self._book.settle(len(snapshot.ends))
        self._kept.append(keys.checkpoint_folder(step, epoch))
        await self._collect()

    async def _collect(self) -> None:
        """Old checkpoints go, once more is known than that the lease held a moment ago: it is beaten and looked at."""
        keep = self._id.keep_checkpoints
        old = self._kept[:-keep]
        if not old:
            return
        try:
            await self._fence()
            await delete_checkpoints(self._bucket, old)
        except BucketError as error:  # they are in nobody's way, and are tried again after the next one
            self._complain("checkpoints_not_deleted", folders=old, error=str(error))
            return
        self._kept = self._kept[-keep:]

    async def _put(self, items: Mapping[str, bytes]) -> None:
        """Create-only, but for what was tried before: that is this learner's own, and without a manifest nobody has read it."""
        left = dict(items)
        for attempt in range(_ATTEMPTS):
            again = {key: data for key, data in left.items() if key in self._tried}
            fresh = {key: data for key, data in left.items() if key not in again}
            self._tried |= fresh.keys()
            try:
                if fresh:
                    await self._bucket.put(fresh, create=True)
                if again:
                    await self._bucket.put(again)
                self._tried -= items.keys()  # it stands, and is never written again
                return
            except AlreadyExists:  # somebody else's
                raise
            except BucketError as error:
                if attempt == _ATTEMPTS - 1:
                    raise
                self._complain("put_failed", keys=sorted(error.keys)[:3], error=str(error))
                left = again | fresh if not error.keys else {**again, **{k: d for k, d in fresh.items() if k in error.keys}}
                await anyio.sleep(min(5.0, 0.2 * 2**attempt))

    def _complain(self, event: str, **fields: object) -> None:
        """A warning for the first trouble, until an upload succeeds: a full disk is one message."""
        (self._log.debug if self._complained else self._log.warning)(event, **fields)
        self._complained = True
