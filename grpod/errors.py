"""Every error that grpod raises on purpose, one tree. The class says whose fault it is, and with which code the process ends.

GrpodError 1
├── ConfigError 2        the user's: config, command line, data set, model folder
├── LeaseLost 3          another learner holds the run
├── NotReady 75          a dependency never became ready (bucket, replica, learner)
├── BucketError 1        storage failed after its retries
│   ├── NotFound         no object under that key
│   └── AlreadyExists    create-only met an object that is there
├── WireError 1          an object cannot be read; `reason` is its word in quarantine/ and in the README's table
└── ReplicaError 1       see replica/client.py
"""

from __future__ import annotations

from collections.abc import Sequence


class GrpodError(Exception):
    exit_code = 1


class ConfigError(GrpodError):
    """One message that names the thing, its value and what would be right."""

    exit_code = 2


class LeaseLost(GrpodError):
    exit_code = 3


class NotReady(GrpodError):
    exit_code = 75


class BucketError(GrpodError):
    def __init__(self, message: str, *, keys: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.keys = tuple(keys)  # the keys that failed; the others of the batch are written


class NotFound(BucketError):
    def __init__(self, key: str) -> None:
        super().__init__(f"no object {key!r}", keys=(key,))


class AlreadyExists(BucketError):
    def __init__(self, keys: Sequence[str]) -> None:
        super().__init__(f"already there, and written once only: {', '.join(keys)}", keys=keys)


class WireError(GrpodError):
    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ReplicaError(GrpodError):
    pass
