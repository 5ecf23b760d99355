"""Rows as the file has them, in every spelling; what is not whole is refused by file, row and byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpod.config import DataSection
from grpod.errors import ConfigError, NotReady
from grpod.generator.dataset import columns_of, load_rows

ROWS = [
    {"prompt": "What is 2+2?", "answer": "4", "meta": {"a": 1}},
    {"prompt": "two\u2028lines\u0085here", "answer": "5", "meta": {"b": 2}},
    {"prompt": "é 漢 🍰", "answer": "6", "meta": {"a": 3}},
]
TEXT = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
PLAIN = TEXT.encode()
BOM = b"\xef\xbb\xbf"
SPELLINGS = {
    "plain": PLAIN,
    "bom": BOM + PLAIN,
    "crlf": PLAIN.replace(b"\n", b"\r\n"),
    "bom_crlf": BOM + PLAIN.replace(b"\n", b"\r\n"),
    "no_final_newline": PLAIN[:-1],
    "blank_lines_at_end": PLAIN + b"\n\n",
    "blank_line_inside": PLAIN.replace(b"\n", b"\n\n", 1),
    "blank_line_first": b"\n \t\r\n" + PLAIN,
}


def load(folder: Path, name: str, data: bytes, **options: Any) -> Any:
    (folder / name).write_bytes(data)
    return load_rows(DataSection(source=name, **options), folder)


def refused(folder: Path, name: str, data: bytes, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, name, data, **options)
    return str(caught.value)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_one_data_set_in_every_spelling(tmp_path: Path, spelling: str) -> None:
    assert load(tmp_path, "rows.jsonl", SPELLINGS[spelling]) == ROWS  # no key added to meta, no \r in answer


def test_the_limit_takes_the_first_rows_and_reads_no_further(tmp_path: Path) -> None:
    assert load(tmp_path, "rows.jsonl", b"\n" + PLAIN[:-20], limit=2) == ROWS[:2]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_utf_16_is_refused_by_name(tmp_path: Path, encoding: str) -> None:
    bom = {"utf-16-le": "\ufeff", "utf-16-be": "\ufeff"}.get(encoding, "")
    message = refused(tmp_path, "rows.jsonl", (bom + TEXT).encode(encoding))
    assert "rows.jsonl" in message
    assert f"{encoding[:6].upper()} (bytes" in message
    assert "byte 0" in message


@pytest.mark.parametrize(
    ("data", "where", "what"),
    [
        (PLAIN[:-20], "row 2 (line 3, byte", "not one whole JSON value"),
        (PLAIN.replace(b"\n", b"\n\n")[:-22], "row 2 (line 5, byte", "not one whole JSON value"),
        (PLAIN[: PLAIN.rindex("🍰".encode()) + 2], "row 2 (line 3, byte", "not UTF-8"),
        (b'{"prompt": "\xe9"}\n', "row 0 (line 1, byte 12)", "not UTF-8"),
        (BOM + b'{"prompt": "\xe9"}\n', "row 0 (line 1, byte 15)", "not UTF-8"),
        (b'{"prompt": "a"}\n["prompt", "b"]\n', "row 1 (line 2, byte 16)", "is a list; a JSON object was expected"),
        (b'{"prompt": "a"} {"prompt": "b"}\n', "row 0 (line 1, byte 16)", "not one whole JSON value"),
        (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}\n", "row 0 (line 1, byte 0)", "cannot be read"),
        (b'{"prompt": ' + b"[" * 200_000 + b"\n", "row 0 (line 1, byte 0)", "cannot be read"),
        ("{'prompt': 'a'}\n".encode("utf-16-le"), "row 0 (line 1, byte 1)", "not one whole JSON value"),
    ],
)
def test_what_is_not_whole_is_refused_by_file_row_and_byte(tmp_path: Path, data: bytes, where: str, what: str) -> None:
    message = refused(tmp_path, "rows.jsonl", data)
    assert str(tmp_path / "rows.jsonl") in message
    assert where in message
    assert what in message


def test_the_byte_named_is_where_the_file_is_cut(tmp_path: Path) -> None:
    data = '{"prompt": "é"}\n{"prompt": "é", "answer": '.encode()
    assert f"row 1 (line 2, byte {len(data)})" in refused(tmp_path, "rows.jsonl", data)


def test_parquet_rows_are_plain_values(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "1+2="}], "answer": 3, "tags": ["a", "b"]}, {"prompt": [], "answer": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    loaded = load_rows(DataSection(source="rows.parquet"), tmp_path)
    assert loaded == [rows[0], {"prompt": [], "answer": None, "tags": None}]
    assert load_rows(DataSection(source="rows.parquet", limit=1), tmp_path) == loaded[:1]


def test_a_torn_parquet_file_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "whole.parquet")
    data = (tmp_path / "whole.parquet").read_bytes()
    assert "torn.parquet' is no whole Parquet file" in refused(tmp_path, "torn.parquet", data[: len(data) * 6 // 10])


def test_a_folder_goes_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows").mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS[:1] * 3), tmp_path / "rows" / "train.parquet")
    assert load_rows(DataSection(source="rows", limit=2), tmp_path) == ROWS[:1] * 2
    with pytest.raises(ConfigError, match=r"rows' \(split 'nope'\) cannot be loaded"):
        load_rows(DataSection(source="rows", split="nope"), tmp_path)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConnectionError("Couldn't reach 'a/b' on the Hub"), NotReady),
        (FileNotFoundError("Couldn't find 'a/b' on the Hugging Face Hub either: LocalEntryNotFoundError: ..."), NotReady),
        (FileNotFoundError("Couldn't find any data file"), ConfigError),
        (ValueError("BuilderConfig 'x' not found"), ConfigError),
    ],
)
def test_a_hub_that_is_away_is_told_from_a_data_set_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, told: type[Exception]
) -> None:
    import datasets

    def load_dataset(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(told, match="a/b"):
        load_rows(DataSection(source="a/b"), tmp_path)


@pytest.mark.parametrize("source", ["no_such.jsonl", "data/sub/no_such", "./no_such"])
def test_a_missing_file_is_named_and_not_looked_for_on_the_hub(tmp_path: Path, source: str) -> None:
    with pytest.raises(ConfigError, match="no_such") as caught:
        load_rows(DataSection(source=source), tmp_path)
    assert f"there is no file {tmp_path}" in str(caught.value)


def test_a_missing_source_or_kind_of_file_is_said(tmp_path: Path) -> None:
    assert "neither JSONL" in refused(tmp_path, "rows.csv", b"prompt\n1+1=\n")
    with pytest.raises(ConfigError, match=r"data\.source is missing"):
        load_rows(DataSection(source=""), tmp_path)


def test_a_prompt_column_that_no_row_has_is_named_with_those_there_are(tmp_path: Path) -> None:
    message = refused(tmp_path, "rows.jsonl", PLAIN, prompt_column="question")
    assert "'question'" in message
    assert "prompt, answer, meta" in message


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    assert "has no rows" in refused(tmp_path, "rows.jsonl", BOM + b"\r\n\r\n")


def test_columns_are_those_of_any_row() -> None:
    assert columns_of([{"prompt": 1}, {"prompt": 1, "answer": 2}, {"hint": 3}]) == ("prompt", "answer", "hint")
