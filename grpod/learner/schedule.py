"""When a snapshot is due, and which tokens every version is probed with. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

from grpod.config import LearnerSection

_SMALL_BYTES = 64 * 2**20  # up to here `checkpoint_every: auto` means every publish
_LARGE_EVERY = 10  # publishes, beyond it
_PROBE_TOKENS = 160


@dataclass(frozen=True, kw_only=True)
class Wanted:
    publish: bool
    checkpoint: bool


class Due:
    """A publish that could not be taken in time, because one was under way, stays due."""

    def __init__(self, learner: LearnerSection, *, step: int, resumable_bytes: int) -> None:
        self._publish_every = learner.publish_every
        every = learner.checkpoint_every
        auto = self._publish_every * (1 if resumable_bytes <= _SMALL_BYTES else _LARGE_EVERY)
        self._checkpoint_every = auto if every == "auto" else every
        self._published = self._checkpointed = step
        self._missed = Wanted(publish=False, checkpoint=False)

    def at(self, step: int) -> Wanted:
        return Wanted(
            publish=self._missed.publish or step - self._published >= self._publish_every,
            checkpoint=self._missed.checkpoint or step - self._checkpointed >= self._checkpoint_every,
        )

    def took(self, step: int, *, publish: bool, checkpoint: bool) -> None:
        if publish:
            self._published = step
        if checkpoint:
            self._checkpointed = step
        self._missed = Wanted(publish=False, checkpoint=False)

    def missed(self, *, publish: bool, checkpoint: bool) -> None:
        """What was taken could not be written: it is due again, whether or not there is another step."""
        self._missed = Wanted(publish=publish, checkpoint=checkpoint)


def probe_ids(run_id: str, vocab_size: int, max_model_len: int) -> list[int]:
    """The same for every version of a run; short enough for every replica, with one token to spare for its answer."""
    draw = random.Random(run_id)
    return [draw.randrange(vocab_size) for _ in range(min(_PROBE_TOKENS, max_model_len - 1))]
