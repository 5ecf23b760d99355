"""What the proxy says of its replicas: as one vLLM server (models, server_info), and as itself (status, page). Pure."""

from __future__ import annotations

import time
from html import escape
from typing import Any

import anyio

from grpod.proxy.replicas import Fleet, Replica


def state(replica: Replica, fleet: Fleet) -> str:
    """In a word: starting, down, resting, catching_up, up."""
    if not replica.up:
        return "down" if replica.bases else "starting"
    if anyio.current_time() < replica.rest_until:
        return "resting"
    lacks = replica.owned and any(live not in replica.loaded for live in fleet.wanted.active.values())
    return "catching_up" if lacks else "up"


def models(fleet: Fleet) -> dict[str, Any]:
    """Every name that is answered to, the base first, with the least max_model_len: a prompt fits wherever it goes."""
    lengths = [info.max_model_len for r in fleet.replicas.values() if (info := r.info) and info.max_model_len is not None]
    least = min(lengths, default=None)
    bases = fleet.bases()
    names = {name for replica in fleet.replicas.values() for name in replica.names(fleet.wanted)} - set(bases)
    cards = [_card(name, root=name, parent=None, max_model_len=least) for name in bases]
    for name in sorted(names | fleet.wanted.active.keys()):
        live = fleet.wanted.active.get(name)
        cards.append(_card(name, root=live.path if live else name, parent=bases[0] if bases else None, max_model_len=None))
    return {"object": "list", "data": cards}


def _card(name: str, *, root: str, parent: str | None, max_model_len: int | None) -> dict[str, Any]:
    card = {"id": name, "object": "model", "created": 0, "owned_by": "grpod", "root": root, "parent": parent}
    return card | {"max_model_len": max_model_len}


def server_info(fleet: Fleet) -> dict[str, Any] | None:
    """In vLLM's shape. None: no replica has told yet. What can be asked of every replica: minima; and one rank of data
    parallel, since a client that sees more would not trust an adapter to reach them all."""
    told = [replica.info for replica in fleet.owned or fleet.replicas.values() if replica.info is not None]
    if not told:
        return None
    lengths = [info.max_model_len for info in told if info.max_model_len is not None]
    return {
        "vllm_config": {
            "parallel_config": {"data_parallel_size": 1},
            "lora_config": {
                "max_loras": min(info.max_loras for info in told),
                "max_lora_rank": min(info.max_lora_rank for info in told),
            },
            "model_config": {
                "dtype": _common([info.dtype for info in told]),
                "logprobs_mode": _common([info.logprobs_mode for info in told]),
                "max_model_len": min(lengths, default=None),
            },
        }
    }


def _common(values: list[str]) -> str:
    return values[0] if len(set(values)) == 1 else ""


def replicas(fleet: Fleet) -> list[dict[str, Any]]:
    return [
        {
            "url": replica.url,
            "owner": replica.owner,
            "state": state(replica, fleet),
            "error": replica.error,
            "bases": list(replica.bases),
            "adapters": sorted(replica.names(fleet.wanted) - set(replica.bases)),
            "refused": {live.name: str(a.refused) for live, a in replica.attempts.items() if a.refused is not None},
            "outstanding_tokens": replica.outstanding,
            "requests": replica.requests,
            "strikes": replica.strikes,
        }
        for replica in fleet.replicas.values()
    ]


def status(fleet: Fleet, *, since: float) -> dict[str, Any]:
    """`attested` is false for every adapter: they came by a client's word, no probe of a bucket was scored."""
    up = sum(replica.up for replica in fleet.replicas.values())
    return {
        "state": "serving" if fleet.healthy() else "waiting for replicas",
        "uptime_s": round(time.time() - since, 1),
        "quorum": {"need": fleet.need() if fleet.owned else 1, "up": up, "of": len(fleet.replicas)},
        "paused": fleet.wanted.paused,
        "replicas": replicas(fleet),
        "adapters": [
            {
                "name": live.name,
                "path": live.path,
                "sha256": live.sha256,
                "attested": False,
                "held_by": [replica.url for replica in fleet.owned if live in replica.loaded],
                "in_use": fleet.wanted.in_use.get(live, 0),
            }
            for live in fleet.wanted.active.values()
        ],
        "counters": {"/".join(key): count for key, count in sorted(fleet.tally.items())},
    }


def page(fleet: Fleet) -> str:
    rows = "".join(
        f"<tr><td>{escape(entry['url'])}<td>{entry['owner']}<td>{entry['state']}<td>{entry['outstanding_tokens']}"
        f"<td>{escape(', '.join(entry['bases'] + entry['adapters']))}</tr>"
        for entry in replicas(fleet)
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>grpod proxy</title>'
        "<h1>grpod proxy</h1><p>One address for the replicas below; to a client it is one vLLM server. "
        'See <a href="grpod/v1/status">status</a>, <a href="metrics">metrics</a>, <a href="v1/models">models</a>.'
        "<table><tr><th>replica<th>owner<th>state<th>outstanding tokens<th>models</tr>"
        f"{rows or '<tr><td colspan=5>none yet'}</table></html>"
    )
