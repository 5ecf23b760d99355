"""The claims of a run's learners, as they lie in the bucket: who holds which epoch, and how to claim one.

    atomic creates   leases/learner/<epoch>/claim.json     create-only: whoever creates it holds the epoch
    others           leases/learner/<epoch>/<nonce>.json   after `settle_s` the least (server time, nonce) holds it

Every reader applies the same rule, so that all agree without asking. A reply that was lost is settled by the nonce.
"""

from __future__ import annotations

from collections.abc import Mapping

import anyio

from grpod.bucket.base import Bucket, ObjectMeta
from grpod.errors import AlreadyExists, BucketError, NotFound
from grpod.telemetry.log import get_logger
from grpod.wire import keys
from grpod.wire.lease import Claim

SETTLE_S = 10.0  # longer than a write may stay invisible to another writer
ATTEMPTS = 8
_BACKOFF_S = 0.2  # doubled at every attempt


async def read_claims(bucket: Bucket, known: dict[str, Claim] | None = None) -> tuple[Claim, ...]:
    """The claim that holds each epoch, in order. `known` is kept between calls: a claim is written once, and read once."""
    known = {} if known is None else known
    epochs: dict[int, list[ObjectMeta]] = {}
    async for meta in bucket.list(keys.LEASES):
        parsed = keys.parse_lease(meta.key)
        if parsed and parsed[1] != "beat":
            epochs.setdefault(parsed[0], []).append(meta)
    holding = [min(metas, key=_precedence).key for _, metas in sorted(epochs.items())]
    for key in holding:
        if key not in known:
            found = await bucket.get(key)
            assert found is not None
            known[key] = Claim.decode(found.data, key)
    return tuple(known[key] for key in holding)


def _precedence(meta: ObjectMeta) -> tuple[bool, float, str]:
    """An atomic claim held at once, so it goes before claims that settle."""
    parsed = keys.parse_lease(meta.key)
    assert parsed
    return parsed[1] != "claim", meta.modified or 0.0, parsed[1]


async def place_claim(bucket: Bucket, claim: Claim, *, settle_s: float = SETTLE_S) -> bool:
    """Claim the epoch. False: another holds it. Raises `BucketError` when the bucket does not answer for long."""
    if bucket.atomic_create:
        return await _put(bucket, {keys.claim(claim.epoch): claim.encode()}, claim.nonce)
    get_logger().warning("lease_not_atomic", bucket=bucket.url, settle_s=settle_s, help="two learners are told apart by time")
    if not await _put(bucket, {keys.claim(claim.epoch, claim.nonce): claim.encode()}, claim.nonce):
        return False
    await anyio.sleep(settle_s)  # the protocol's own wait: every rival that did not see this claim has written its own by now
    claims = await read_claims(bucket)
    return any(c.epoch == claim.epoch and c.nonce == claim.nonce for c in claims)


async def _put(bucket: Bucket, items: Mapping[str, bytes], nonce: str) -> bool:
    """Create one object; what stands there in the end decides, not the reply."""
    (key,) = items
    for attempt in range(ATTEMPTS):
        failure: BucketError | None = None
        try:
            await bucket.put(items, create=True)
        except AlreadyExists:
            pass
        except BucketError as error:
            failure = error
        else:
            return True
        try:
            found = await bucket.get(key)
            assert found is not None
            return Claim.decode(found.data, key).nonce == nonce
        except NotFound as missing:
            failure = failure or missing
        except BucketError as error:
            failure = error
        if attempt + 1 == ATTEMPTS:
            raise failure
        await anyio.sleep(_BACKOFF_S * 2**attempt)
    raise AssertionError("unreachable")
