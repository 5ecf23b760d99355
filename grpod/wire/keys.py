"""Where everything lies in a run's folder: the only place that spells a key.

    run.json
    rollouts/<generator>/<seq:010d>.parquet
    adapters/v<version:08d>-e<epoch:06d>/…      adapters/canary/…
    checkpoints/s<step:08d>-e<epoch:06d>/…
    ledger/e<epoch:06d>/s<step:08d>.parquet
    metrics/<who>/<seq:010d>.parquet
    state/learner.json  state/proxy.json  state/generators/<generator>.json
    leases/learner/<epoch:06d>/{claim.json | <nonce>.json, beat.json}
    control/stop-<nonce>.json   quarantine/…   final/…

A name that does not fit exactly parses to None: it is somebody else's.
"""

from __future__ import annotations

import re
from typing import Final

RUN: Final = "run.json"
ROLLOUTS: Final = "rollouts"
ADAPTERS: Final = "adapters"
CHECKPOINTS: Final = "checkpoints"
LEDGER: Final = "ledger"
METRICS: Final = "metrics"
QUARANTINE: Final = "quarantine"
CONTROL: Final = "control"
FINAL: Final = "final"
LEASES: Final = "leases/learner"
GENERATOR_STATES: Final = "state/generators"
LEARNER_STATE: Final = "state/learner.json"
PROXY_STATE: Final = "state/proxy.json"

MANIFEST: Final = "manifest.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
ADAPTER_CONFIG: Final = "adapter_config.json"
OPTIMIZER: Final = "optimizer.safetensors"
TRAINER: Final = "trainer.json"
CANARY: Final = "adapters/canary"
FINAL_MANIFEST: Final = "final/manifest.json"

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)  # of a generator
_ROLLOUT = re.compile(r"rollouts/([A-Za-z0-9][A-Za-z0-9._-]{0,63})/(\d{10})\.parquet", re.ASCII)
_ADAPTER = re.compile(r"adapters/v(\d{8})-e(\d{6})(?:/.*)?", re.ASCII)
_CHECKPOINT = re.compile(r"checkpoints/s(\d{8})-e(\d{6})(?:/.*)?", re.ASCII)
_LEDGER = re.compile(r"ledger/e(\d{6})/s(\d{8})\.parquet", re.ASCII)
_METRICS = re.compile(r"metrics/([A-Za-z0-9][A-Za-z0-9._-]{0,63})/(\d{10})\.parquet", re.ASCII)
_STATE = re.compile(r"state/generators/([A-Za-z0-9][A-Za-z0-9._-]{0,63})\.json", re.ASCII)
_LEASE = re.compile(r"leases/learner/(\d{6})/([A-Za-z0-9_.-]+)\.json", re.ASCII)
_STOP = re.compile(r"control/stop-([A-Za-z0-9]+)\.json", re.ASCII)


def rollout(generator: str, seq: int) -> str:
    return f"{ROLLOUTS}/{generator}/{seq:010d}.parquet"


def parse_rollout(key: str) -> tuple[str, int] | None:
    """(generator, seq)"""
    m = _ROLLOUT.fullmatch(key)
    return (m[1], int(m[2])) if m else None


def adapter_folder(version: int, epoch: int) -> str:
    return f"{ADAPTERS}/v{version:08d}-e{epoch:06d}"


def adapter(version: int, epoch: int, name: str) -> str:
    return f"{adapter_folder(version, epoch)}/{name}"


def parse_adapter(key: str) -> tuple[int, int] | None:
    """(version, epoch) of a folder, or of anything inside it"""
    m = _ADAPTER.fullmatch(key)
    return (int(m[1]), int(m[2])) if m else None


def checkpoint_folder(step: int, epoch: int) -> str:
    return f"{CHECKPOINTS}/s{step:08d}-e{epoch:06d}"


def checkpoint(step: int, epoch: int, name: str) -> str:
    return f"{checkpoint_folder(step, epoch)}/{name}"


def parse_checkpoint(key: str) -> tuple[int, int] | None:
    """(step, epoch)"""
    m = _CHECKPOINT.fullmatch(key)
    return (int(m[1]), int(m[2])) if m else None


def ledger(epoch: int, step: int) -> str:
    return f"{LEDGER}/e{epoch:06d}/s{step:08d}.parquet"


def parse_ledger(key: str) -> tuple[int, int] | None:
    """(epoch, step)"""
    m = _LEDGER.fullmatch(key)
    return (int(m[1]), int(m[2])) if m else None


def metrics(who: str, seq: int) -> str:
    return f"{METRICS}/{who}/{seq:010d}.parquet"


def parse_metrics(key: str) -> tuple[str, int] | None:
    """(who, seq)"""
    m = _METRICS.fullmatch(key)
    return (m[1], int(m[2])) if m else None


def generator_state(generator: str) -> str:
    return f"{GENERATOR_STATES}/{generator}.json"


def parse_generator_state(key: str) -> str | None:
    m = _STATE.fullmatch(key)
    return m[1] if m else None


def lease_folder(epoch: int) -> str:
    return f"{LEASES}/{epoch:06d}"


def claim(epoch: int, nonce: str | None = None) -> str:
    """`nonce` only where creates are not atomic."""
    return f"{lease_folder(epoch)}/{nonce or 'claim'}.json"


def beat(epoch: int) -> str:
    return f"{lease_folder(epoch)}/beat.json"


def parse_lease(key: str) -> tuple[int, str] | None:
    """(epoch, 'claim' | 'beat' | nonce)"""
    m = _LEASE.fullmatch(key)
    return (int(m[1]), m[2]) if m else None


def stop(nonce: str) -> str:
    return f"{CONTROL}/stop-{nonce}.json"


def parse_stop(key: str) -> str | None:
    m = _STOP.fullmatch(key)
    return m[1] if m else None


def quarantine(key: str) -> str:
    """Folder of a quarantined object: `object` (its bytes) and `reason.json` lie inside."""
    return f"{QUARANTINE}/{key}"


def adapter_name(run_id: str, version: int, epoch: int) -> str:
    """Its name inside a replica: never reused, not by another run on the same URL either."""
    return f"grpod-{run_id}-v{version}-e{epoch}"
