"""One reward worker, seen from grpod: start it, ask it, end it. It is asked one thing at a time, by its owner (the pool).

Whatever ends a call early (a time-out, a cancellation, a broken pipe) ends the process with all that it started: a worker
that may still be busy is never asked again. It starts anew at the next call, which does not count as that call's time.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from grpod.errors import GrpodError
from grpod.generator import reward_worker

_KEEPER_S = 1.5  # for the keeper to end all below it; then its process group is ended from here
_GONE = (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError)


class WorkerDied(Exception):
    """The process ended in the middle of a call: exit code as shells say it, 128 + signal."""

    def __init__(self, returncode: int | None) -> None:
        died_of = f"signal {returncode - 128}" if returncode is not None and returncode > 128 else f"exit code {returncode}"
        super().__init__(f"the reward function ended its process ({died_of})")


class RewardProcess:
    def __init__(self, introduction: Mapping[str, Any], *, start_timeout_s: float) -> None:
        """`introduction`: the first frame, sent at every start."""
        self._introduction = {"path": list(sys.path), **introduction}
        self._start_timeout_s = start_timeout_s
        self._process: Process | None = None
        self._answers: BufferedByteReceiveStream | None = None

    async def start(self) -> None:
        """Returns when user code is imported. Raises GrpodError: it could not be."""
        if self._process is not None:
            return
        self._process = await anyio.open_process(
            [sys.executable, "-P", str(Path(reward_worker.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None,  # ours: what user code prints stands in grpod's log
            env={"OMP_NUM_THREADS": "1", **os.environ},  # many workers, few cores
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._answers = BufferedByteReceiveStream(self._process.stdout)
        try:
            answer = await self._ask(self._introduction, self._start_timeout_s)
        except TimeoutError:
            raise GrpodError(f"reward functions: their import did not end within {self._start_timeout_s:g} s") from None
        except WorkerDied as error:
            raise GrpodError(f"reward functions: while they were imported: {error}") from None
        if "unusable" in answer:
            await self.end()
            raise GrpodError(str(answer["unusable"]))

    async def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Raises TimeoutError (at most `timeout_s` + 2 s after the call), WorkerDied; GrpodError when it does not start."""
        await self.start()
        return await self._ask(request, timeout_s)

    async def _ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._answers is not None
        data = pickle.dumps(dict(request))
        header = reward_worker.HEADER
        try:
            with anyio.fail_after(timeout_s):
                await self._process.stdin.send(header.pack(len(data)) + data)
                (size,) = header.unpack(await self._answers.receive_exactly(header.size))
                answer: dict[str, Any] = json.loads(await self._answers.receive_exactly(size))
        except _GONE:
            raise WorkerDied(await self.end()) from None
        except BaseException:
            await self.end()
            raise
        return answer

    async def end(self) -> int | None:
        """Nothing of it is left when this returns; its exit code. Not to be cancelled, and bounded all the same."""
        process, self._process, self._answers = self._process, None, None
        if process is None:
            return None
        assert process.stdin is not None
        with anyio.CancelScope(shield=True):
            await process.stdin.aclose()
            with anyio.move_on_after(_KEEPER_S):
                await process.wait()
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
            await process.aclose()
        return process.returncode
