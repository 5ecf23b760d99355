"""What the feed's tests share: groups and objects in one line each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpod.run.lineage import Lineage
from grpod.wire import keys
from grpod.wire.adapter import Adapter, FileRef, Lora, Probe
from grpod.wire.rollout import Drop, Group, Rollout, Sampling, Shipment, encode_shipment
from grpod.wire.state import GeneratorState
from tests.run.helpers import claim

RUN, BASE, SHA = "run1", "fingerprint", "a" * 64


def lineage() -> Lineage:
    return Lineage((claim(1),))


def manifest(version: int, *, epoch: int = 1, sha256: str = SHA) -> Adapter:
    return Adapter(
        run_id=RUN,
        version=version,
        epoch=epoch,
        pos=version,
        step=version,
        base_fingerprint=BASE,
        lora=Lora(r=1, alpha=1, targets=["q_proj"]),
        files={keys.ADAPTER_WEIGHTS: FileRef(size=1, sha256=sha256)},
        probe=Probe(token_ids=[1, 2], logprobs=[-1.0], base_logprobs=[-1.0]),
        created_at=0.0,
    )


def group(group_id: str, rewards: Sequence[float] = (1.0, 0.0), *, version: int = 0, **more: Any) -> Group:
    rollouts = tuple(
        Rollout(
            completion_ids=(5, 2),
            generator_logprobs=(-1.0, -1.0),
            loss_mask=(1, 1),
            reward=reward,
            rewards={"r": reward},
            finish_reason="stop",
            seed=0,
        )
        for reward in rewards
    )
    fields: dict[str, Any] = {
        "run_id": RUN,
        "group_id": group_id,
        "group_size": len(rollouts),
        "prompt_id": "p",
        "data_epoch": 0,
        "prompt_row": 0,
        "prompt_ids": (3, 4),
        "policy_version": version,
        "policy_epoch": 1,
        "adapter_sha256": SHA,
        "sampling": Sampling(temperature=1.0),
        "generator": group_id.partition("/")[0],
        "created_at": 0.0,
        "rollouts": rollouts,
    }
    return Group(**{**fields, **more})


def shipped(*groups: Group, drops: Sequence[Drop] = ()) -> bytes:
    return encode_shipment(Shipment(base_fingerprint=BASE, groups=groups, drops=tuple(drops)))


def state(name: str, *, begun: int, open_: Sequence[str] = (), next_seq: int = 0, counter: int = 1, **more: Any) -> bytes:
    return GeneratorState(
        generator=name,
        counter=counter,
        begun=begun,
        open=list(open_),
        next_seq=next_seq,
        started_at=0.0,
        updated_at=0.0,
        period_s=5.0,
        **{"resident": ["0-1"], **more},
    ).encode()
