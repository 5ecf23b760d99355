"""A group in, a reward for each of its completions out, or one named reason why not. No fault ever becomes a reward of 0.

    score(group) ─▶ free worker process ─▶ function after function, each under its own time-out ─▶ weighted sum

    reward_type, reward_length, reward_not_finite   what a function returned (reward_values.py)
    reward_error     it raised, or ended its process; asked again twice before
    reward_timeout   its worker is ended, with all that it started, and replaced
    reward_none      a completion to which no function applies: None everywhere
One uncovered completion drops its group too: the others' rewards say nothing about it, and a group is trained on whole.
`None` is left out of the sum. A function of weight 0 is recorded and covers nothing.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio

from grpod.config import RewardSection
from grpod.errors import ConfigError, GrpodError, NotReady
from grpod.generator.prompts import Prompt
from grpod.generator.reward_process import RewardProcess, WorkerDied
from grpod.generator.reward_specs import reward_specs
from grpod.generator.reward_values import fits
from grpod.telemetry.log import get_logger

RETRIES_S = (0.1, 0.5)  # pauses before a function that raised is asked again


@dataclass(frozen=True, kw_only=True)
class Scores:
    totals: tuple[float, ...]  # weighted sums, by completion
    rewards: Mapping[str, tuple[float | None, ...]]  # by function, unweighted; None: did not apply


class RewardFailure(GrpodError):
    """This group is dropped under `reason`; the next one may do better."""

    def __init__(self, reason: str, message: str, function: str) -> None:
        super().__init__(f"reward function {function}: {message}")
        self.reason = reason
        self.message = message
        self.function = function


class RewardsUseless(NotReady):
    """Every group fell to the same fault, the last one under `reason`: going on would end in nothing."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class RewardHealth:
    """Ends a run whose rewards never worked: `limit` groups under one fault, and none that was ever scored."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._worked = False
        self._faults: Counter[tuple[str, str]] = Counter()

    def scored(self) -> None:
        self._worked = True

    def failed(self, failure: RewardFailure) -> bool:
        """True for the first of its kind. Raises RewardsUseless."""
        fault = (failure.function, failure.reason)
        self._faults[fault] += 1
        if not self._worked and self._faults[fault] >= self.limit:
            raise RewardsUseless(
                f"{failure.reason} in all of the first {self.limit} groups and no group scored: {failure}", failure.reason
            ) from failure
        return self._faults[fault] == 1


class RewardPool:
    """Processes that score. An async context manager: user code is imported on entering, and nothing is left after leaving.

    Entering raises ConfigError: a function, file, parameter, option or column that is not there.
    """

    def __init__(
        self,
        rewards: Sequence[RewardSection],
        *,
        folder: Path,
        columns: Iterable[str],
        workers: int = 2,
        give_up_after: int = 16,
        start_timeout_s: float = 120.0,
    ) -> None:
        """`folder`: of the config file. `columns`: those a function may ask for (`PromptSource.columns`)."""
        self._sections = tuple(rewards)
        self._specs = reward_specs(rewards, folder)
        # for modules beside the config or beside a reward file; last, so that they hide nothing that is installed
        beside = {str(folder.resolve()): None, **{str(Path(s.where).parent): None for s in self._specs if s.source is not None}}
        introduction = {
            "path": [*sys.path, *(path for path in beside if path not in sys.path)],
            "specs": [asdict(spec) for spec in self._specs],
            "columns": list(columns),
        }
        self._workers = [RewardProcess(introduction, start_timeout_s=start_timeout_s) for _ in range(workers)]
        self._idle = list(self._workers)
        self._free = anyio.Semaphore(workers)
        self._health = RewardHealth(max(give_up_after, 2 * workers))
        self._log = get_logger()

    @property
    def names(self) -> tuple[str, ...]:
        """Keys of `Scores.rewards`."""
        return tuple(spec.name for spec in self._specs)

    async def __aenter__(self) -> Self:
        try:
            await self._workers[0].start()  # the others at their first call
        except GrpodError as error:
            raise ConfigError(str(error)) from error
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        async with anyio.create_task_group() as group:
            for worker in self._workers:
                group.start_soon(worker.end)

    async def score(self, prompt: Prompt, completions: Sequence[str], completion_ids: Sequence[Sequence[int]]) -> Scores:
        """Waits for a free worker. Raises RewardFailure: drop the group; RewardsUseless: end the run."""
        shown: Sequence[Any] = completions
        if prompt.conversational:
            shown = [[{"role": "assistant", "content": text}] for text in completions]
        group = {
            "prompt": prompt.prompt,
            "completions": list(shown),
            "completion_ids": [list(ids) for ids in completion_ids],
            "columns": prompt.columns,
        }
        try:
            async with self._free:
                worker = self._idle.pop()
                try:
                    values = [await self._call(worker, index, group) for index in range(len(self._specs))]
                finally:
                    self._idle.append(worker)
            scores = self._sum(values, len(completions))
        except RewardFailure as failure:
            if self._health.failed(failure):
                self._log.warning(
                    "reward_failed", reason=failure.reason, function=failure.function, row=prompt.row, message=failure.message
                )
            raise
        self._health.scored()
        return scores

    async def _call(self, worker: RewardProcess, index: int, group: Mapping[str, Any]) -> list[float | None]:
        name, timeout_s = self._specs[index].function, self._sections[index].timeout_s
        for pause_s in (*RETRIES_S, None):
            try:
                answer = await worker.ask({"index": index, **group}, timeout_s)
            except TimeoutError:
                raise RewardFailure("reward_timeout", f"no answer within {timeout_s:g} s; its worker was ended", name) from None
            except (WorkerDied, GrpodError, OSError) as fault:  # it ended, or could not be started again
                answer = {"reason": "reward_error", "message": str(fault)}
            if "rewards" in answer:
                rewards: list[float | None] = answer["rewards"]
                return rewards
            if answer["reason"] != "reward_error" or pause_s is None:
                break
            await anyio.sleep(pause_s)
        raise RewardFailure(answer["reason"], answer["message"], name)

    def _sum(self, values: Sequence[Sequence[float | None]], size: int) -> Scores:
        weighted = [
            [
                (section.weight, reward)
                for section, column in zip(self._sections, values, strict=True)
                if (reward := column[i]) is not None
            ]
            for i in range(size)
        ]
        everyone = ", ".join(spec.function for spec in self._specs)
        bare = [i for i, parts in enumerate(weighted) if not any(weight for weight, _ in parts)]
        if bare:
            raise RewardFailure("reward_none", f"no reward applies to {len(bare)} of {size} completions (None)", everyone)
        totals = tuple(sum(weight * reward for weight, reward in parts) for parts in weighted)
        for total in totals:
            if not fits(total):
                raise RewardFailure("reward_not_finite", f"the weighted sum is {total!r}, wanted a finite number", everyone)
        return Scores(totals=totals, rewards=dict(zip(self.names, map(tuple, values), strict=True)))
