"""Every group ends once. The book holds each end from the moment it happens; a checkpoint makes it durable.

end()      in memory, at once: a second end of the same group is refused
fresh      ends that stand in no durable segment yet
settle(n)  the first n of them have become durable
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from grpod.wire.tables import End


class Book:
    def __init__(self, ended: Iterable[End] = ()) -> None:
        self._ended: set[str] = set()
        self.trained = 0
        self.dropped: Counter[str] = Counter()
        self.fresh: list[End] = []
        for end in ended:
            self._note(end)

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._ended

    def end(self, end: End) -> bool:
        """False: it had ended before, and nothing is changed."""
        if end.group_id in self._ended:
            return False
        self._note(end)
        self.fresh.append(end)
        return True

    def settle(self, count: int) -> None:
        del self.fresh[:count]

    def _note(self, end: End) -> None:
        self._ended.add(end.group_id)
        if end.end == "trained":
            self.trained += 1
        else:
            self.dropped[end.reason] += 1
