r"""The process that scores: user code runs here and nowhere else, and can be ended whatever it does.

    grpod ──stdin──▶ keeper ── forks ──▶ scorer (frames in, frames out) ──▶ what user code starts
                        └ waits for: stdin closed (grpod wants it gone, or is itself gone) · the scorer's death
                          then ends every descendant, those in sessions of their own too, and itself

The keeper runs no user code, so no signal handler, endless C call or GIL can hold it up. Started by path, not by name, as
`python -P reward_worker.py`: it imports the standard library alone until the first frame brings grpod's own sys.path.
Frames: 4 bytes of length, then pickle (from our parent) or JSON (from here: the parent unpickles nothing).
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import pickle
import select
import signal
import struct
import sys
import time
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

if TYPE_CHECKING:
    import asyncio

    from grpod.generator.reward_functions import Reward

HEADER = struct.Struct("<I")
_SUBREAPER = 36  # prctl: orphans of user code become children of the keeper, which finds and ends them


def main() -> None:
    requests, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # user code that reads stdin finds it empty
    os.dup2(2, 1)  # and what it prints goes to the log, never between the frames
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, _note)
    # whoever stops the whole service signals us too; the parent may still want groups scored, and ends us when it is done.
    # A handler, not SIG_IGN: the programs that user code starts would inherit that
    signal.signal(signal.SIGTERM, _note)
    signal.signal(signal.SIGINT, _note)
    scorer = os.fork()
    if scorer:  # it keeps `answers` open too: the parent meets the end of the pipe when the exit code is known
        _keep(scorer, requests, woken)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.close(woken)
    os.close(wake)
    faulthandler.enable()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with os.fdopen(requests, "rb") as source, os.fdopen(answers, "wb") as sink:
        serve(source, sink)
    os._exit(0)  # threads of user code do not keep us


def _note(*_: Any) -> None:
    pass


# -- keeper


def _keep(scorer: int, requests: int, woken: int) -> NoReturn:
    poll = select.poll()
    poll.register(requests, 0)  # no bytes: those are the scorer's; only that the other end is closed
    poll.register(woken, select.POLLIN)
    status = _reap(scorer)
    while status is None:
        if any(fd == requests for fd, _ in poll.poll()):
            status = 0
        else:
            os.read(woken, 512)
            status = _reap(scorer)
    _end_descendants(scorer)
    # as shells say it: 128 + signal
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def _reap(scorer: int) -> int | None:
    """Collects the dead; the scorer's status, when it is one of them."""
    found = None
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return found
            found = status if pid == scorer else found
    except ChildProcessError:
        return 0 if found is None else found


def _end_descendants(scorer: int) -> None:
    until = time.monotonic() + 1.0  # one stuck in the kernel is left to it
    while time.monotonic() < until:
        for pid in _descendants(os.getpid()) or [scorer]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    todo = [pid]
    while todo:
        parent = todo.pop()
        try:
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children") as file:
                    children = [int(word) for word in file.read().split()]
                found += children
                todo += children
        except OSError:  # gone meanwhile, or no Linux
            continue
    return found


# -- scorer


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """First frame: {path, specs, columns}; each further one a call. Returns when the parent closes the pipe."""
    rewards: list[Reward] = []
    runner: asyncio.Runner | None = None
    while header := requests.read(HEADER.size):
        request = pickle.loads(requests.read(*HEADER.unpack(header)))
        if runner is None:
            sys.path[:] = request.pop("path")
            import asyncio  # only now: from grpod's own path

            runner = asyncio.Runner()  # one loop for all calls, so that user code may keep connections
        answer = _load(rewards, **request) if not rewards else _call(runner, rewards[request.pop("index")], **request)
        data = json.dumps(answer).encode()
        answers.write(HEADER.pack(len(data)) + data)
        answers.flush()


def _load(rewards: list[Reward], specs: Any, columns: list[str]) -> dict[str, Any]:
    from grpod.generator import reward_functions

    try:
        rewards += reward_functions.load([reward_functions.RewardSpec(**spec) for spec in specs], columns)
    except reward_functions.Unusable as fault:
        return {"unusable": str(fault)}
    return {"ready": True}


def _call(runner: asyncio.Runner, reward: Reward, **given: Any) -> dict[str, Any]:
    import inspect

    from grpod.generator.reward_values import Fault, plain_rewards

    async def settle(awaitable: Any) -> Any:
        return await awaitable

    try:
        returned = reward.function(**reward.arguments(**given))
        if inspect.isawaitable(returned):
            returned = runner.run(settle(returned))
        return {"rewards": plain_rewards(returned, len(given["completions"]))}
    except Fault as fault:
        return {"reason": fault.reason, "message": str(fault)}
    except BaseException as error:  # SystemExit and the like too: user code must not end the worker without a word
        return {"reason": "reward_error", "message": _words(error)}


def _words(error: BaseException) -> str:
    """Type, message and the innermost line: what a user needs to find it, short enough for a log."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = f" ({frame.tb_frame.f_code.co_filename}:{frame.tb_lineno})" if frame is not None else ""
    text = str(error)
    return f"{type(error).__name__}: {text if len(text) <= 500 else text[:497] + '...'}{where}"


if __name__ == "__main__":
    main()
