"""Prompts without end: rows in, one `Prompt` at a time out, data epoch after data epoch.

A row is asked whole or not at all. Those that cannot be asked are passed over under one of these reasons, counted once in
every data epoch, the first of a kind logged with its row; a data set with nothing to ask is a ConfigError at start.

    prompt_missing    the row has no such key             prompt_kind      neither a text nor a list of messages
    prompt_null       null, or a message without content  prompt_template  the chat template refuses the messages
    prompt_empty      no text, no message, or no token    prompt_too_long  prompt + max_new_tokens > max_model_len
    prompt_not_text   half a surrogate pair: no UTF-8
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from grpod.config import Config
from grpod.errors import ConfigError
from grpod.generator.dataset import Row, columns_of
from grpod.generator.kinds import KIND_WORDS, Kind, Refusal, kind_of
from grpod.generator.tokens import Message, has_chat_template, prompt_id, prompt_ids
from grpod.telemetry.log import get_logger


@dataclass(frozen=True, kw_only=True)
class Prompt:
    row: int  # in the data set, from 0
    data_epoch: int  # from 0, of this generator
    prompt_id: str  # a hash of prompt_ids
    prompt_ids: tuple[int, ...]
    prompt: str | list[Message]  # what a reward function is shown
    columns: dict[str, Any]  # the row's other columns, exactly as they stand in the file
    conversational: bool  # prompt is a list of messages


def _no_note(reason: str, row: int) -> None:
    pass


class PromptSource:
    """Owned by one generator. `next` tokenizes one row and those that it passes over for the first time: milliseconds."""

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: Any,
        config: Config,
        *,
        generator: str,
        on_skip: Callable[[str, int], None] = _no_note,
    ) -> None:
        """Raises ConfigError: kinds are mixed, messages without a chat template, no row can be asked."""
        if config.data is None:
            raise ConfigError("data.source is missing: a generator needs prompts")
        self._rows = rows
        self._tokenizer = tokenizer
        self._data = config.data
        self._max_model_len = config.model.max_model_len
        self._room = config.model.max_model_len - config.generator.sampling.max_new_tokens
        self._generator = generator
        self._on_skip = on_skip
        self._log = get_logger(generator=generator)
        self._refused: dict[int, Refusal] = {}  # by row: what cannot be asked in one data epoch never can
        self._told: set[str] = set()
        self._epoch = -1
        self._order: Iterator[int] = iter(())
        self._check_kinds()
        self._check_one_can_be_asked()

    @property
    def columns(self) -> tuple[str, ...]:
        """What reward functions may ask for by name: every column but the prompt's."""
        return tuple(name for name in columns_of(self._rows) if name != self._data.prompt_column)

    def next(self) -> Prompt:
        while True:
            for row in self._order:
                prompt = self._prompt(row)
                if isinstance(prompt, Prompt):
                    return prompt
                self._skip(row, prompt)
            self._epoch += 1
            self._order = iter(self._permutation(self._epoch))

    def _permutation(self, epoch: int) -> Sequence[int]:
        if self._data.order == "epoch":
            return range(len(self._rows))
        order = list(range(len(self._rows)))
        random.Random(f"{self._data.seed}/{self._generator}/{epoch}").shuffle(order)  # a fleet asks in different orders
        return order

    def _skip(self, row: int, refusal: Refusal) -> None:
        self._on_skip(refusal.reason, row)
        if refusal.reason not in self._told:
            self._told.add(refusal.reason)
            self._log.warning("row_skipped", reason=refusal.reason, row=row, message=refusal.message)

    def _prompt(self, row: int) -> Prompt | Refusal:
        if row in self._refused:
            return self._refused[row]
        column = self._data.prompt_column
        prompt = self._rows[row][column]
        conversational = not isinstance(prompt, str)
        try:
            ids = prompt_ids(self._tokenizer, prompt)
        except Exception as error:  # a chat template is the model's code and may raise anything; plain text never should
            if not conversational:
                raise
            return self._refuse(row, "prompt_template", f"the chat template: {type(error).__name__}: {error}")
        if not ids:
            return self._refuse(row, "prompt_empty", "it has no token")
        if len(ids) > self._room:
            return self._refuse(
                row,
                "prompt_too_long",
                f"{len(ids)} tokens; generator.sampling.max_new_tokens leaves {self._room} "
                f"of model.max_model_len {self._max_model_len}",
            )
        return Prompt(
            row=row,
            data_epoch=self._epoch,
            prompt_id=prompt_id(ids),
            prompt_ids=ids,
            prompt=prompt,
            columns={name: value for name, value in self._rows[row].items() if name != column},
            conversational=conversational,
        )

    def _refuse(self, row: int, reason: str, message: str) -> Refusal:
        self._refused[row] = Refusal(reason=reason, message=message)
        return self._refused[row]

    def _check_kinds(self) -> None:
        column = self._data.prompt_column
        first: tuple[Kind, int] | None = None
        for row, value in enumerate(self._rows):
            kind = kind_of(value, column)
            if isinstance(kind, Refusal):
                self._refused[row] = kind
            elif first is None:
                first = (kind, row)
            elif kind != first[0]:
                raise ConfigError(
                    f"data.source {self._data.source!r}: column {column!r} is {KIND_WORDS[first[0]]} in row {first[1]} "
                    f"and {KIND_WORDS[kind]} in row {row}; all rows must be of one kind"
                )
        templated = has_chat_template(self._tokenizer)
        if first and first[0] == "messages" and not templated:
            raise ConfigError(
                f"column {column!r} of data.source {self._data.source!r} holds lists of messages, but the tokenizer of "
                "model.base has no chat_template; use a model that has one, or a column of texts"
            )
        if first and first[0] == "text" and templated:
            self._log.warning(
                "chat_template_unused",
                column=column,
                message="the tokenizer has a chat template, but prompts are texts and are sent as they are",
            )

    def _check_one_can_be_asked(self) -> None:
        """Reads on to the first row that can be asked: of a sound data set one row, of an unusable one all."""
        if any(isinstance(self._prompt(row), Prompt) for row in range(len(self._rows))):
            return
        counts = Counter(refusal.reason for refusal in self._refused.values())
        firsts = {refusal.reason: (row, refusal.message) for row, refusal in sorted(self._refused.items(), reverse=True)}
        faults = "; ".join(
            f"{reason} {count} (first in row {firsts[reason][0]}: {firsts[reason][1]})" for reason, count in counts.items()
        )
        raise ConfigError(
            f"data.source {self._data.source!r}: none of its {len(self._rows)} rows can be asked by column "
            f"{self._data.prompt_column!r}: {faults}"
        )
