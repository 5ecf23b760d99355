"""Rows to prompts: kinds, the chat template, rows that cannot be asked, the order of data epochs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import structlog

from grpod.config import Config
from grpod.errors import ConfigError
from grpod.generator.dataset import read_jsonl
from grpod.generator.prompts import Prompt, PromptSource
from grpod.generator.tokens import completion_text, load_tokenizer, prompt_id
from tests.generator.tokenizers_made import byte_tokenizer

USER = [{"role": "user", "content": "1+2="}]


@pytest.fixture(scope="module")
def t1(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(byte_tokenizer(tmp_path_factory.mktemp("t1")))


@pytest.fixture(scope="module")
def t2(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(byte_tokenizer(tmp_path_factory.mktemp("t2"), chat_template=None))


def config(**data: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"base": "base", "max_model_len": 256},
            "data": {"source": "rows.jsonl", "order": "epoch", **data},
            "generator": {"sampling": {"max_new_tokens": 32}},
        }
    )


def source(rows: Any, tokenizer: Any, *, generator: str = "g", on_skip: Any = None, **data: Any) -> PromptSource:
    given = {} if on_skip is None else {"on_skip": on_skip}
    return PromptSource(rows, tokenizer, config(**data), generator=generator, **given)


def refused(rows: Any, tokenizer: Any, **data: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        source(rows, tokenizer, **data)
    return str(caught.value)


# -- kinds


def test_a_text_is_tokenized_as_it_stands(t2: Any) -> None:
    prompt = source([{"prompt": "1+2=", "answer": "3", "meta": {"a": 1}}], t2).next()
    assert prompt == Prompt(
        row=0,
        data_epoch=0,
        prompt_id=prompt_id(t2("1+2=")["input_ids"]),
        prompt_ids=tuple(t2("1+2=")["input_ids"]),
        prompt="1+2=",
        columns={"answer": "3", "meta": {"a": 1}},
        conversational=False,
    )


def test_messages_go_through_the_chat_template(t1: Any) -> None:
    prompt = source([{"prompt": USER}], t1).next()
    assert list(prompt.prompt_ids) == t1.apply_chat_template(USER, add_generation_prompt=True, return_dict=False)
    assert t1.decode(prompt.prompt_ids) == "<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n"
    assert (prompt.prompt, prompt.conversational) == (USER, True)


def test_an_assistants_turn_is_continued(t1: Any) -> None:
    prompt = source([{"prompt": [*USER, {"role": "assistant", "content": "The sum is"}]}], t1).next()
    assert t1.decode(prompt.prompt_ids).endswith("<|im_end|>\n<|im_start|>assistant\nThe sum is")


def test_texts_beside_a_chat_template_are_warned_of_once(t1: Any, t2: Any) -> None:
    with structlog.testing.capture_logs() as logs:
        prompts = source([{"prompt": "1+2="}] * 3, t1)
        assert [prompts.next().prompt_ids for _ in range(5)] == [tuple(t1("1+2=")["input_ids"])] * 5
    assert [(log["event"], log["log_level"]) for log in logs] == [("chat_template_unused", "warning")]
    with structlog.testing.capture_logs() as logs:
        source([{"prompt": "1+2="}], t2)
        source([{"prompt": USER}], t1)
    assert logs == []


def test_messages_without_a_chat_template_are_refused(t2: Any) -> None:
    message = refused([{"question": USER}], t2, prompt_column="question")
    assert "chat_template" in message
    assert "'question'" in message


def test_mixed_kinds_are_refused_by_both_kinds_and_row(t1: Any) -> None:
    message = refused([{"prompt": "1+2="}, {"prompt": USER}], t1)
    assert "a text in row 0 and a list of messages in row 1" in message
    assert "a list of messages in row 1 and a text in row 3" in refused(
        [{"prompt": None}, {"prompt": USER}, {"prompt": ""}, {"prompt": "1+2="}], t1
    )


UNUSABLE = {
    "prompt_null": [None, [{"role": "user", "content": None}], [{"role": "user"}]],
    "prompt_empty": ["", []],
    "prompt_kind": [USER[0], 3, True, ["1+2="], [{"content": "x"}], [{"role": "user", "content": 3}]],
    "prompt_not_text": ["half a pair: \ud83d", [{"role": "user", "content": "\udc00"}]],
    "prompt_template": [[{"role": "refused", "content": "x"}]],
    "prompt_too_long": ["1" * 225, [{"role": "user", "content": "1" * 225}]],
}


@pytest.mark.parametrize(("reason", "value"), [(reason, value) for reason, values in UNUSABLE.items() for value in values])
def test_a_prompt_that_cannot_be_asked_is_skipped_by_name_or_refused_when_all_are_so(t1: Any, reason: str, value: Any) -> None:
    good = "1+2=" if isinstance(value, str) else USER
    skipped: list[tuple[str, int]] = []
    prompts = source([{"prompt": value}, {"prompt": good}], t1, on_skip=lambda *skip: skipped.append(skip))
    assert (prompts.next().row, skipped) == (1, [(reason, 0)])
    message = refused([{"prompt": value}, {"prompt": value}, {"no": 1}], t1)
    assert f"{reason} 2 (first in row 0: " in message
    assert "prompt_missing 1 (first in row 2" in message


def test_a_tool_call_has_no_content_and_may_be_asked(t1: Any) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert source([{"prompt": [*USER, called, {"role": "tool", "content": "3"}]}], t1).next().row == 0


# -- rows that cannot be asked


def test_only_what_can_be_asked_is_asked_and_the_rest_is_counted_once_an_epoch(t2: Any, tmp_path: Path) -> None:
    lines = [
        '{"prompt": "1+1="}',
        '{"prompt": ""}',
        '{"prompt": null}',
        '{"answer": "no prompt key"}',
        '{"prompt": "2+2="}',
        '{"prompt": "   "}',
        '{"prompt": "half a pair: \\ud83d"}',
        json.dumps({"prompt": "1" * 224}),
        json.dumps({"prompt": "1" * 225}),
        json.dumps({"prompt": "1" * 1024}),
        '{"prompt": "nul \\u0000 inside"}',
        '{"prompt": "REFUSE ME"}',
        '{"prompt": "3+3="}',
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(lines) + "\n")
    skipped: list[tuple[str, int]] = []
    with structlog.testing.capture_logs() as logs:
        prompts = source(list(read_jsonl(file)), t2, on_skip=lambda *skip: skipped.append(skip))
        asked = [prompts.next() for _ in range(14)]
    epoch = [0, 4, 5, 7, 10, 11, 12]
    assert [(prompt.data_epoch, prompt.row) for prompt in asked] == [(0, row) for row in epoch] + [(1, row) for row in epoch]
    once = [
        ("prompt_empty", 1),
        ("prompt_null", 2),
        ("prompt_missing", 3),
        ("prompt_not_text", 6),
        ("prompt_too_long", 8),
        ("prompt_too_long", 9),
    ]
    assert skipped == once * 2
    told = [(log["reason"], log["row"]) for log in logs if log["event"] == "row_skipped"]
    assert told == [skip for skip in once if skip != ("prompt_too_long", 9)]  # the first of each kind
    assert len(asked[3].prompt_ids) == 224  # never cut
    assert "225 tokens" in next(log["message"] for log in logs if log["reason"] == "prompt_too_long")
    assert t2.decode(asked[4].prompt_ids) == "nul \x00 inside"


def test_nothing_to_ask_is_refused_with_counts(t2: Any) -> None:
    message = refused([{"prompt": ""}, {"prompt": None}, {"prompt": "1" * 300}, {"prompt": None}], t2)
    assert "none of its 4 rows" in message
    for count in ("prompt_empty 1 (first in row 0", "prompt_null 2 (first in row 1", "prompt_too_long 1 (first in row 2"):
        assert count in message


# -- order


def test_every_data_epoch_is_a_permutation_of_its_own(t2: Any) -> None:
    rows = [{"prompt": str(row)} for row in range(40)]

    def order(generator: str, epochs: int = 2, **data: Any) -> list[list[int]]:
        prompts = source(rows, t2, generator=generator, order="shuffle", **data)
        asked = [prompts.next() for _ in range(40 * epochs)]
        assert [prompt.data_epoch for prompt in asked] == [epoch for epoch in range(epochs) for _ in rows]
        return [[prompt.row for prompt in asked[at : at + 40]] for at in range(0, len(asked), 40)]

    first = order("g1")
    assert all(Counter(epoch) == Counter(range(40)) for epoch in first)
    assert order("g1") == first
    assert len({tuple(epoch) for epoch in (*first, *order("g2"), *order("g1", seed=1))}) == 6


def test_order_epoch_is_the_files_and_columns_are_those_of_any_row(t2: Any) -> None:
    prompts = source([{"prompt": "a"}, {"prompt": "b", "answer": 1}], t2, order="epoch")
    assert [prompts.next().row for _ in range(4)] == [0, 1, 0, 1]
    assert prompts.columns == ("answer",)
    assert prompts.next().columns == {}


# -- tokens


def test_prompt_ids_name_prompts() -> None:
    assert prompt_id([1, 2]) == prompt_id((1, 2)) == "0c730b69905c5ef7"
    assert prompt_id([1, 2]) != prompt_id([2, 1])


def test_a_completions_text_has_no_special_tokens_and_all_its_spaces(t1: Any) -> None:
    ids = t1("It is 3 , or 4 .<|im_end|>")["input_ids"]
    assert ids[-1] == t1.eos_token_id
    assert completion_text(t1, ids) == "It is 3 , or 4 ."


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_tokenizer(tmp_path)
