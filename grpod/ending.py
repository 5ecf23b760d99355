"""How a process of grpod ends, with which code, and what it says: once.

    an error           a GrpodError in one line, anything else with its traceback      the code of the first one raised
    a second signal    at once
    nothing moves      at once, a moment before the grace period is over, as what has asked for the end kills then: a thread in
                       a long step cannot be cancelled, and the bucket has everything that counts

Children need no goodbye: their reaper ends them when our pipe closes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator

from grpod.errors import GrpodError
from grpod.telemetry import log as logs

log = logs.get_logger()
MARGIN_S = 0.5


def exit_code(error: BaseException) -> int:
    """That of the first error raised; what its cancellation brought about in others comes after it."""
    first = next(_leaves(error))
    return first.exit_code if isinstance(first, GrpodError) else 1


def blame(error: BaseException, role: str) -> None:
    """Notes on every error in it whose it is, for `report` and for a traceback."""
    for leaf in _leaves(error):
        leaf.add_note(f"in role {role}")


def report(error: BaseException) -> int:
    """Logs what an (exception group of an) error holds, the same fault in two roles once. Returns the exit code."""
    said: dict[tuple[type[GrpodError], str], list[str]] = {}
    for leaf in {id(leaf): leaf for leaf in _leaves(error)}.values():
        if isinstance(leaf, GrpodError):
            said.setdefault((type(leaf), str(leaf)), []).extend(getattr(leaf, "__notes__", ()))
        else:
            log.critical("crashed", error=type(leaf).__name__, exc_info=leaf)
    for (kind, message), notes in said.items():
        where = {"where": ", ".join(notes)} if notes else {}
        log.error("failed", error=kind.__name__, message=message, exit_code=kind.exit_code, **where)
    return exit_code(error)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def at_once(signum: int, frame: object) -> None:
    """A signal handler."""
    os.write(2, f"grpod: {signal.Signals(signum).name} again: ends at once\n".encode())
    os._exit(128 + signum)


def cancel_after_s(grace_s: float) -> float:
    """What is cancelled needs a moment, and has to be gone before the process is ended by force."""
    return grace_s - min(3.0, grace_s / 5)


def force_after_s(grace_s: float) -> float:
    return grace_s - min(MARGIN_S, grace_s / 20)


class HardEnd:
    """Armed when the end has begun, disarmed when it is reached; else it ends the process from a thread of its own."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None
        self._error: Exception | None = None

    def arm(self, grace_s: float, error: Exception | None) -> None:
        """`error`: why it ends; None: it was asked to, which is exit code 0 also when a role did not make it in time."""
        self._error = self._error or error
        if self._timer is None:
            self._timer = threading.Timer(force_after_s(grace_s), self._end)
            self._timer.daemon = True
            self._timer.start()

    def disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        code = 0 if self._error is None else report(self._error)
        log.error("ended_by_force", reason="a role did not end in the grace period", exit_code=code)
        sys.stderr.flush()
        os._exit(code)
