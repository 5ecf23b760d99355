"""The one thread that computes. It consumes commands, produces tokens, and sleeps only while it has nothing to do.

    loop:  take all commands (wait for one when idle) ─▶ admit what fits ─▶ one step for the whole batch ─▶ tell the loop

Commands are functions run between two steps, so nothing else needs a lock. A job that nobody waits for any more is marked
`cancelled` and leaves at the next step. An error in here is not survived: the process ends, and its supervisor starts another.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal

import torch

from grpod.replica.embedded.batch import Batch
from grpod.replica.embedded.jobs import Job
from grpod.replica.embedded.model import Model

PROMPT_TOKENS = 16_384  # of one pass over prompts, padding included
LINGER_S = 0.002  # an idle engine that is asked for one completion waits so long for its companions


class Engine:
    """Made on the event loop, run in a thread; other methods than `run` may be called from the loop only."""

    def __init__(
        self, model: Model, *, post: Callable[[Callable[[], None]], None], threads: int, max_rows: int, cache_bytes: int
    ) -> None:
        self._batch = Batch(model)
        self._model = model
        self._post = post  # takes what is to be called on the event loop; does not wait for it
        self._threads = threads
        self._max_rows = max_rows
        self._max_tokens = cache_bytes // model.token_bytes
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._admitting = self._stepping = True  # pause clears one or both
        self._drained: list[Callable[[], None]] = []  # of pause(wait)
        self._stopped = False
        self.prompt_tokens = self.generated_tokens = 0

    @property
    def num_running(self) -> int:
        return self._batch.num_live

    @property
    def num_waiting(self) -> int:
        """Completions, as vLLM counts them."""
        return sum(len(job.choices) for job in list(self._waiting))

    def submit(self, job: Job) -> None:
        self._commands.put(lambda: self._waiting.append(job))

    def pause(self, mode: Literal["abort", "wait", "keep"], done: Callable[[], None]) -> None:
        """Calls `done` (on the loop) once it is paused; what is submitted meanwhile waits for `resume`."""
        self._commands.put(lambda: self._pause(mode, done))

    def resume(self) -> None:
        self._commands.put(self._resume)

    def look(self) -> None:
        """Something was cancelled: an idle engine need not keep it."""
        self._commands.put(lambda: None)

    def stop(self) -> None:
        self._commands.put(self._stop)

    @torch.inference_mode()
    def run(self) -> None:
        torch.set_num_threads(self._threads)
        while not self._stopped:
            self._take_commands()
            self._forget_cancelled()
            live = {row.job for row in self._batch.rows if row.live}
            before = sum(len(choice.token_ids) for job in live for choice in job.choices)
            if self._admitting:
                while jobs := self._next_jobs():
                    live.update(jobs)
                    self.prompt_tokens += sum(len(job.prompt_ids) for job in jobs)
                    self._batch.admit(jobs)
            if self._stepping:
                self._batch.step()
            self.generated_tokens += sum(len(choice.token_ids) for job in live for choice in job.choices) - before
            self._batch.drop_finished()
            told = [job for job in live if job.stream or job.finished]
            if told:
                self._post(partial(notify, told))
            if self._drained and not self._batch.rows:
                for done in self._drained:
                    self._post(done)
                self._drained.clear()

    def _take_commands(self) -> None:
        busy = (self._stepping and self._batch.rows) or (self._admitting and self._waiting)
        if not busy:
            self._commands.get()()
        until = time.monotonic() + (0.0 if busy else LINGER_S)
        while True:
            left_s = until - time.monotonic()
            try:
                command = self._commands.get(timeout=left_s) if left_s > 0 else self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _next_jobs(self) -> list[Job]:
        """The longest head of the queue that fits: rows, cache, and tokens of one pass. One job always fits an idle engine."""
        jobs: list[Job] = []
        num_rows, longest = self._batch.num_live, max((row.job.longest for row in self._batch.rows), default=0)
        width = 0
        while self._waiting:
            job = self._waiting[0]
            num_rows, longest, width = num_rows + len(job.choices), max(longest, job.longest), max(width, len(job.prompt_ids))
            full = num_rows > self._max_rows or num_rows * longest > self._max_tokens
            if (full and (jobs or self._batch.num_live)) or (jobs and self._unlike(jobs, job, width)):
                break
            jobs.append(self._waiting.popleft())
        return jobs

    def _unlike(self, jobs: list[Job], job: Job, width: int) -> bool:
        return job.score != jobs[0].score or width * (len(jobs) + 1) > PROMPT_TOKENS

    def _forget_cancelled(self) -> None:
        if any(job.cancelled for job in self._waiting):
            self._waiting = deque(job for job in self._waiting if not job.cancelled)
        self._batch.drop_finished()

    def _pause(self, mode: str, done: Callable[[], None]) -> None:
        self._admitting = False
        self._stepping = mode != "keep"
        if mode == "abort":
            ended = {row.job for row in self._batch.rows} | set(self._waiting)
            for job in ended:
                for choice in job.choices:
                    choice.finish_reason = choice.finish_reason or "abort"
            self._waiting.clear()
            self._batch.drop_finished()
            self._post(partial(notify, list(ended)))
        if mode == "wait" and self._batch.num_live:
            self._drained.append(done)
        else:
            self._post(done)

    def _resume(self) -> None:
        self._admitting = self._stepping = True

    def _stop(self) -> None:
        self._stopped = True


def notify(jobs: Iterable[Job]) -> None:
    for job in jobs:
        job.notify()
