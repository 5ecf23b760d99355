"""How much may be begun: credit instead of waste. Pure.

A credit is a place in the order of training, so a group that is begun on credit is trained before it is stale:

    landed                    landed + stride                              landed + stride * (1 + max_lag)
      │ newest version is p         │ p+1                                         │ p+1+max_lag
      ▼                             ▼                                             ▼
    ──┼─────────── steps ───────────┼── … ────────────────────────────────────────┤  groups begun under p are still trainable
                                                                                  └─ nothing is credited beyond here

`landed` is the step reached when the newest manifest was written, `stride` the steps from one publish to the next:
publish_every, or more where the bucket is slow and the newest snapshot wins. With max_lag 0 the window must not move before
the publish itself, so there it counts from the published step, and the stride is publish_every.
"""

from __future__ import annotations

from collections.abc import Mapping


def window_end(*, published_step: int, landed_step: int, stride: int, publish_every: int, max_lag: int) -> int:
    """The last step whose groups may be begun now."""
    if max_lag == 0:
        return published_step + publish_every
    return landed_step + stride * (1 + max_lag)


def room(*, window_end: int, step: int, steps: int, groups_per_step: int, outstanding: int) -> int:
    """Groups that may be credited now. `outstanding`: credited (begun or not) or read, and not ended."""
    return max(0, (min(window_end, steps) - step) * groups_per_step - outstanding)


def share(room: int, outstanding: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, int]:
    """Split `room` so that what each generator has outstanding comes as near as it can to its weight (its throughput).

    Both mappings have the same keys; the result leaves out generators that get nothing.
    """
    if not weights or room <= 0:
        return {}
    total = sum(weights.values())
    weight = {name: (w / total if total > 0 else 1 / len(weights)) for name, w in weights.items()}
    have = dict(outstanding)
    given: dict[str, int] = {}
    goal = sum(have.values()) + room
    lacking = {name: max(0.0, goal * weight[name] - have[name]) for name in have}
    scale = room / sum(lacking.values()) if sum(lacking.values()) > 0 else 0.0
    for name in sorted(lacking, key=lambda n: -lacking[n]):
        grant = min(room - sum(given.values()), int(lacking[name] * scale))
        if grant:
            given[name] = grant
    for _ in range(room - sum(given.values())):  # what rounding left, to whoever lacks most
        name = min(sorted(have), key=lambda n: (have[n] + given.get(n, 0)) / max(weight[n], 1e-9))
        given[name] = given.get(name, 0) + 1
    return given
