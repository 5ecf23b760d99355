"""Adapters of one replica: bucket -> local disk -> replica, and no request before the weights are proven.

    fetch (size, sha256) ─▶ load ─▶ score the probe ─▶ judge ─▶ served
                                                          └─▶ refused: unloaded, told in the generator's state, not tried again

Files stay until after the unload: an engine may read them again while the name is registered. A replica that was restarted has
forgotten everything: it gets a new `Adapters`, which begins with `prove` (the canary).
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio

from grpod.bucket.base import Bucket
from grpod.errors import GrpodError, NotReady, WireError
from grpod.replica import attest
from grpod.replica.client import Refused, ReplicaClient, Unavailable, UnknownAdapter, UnusableAnswer
from grpod.replica.plain_lora import beyond
from grpod.telemetry.log import get_logger
from grpod.wire import keys
from grpod.wire.adapter import Adapter
from grpod.wire.run import Run

BASE = "base"  # the name under which a replica serves the base model
FILES = (keys.ADAPTER_WEIGHTS, keys.ADAPTER_CONFIG)
_ASK_AGAIN_S = (0.2, 0.4, 0.8)  # pauses before a score that could not be used is asked for again


class VersionRefused(GrpodError):
    """This replica must not serve this version."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """A version that this replica has loaded and that was attested."""

    name: str  # inside the replica
    version: int
    epoch: int
    manifest: Adapter
    took: Mapping[str, float]
    """seconds: fetch_s, load_s, attest_s"""

    @property
    def key(self) -> tuple[int, int]:
        return (self.version, self.epoch)

    @property
    def sha256(self) -> str:
        return self.manifest.files[keys.ADAPTER_WEIGHTS].sha256


class Adapters:
    """Of one incarnation of a replica. `root`: where the bucket's keys lie on the replica's host; None: it shares this disk."""

    def __init__(
        self, client: ReplicaClient, bucket: Bucket, run: Run, folder: Path, *, base_name: str = BASE, root: str | None = None
    ) -> None:
        self._client, self._bucket, self._run, self._folder, self._base_name = client, bucket, run, folder, base_name
        self._root = root
        self._base_known: tuple[list[int], list[float]] | None = None  # a probe's tokens and how the base scores them
        self._log = get_logger(replica=client.url)
        self.resident: dict[tuple[int, int], Served] = {}
        self.refused: dict[tuple[int, int], str] = {}
        self.unproven = 0
        self._begun: dict[str, Path] = {}  # name -> folder: loaded, and not attested yet

    async def prove(self, version: int, epoch: int) -> None:
        """The canary: raises NotReady when this server ignores adapters, or serves another base model; UnusableAnswer,
        Unavailable, UnknownAdapter, BucketError when that could not be told now."""
        probe = (await self._manifest(version, epoch)).probe
        folder = self._folder / "canary"
        await self._bucket.fetch({f"{keys.CANARY}/{name}": folder / name for name in FILES})
        name = f"grpod-{self._run.run_id}-canary-{secrets.token_hex(3)}"
        base = await self._base(probe.token_ids)
        if not attest.same_base(probe.base_logprobs, base):
            distance = attest.rms(probe.base_logprobs, base)
            raise NotReady(
                f"replica {self._client.url} serves another base model than the learner's: "
                f"log-probs of the probe are {distance:.2f} nats apart (rms)"
            )
        path = self._path(keys.CANARY, folder)
        try:
            await self._client.load_adapter(name, path)
        except Refused as error:
            if isinstance(error, UnknownAdapter):
                raise
            needs = "vLLM needs VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and a remote one generator.remote.adapter_root"
            raise NotReady(f"replica {self._client.url} does not load an adapter from {path}: {error}; {needs}") from error
        try:
            moved = await self._score(name, probe.token_ids)
        finally:
            with anyio.move_on_after(5.0, shield=True), suppress(UnknownAdapter, Unavailable, Refused):
                await self._client.unload_adapter(name)
        distance, wanted = attest.rms(base, moved), attest.canary_wanted(probe.base_logprobs, base)
        if distance < wanted:
            raise NotReady(
                f"replica {self._client.url} ignores adapters: the canary moves its log-probs by {distance:.2g} nats (rms), "
                f"at least {wanted:.2g} was expected; is LoRA switched on?"
            )
        self._log.info("canary_seen", moved=round(distance, 3), noise=attest.rms(probe.base_logprobs, base))

    async def bring(self, version: int, epoch: int) -> Served:
        """Makes it servable. Raises VersionRefused (remembered), NotFound (it was deleted), Unavailable, UnknownAdapter (it
        has forgotten what it has just loaded), UnusableAnswer (not even of the base), BucketError."""
        key = (version, epoch)
        if key in self.resident:
            return self.resident[key]
        if key in self.refused:
            raise VersionRefused(self.refused[key])
        name = keys.adapter_name(self._run.run_id, version, epoch)
        folder = self._folder / f"v{version}-e{epoch}"
        for left, its_folder in [(left, path) for left, path in self._begun.items() if left != name]:
            await self._drop(left, its_folder)  # its score did not come, and a newer version did: it must not keep a slot
        watch = _Stopwatch()
        try:
            manifest = await self._manifest(version, epoch)
            await self._fetch(manifest, folder)
            watch.lap("fetch_s")
            self._begun[name] = folder
            base = await self._base(manifest.probe.token_ids)
            verdict = await self._attest(manifest, name, self._path(keys.adapter_folder(version, epoch), folder), base, watch)
            await self._check_config(manifest, folder, verdict)
        except (VersionRefused, WireError) as error:
            self.refused[key] = str(error)
            self._log.error("version_refused", version=version, epoch=epoch, error=str(error))
            await self._drop(name, folder)
            raise VersionRefused(str(error)) from error
        del self._begun[name]
        self.unproven += verdict.kind == "unproven"
        self._log.debug("version_served", version=version, epoch=epoch, kind=verdict.kind, **verdict.describe(), **watch.laps)
        served = self.resident[key] = Served(name=name, version=version, epoch=epoch, manifest=manifest, took=watch.laps)
        return served

    async def drop(self, served: Served) -> None:
        self.resident.pop(served.key, None)
        await self._drop(served.name, self._folder / f"v{served.version}-e{served.epoch}")

    async def _manifest(self, version: int, epoch: int) -> Adapter:
        key = keys.adapter(version, epoch, keys.MANIFEST)
        found = await self._bucket.get(key)
        assert found is not None
        manifest = Adapter.decode(found.data, key)
        if manifest.run_id != self._run.run_id or manifest.base_fingerprint != self._run.base_fingerprint:
            raise WireError("foreign", f"{key}: of another run or base model")
        if (manifest.version, manifest.epoch) != (version, epoch):
            raise WireError("foreign", f"{key}: says to be version {manifest.version} of epoch {manifest.epoch}")
        return manifest

    async def _fetch(self, manifest: Adapter, folder: Path) -> None:
        version, epoch = manifest.version, manifest.epoch
        await self._bucket.fetch({keys.adapter(version, epoch, name): folder / name for name in manifest.files})
        for name, ref in manifest.files.items():
            data = await anyio.Path(folder / name).read_bytes()
            if len(data) != ref.size or hashlib.sha256(data).hexdigest() != ref.sha256:
                raise WireError("hash", f"{keys.adapter(version, epoch, name)} is not what its manifest says (size or sha256)")

    def _path(self, key: str, folder: Path) -> str:
        return str(folder) if self._root is None else f"{self._root.rstrip('/')}/{key}"

    async def _attest(self, manifest: Adapter, name: str, path: str, base: list[float], watch: _Stopwatch) -> attest.Verdict:
        """Raises VersionRefused, with how far what the replica serves is from the adapter and from the base."""
        probe, what = manifest.probe, f"version {manifest.version} (epoch {manifest.epoch})"
        try:
            await self._load(name, path)
            watch.lap("load_s")
            engine = await self._score(name, probe.token_ids)
            watch.lap("attest_s")
        except (VersionRefused, UnusableAnswer, Refused) as error:
            if isinstance(error, UnknownAdapter):
                raise
            distance = attest.rms(probe.base_logprobs, probe.logprobs)
            raise VersionRefused(
                f"{what} cannot be served by replica {self._client.url}, which is left at the base, {distance:.3g} nats (rms) "
                f"from the adapter: {error}"
            ) from error
        verdict = attest.judge(base_logprobs=probe.base_logprobs, logprobs=probe.logprobs, engine_base=base, engine=engine)
        if verdict.kind == "refused":
            raise VersionRefused(f"{what} is not what replica {self._client.url} serves: {verdict}")
        return verdict

    async def _check_config(self, manifest: Adapter, folder: Path, verdict: attest.Verdict) -> None:
        """Also where this engine makes of it what the probe says: another one would not. Raises VersionRefused."""
        if keys.ADAPTER_CONFIG not in manifest.files:
            return
        if more := beyond(await anyio.Path(folder / keys.ADAPTER_CONFIG).read_bytes(), manifest.lora):
            raise VersionRefused(
                f"version {manifest.version} (epoch {manifest.epoch}) is not the plain LoRA that its manifest tells of: its "
                f"{keys.ADAPTER_CONFIG} has {'; '.join(more)}; {verdict}"
            )

    async def _load(self, name: str, path: str, *, again: bool = False) -> None:
        try:
            await self._client.load_adapter(name, path)
        except Refused as error:
            if again or "already been loaded" not in str(error):
                raise VersionRefused(f"it would not load it: {error}") from error
            # By a generator before this one, whose files are gone: an engine that reads them once more dies of it.
            await self._client.unload_adapter(name)
            await self._load(name, path, again=True)
        except Unavailable as error:
            if error.status == 500 and await self._client.health():  # vLLM's word for files that it cannot use
                raise VersionRefused(f"it could not load it: {error}") from error
            raise

    async def _base(self, token_ids: list[int]) -> list[float]:
        """Every version of a run has the same probe, so one is remembered; another one's score would prove nothing."""
        if self._base_known is None or self._base_known[0] != token_ids:
            self._base_known = token_ids, await self._score(self._base_name, token_ids)
        return self._base_known[1]

    async def _score(self, model: str, token_ids: list[int]) -> list[float]:
        """An answer that cannot be used is asked for again: one bad moment must not cost a version."""
        for pause_s in _ASK_AGAIN_S:
            try:
                return await self._client.score(model, token_ids)
            except UnusableAnswer as error:
                self._log.debug("score_unusable", model=model, reason=error.reason, error=str(error))
            await anyio.sleep(pause_s)
        return await self._client.score(model, token_ids)

    async def _drop(self, name: str, folder: Path) -> None:
        self._begun.pop(name, None)
        with suppress(UnknownAdapter, Unavailable, Refused):  # it is not there, or the replica is gone and with it the name
            await self._client.unload_adapter(name)
        shutil.rmtree(folder, ignore_errors=True)


class _Stopwatch:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._at = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name], self._at = round(now - self._at, 4), now
