"""The rows that decode together: prompts join between two steps, finished rows leave, nothing waits for the longest.

    admit(jobs)   one pass over the prompts (a group's prompt once), first token of every choice, rows expanded and joined
    step()        one token for every row

Rows are kept sorted by adapter, so that each adapter has one run of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from grpod.replica.embedded.jobs import Job, Produced
from grpod.replica.embedded.lora import Lora
from grpod.replica.embedded.model import Model, Rows
from grpod.replica.embedded.sampling import Sampler

CHUNK = 512  # columns of a prompt in one pass
LOGITS = 32_000_000  # logits held at once when a prompt is scored
DEAD_SHARE = 0.25  # of finished rows, beyond which the batch is made anew


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    job: Job
    choice: Produced

    @property
    def live(self) -> bool:
        return self.choice.finish_reason is None and not self.job.cancelled


class Batch:
    def __init__(self, model: Model) -> None:
        self._model = model
        self.rows: list[Row] = []
        self._cache: Rows | None = None
        self._sampler: Sampler | None = None
        self._segments: list[tuple[Lora, int, int]] = []

    @property
    def num_live(self) -> int:
        return sum(row.live for row in self.rows)

    def admit(self, jobs: Sequence[Job]) -> None:
        """All of them scored, or none: a scored prompt needs the logits of all its columns."""
        jobs = sorted(jobs, key=lambda job: (0 if job.lora is None else id(job.lora), len(job.prompt_ids)))
        cache, logits_JV = self._read_prompts(jobs)
        rows = [Row(job=job, choice=choice) for job in jobs for choice in job.choices]
        source = [at for at, job in enumerate(jobs) for _ in job.choices]
        sampler = Sampler([row.job.sampling for row in rows], self._model.device)
        accept(rows, *sampler(logits_JV[source], [row.choice.dice.random() for row in rows]))
        joining = [at for at, row in enumerate(rows) if row.live]
        if joining:
            self._rebuild([(cache, [source[at] for at in joining])], [rows[at] for at in joining])

    def step(self) -> None:
        if len(self.rows) - self.num_live > DEAD_SHARE * len(self.rows):
            self._rebuild([], [])
        if not self.rows:
            return
        cache, sampler = self._cache, self._sampler
        assert cache is not None
        assert sampler is not None
        last = torch.tensor([row.choice.token_ids[-1] for row in self.rows], device=self._model.device)
        columns_L = torch.arange(cache.used + 1, device=self._model.device)
        mask_BL = columns_L >= cache.starts_B[:, None]
        self._model.loras.segments = self._segments
        positions_B = cache.lengths_B.clamp(max=self._model.last_position)  # finished rows run on until they are dropped
        logits = self._model.forward(last[:, None], positions_B[:, None], mask_BL, cache, 1)
        cache.lengths_B = cache.lengths_B + 1
        accept(self.rows, *sampler(logits[:, -1], [row.choice.dice.random() for row in self.rows]))

    def drop_finished(self) -> None:
        """Frees the cache at once when nothing is left."""
        if self.rows and not self.num_live:
            self.rows, self._cache = [], None

    def _rebuild(self, joining: list[tuple[Rows, list[int]]], new: list[Row]) -> None:
        kept = [at for at, row in enumerate(self.rows) if row.live]
        parts: list[tuple[Rows, Sequence[int]]] = [*joining]
        if kept and self._cache is not None:
            parts.insert(0, (self._cache, kept))
        rows = [self.rows[at] for at in kept] + new
        order = sorted(range(len(rows)), key=lambda at: 0 if rows[at].job.lora is None else id(rows[at].job.lora))
        self.rows = [rows[at] for at in order]
        if not rows:
            self._cache = None
            return
        room = max(row.job.max_tokens - len(row.choice.token_ids) for row in rows)
        self._cache = Rows.select(parts, order, min(room, 256))
        self._sampler = Sampler([row.job.sampling for row in self.rows], self._model.device)
        self._segments = segments(row.job.lora for row in self.rows)

    def _read_prompts(self, jobs: Sequence[Job]) -> tuple[Rows, torch.Tensor]:
        """Caches of the prompts, and the logits [J, V] that follow each."""
        model, lengths = self._model, [len(job.prompt_ids) for job in jobs]
        width, scored = max(lengths), any(job.score for job in jobs)
        cache = model.new_rows(lengths)
        ids_JT = torch.tensor([[*job.prompt_ids, *[0] * (width - len(job.prompt_ids))] for job in jobs], device=model.device)
        columns_T = torch.arange(width, device=model.device)
        mask_JT = columns_T < cache.lengths_B[:, None]
        model.loras.segments = segments(job.lora for job in jobs)
        chunk = max(16, min(CHUNK, LOGITS // (len(jobs) * model.vocab_size))) if scored else CHUNK
        last: list[torch.Tensor | None] = [None] * len(jobs)
        for begin in range(0, width, chunk):
            end = min(begin + chunk, width)
            wanted = sorted({length - 1 - begin for length in lengths if begin < length <= end})
            keep_K = torch.tensor(wanted or [end - begin - 1], device=model.device)
            positions_JT = columns_T[begin:end].expand(len(jobs), -1)
            logits = model.forward(ids_JT[:, begin:end], positions_JT, mask_JT[:, :end], cache, 0 if scored else keep_K)
            if scored:
                self._score(jobs, logits, begin)
                logits = logits[:, keep_K]
            for at, length in enumerate(lengths):
                if begin < length <= end:
                    last[at] = logits[at, wanted.index(length - 1 - begin)]
        return cache, torch.stack([logits_V for logits_V in last if logits_V is not None])

    def _score(self, jobs: Sequence[Job], logits: torch.Tensor, begin: int) -> None:
        """Column t tells of token t + 1."""
        for at, job in enumerate(jobs):
            following = list(job.prompt_ids[begin + 1 : begin + 1 + logits.shape[1]])
            if following:
                logprobs_TV = logits[at, : len(following)].log_softmax(-1)
                chosen = torch.tensor(following, device=logits.device)
                job.prompt_logprobs += logprobs_TV.gather(-1, chosen[:, None])[:, 0].tolist()


def accept(rows: Sequence[Row], tokens: Sequence[int], logprobs: Sequence[float]) -> None:
    """Tokens of rows that are no longer live go nowhere."""
    for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
        if row.live:
            choice = row.choice
            choice.token_ids.append(token)
            choice.logprobs.append(logprob)
            if token in row.job.end_ids:
                choice.finish_reason = "stop"
            elif len(choice.token_ids) >= row.job.max_tokens:
                choice.finish_reason = "length"


def segments(loras: Iterable[Lora | None]) -> list[tuple[Lora, int, int]]:
    """Runs of rows that share an adapter; those of the base are left out."""
    runs: list[tuple[Lora, int, int]] = []
    for at, lora in enumerate(loras):
        if lora is None:
            continue
        if runs and runs[-1][0] is lora and runs[-1][2] == at:
            runs[-1] = (lora, runs[-1][1], at + 1)
        else:
            runs.append((lora, at, at + 1))
    return runs
