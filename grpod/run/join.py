"""run.json: whoever comes first writes down what all agree on; whoever comes later must agree.

learner    may create it; its own differing `learner.*` keys are changes, recorded in its claim: but what generators read
           of them is as fixed as the rest
others     wait for it, and refuse to join with another agreed key or another base model
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio

from grpod.bucket.base import Bucket
from grpod.config import Config
from grpod.configure import agreed_values, differences
from grpod.errors import AlreadyExists, BucketError, ConfigError, NotFound, NotReady
from grpod.run.claims import SETTLE_S
from grpod.telemetry.log import get_logger
from grpod.wire import keys
from grpod.wire.run import Run

_LOOK_S = 2.0
_FREE = "learner"  # the section that a resume may change
_FIXED = ("learner.loss.mask_truncated",)  # in it, and read by generators too: they ship the loss mask


@dataclass(frozen=True, kw_only=True)
class Joined:
    run: Run
    created: bool = False
    changes: dict[str, Any] = field(default_factory=dict)  # "learner.key" -> value here, where it differs from the run's


async def join(
    bucket: Bucket,
    config: Config,
    fingerprint: str | None,
    *,
    may_create: bool,
    timeout_s: float,
    inputs: Mapping[str, str] | None = None,
    settle_s: float = SETTLE_S,
) -> Joined:
    """`fingerprint` None: of who has no base model (the proxy). Raises `ConfigError` naming every difference; `NotReady` when
    nobody has begun the run, or the bucket could not be reached, for `timeout_s`."""
    own = Run(
        run_id=secrets.token_hex(6),
        config=agreed_values(config),
        base_fingerprint=fingerprint or "",
        inputs=dict(inputs or {}),
        created_at=time.time(),
    )
    run = await wait_for_run(bucket, timeout_s, begin=own if may_create else None, settle_s=settle_s)
    faults = differences(run.config, config, ignore=(_FREE,), but=_FIXED)
    if fingerprint is not None and run.base_fingerprint != fingerprint:
        faults.append(
            f"the base model is not that of the run (another model, revision or tokenizer): "
            f"{run.base_fingerprint[:12]} in the run and {fingerprint[:12]} here"
        )
    if faults:
        raise ConfigError(f"{bucket.url} is run {run.run_id}, which agreed on something else:\n" + "\n".join(faults))
    created = run.run_id == own.run_id
    get_logger().info("run_created" if created else "run_joined", bucket=bucket.url, run_id=run.run_id)
    return Joined(run=run, created=created, changes=_changes(run.config, own.config))


async def wait_for_run(bucket: Bucket, timeout_s: float, *, begin: Run | None = None, settle_s: float = SETTLE_S) -> Run:
    """The run's own run.json, created from `begin` if it is not there."""
    log = get_logger()
    told = ""
    problem = "no learner has begun it"
    with anyio.move_on_after(timeout_s):
        while True:
            try:
                if run := await read_run(bucket):
                    return run
                if begin is not None:
                    await _create(bucket, begin, settle_s)
                    continue
            except BucketError as error:
                problem = str(error)
            if told != problem:
                log.info("waiting_for_run", bucket=bucket.url, reason=problem)
                told = problem
            await bucket.changed(_LOOK_S)
    raise NotReady(f"no run at {bucket.url} after {timeout_s:g} s: {problem}")


async def read_run(bucket: Bucket) -> Run | None:
    """None: there is no run. Raises `WireError` when run.json is none of ours."""
    try:
        found = await bucket.get(keys.RUN)
    except NotFound:
        return None
    assert found is not None
    return Run.decode(found.data, keys.RUN)


async def _create(bucket: Bucket, run: Run, settle_s: float) -> None:
    """Afterwards run.json stands, of this one or of a rival: who has created it is only known from reading it."""
    try:
        await bucket.put({keys.RUN: run.encode()}, create=True)
    except AlreadyExists:
        return
    if not bucket.atomic_create:
        await anyio.sleep(settle_s)  # a rival that had not seen it may have overwritten it: then it counts


def _changes(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    there, here = _flat(theirs.get(_FREE), _FREE), _flat(mine.get(_FREE), _FREE)
    return {key: value for key, value in here.items() if key in there and there[key] != value}


def _flat(values: Any, name: str) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        return {name: values}
    return {key: value for part, inner in values.items() for key, value in _flat(inner, f"{name}.{part}").items()}
