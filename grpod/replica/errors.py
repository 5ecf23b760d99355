"""What can go wrong with a replica, by what the caller may do about it.

ReplicaError
├── Unavailable      nothing came, or a 5xx: the same request may be sent again, here or elsewhere
├── Refused          4xx: the same request will be refused again
│   └── UnknownAdapter   404 for a name: the replica does not hold it (any more)
└── UnusableAnswer   status 200, and no completion that could be trained on
"""

from __future__ import annotations

from typing import Literal

from grpod.errors import ReplicaError

Reason = Literal[
    "abort",
    "choices_missing",
    "empty",
    "error_body",
    "finish_reason",
    "index_twice",
    "json",
    "logprobs_length",
    "logprobs_missing",
    "logprobs_not_finite",
    "logprobs_null",
    "logprobs_positive",
    "metrics",
    "model",
    "no_tokens",
    "prompt_ids",
    "too_many_tokens",
]


class Unavailable(ReplicaError):
    def __init__(self, url: str, what: str, *, status: int | None = None) -> None:
        super().__init__(f"replica {url}: {what}")
        self.status = status  # None: no whole answer came


class Refused(ReplicaError):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"replica answered {status}: {message}")
        self.status = status
        self.message = message  # the server's own words


class UnknownAdapter(Refused):
    pass


class UnusableAnswer(ReplicaError):
    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(f"replica gave no usable answer ({reason}): {message}")
        self.reason: Reason = reason
