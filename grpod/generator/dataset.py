r"""Rows as the file has them: no key added, none lost, no line cut in two.

JSONL is read here, because `datasets` adds None keys as soon as struct values differ or a blank line stands in the file. A
line ends at \n and nowhere else (U+2028 and U+0085 are text); a \r before it, a BOM, blank lines and a missing last \n are
no part of the data. What is not whole is refused by name, never skipped: half a file would train on half the data in silence.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from grpod.config import DataSection, resolve
from grpod.errors import ConfigError, NotReady
from grpod.imports import IMPORTING

Row = dict[str, Any]
_LINES = (".jsonl", ".ndjson", ".json")
_FILES = (*_LINES, ".parquet", ".csv", ".tsv", ".txt", ".gz", ".zst", ".arrow", ".yaml", ".yml")
_FOREIGN_BOMS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def load_rows(data: DataSection, folder: Path) -> Sequence[Row]:
    """`folder`: of the config file. Blocks on disk and network. Raises ConfigError; NotReady when the Hub cannot be reached."""
    if not data.source:
        raise ConfigError("data.source is missing: a generator needs prompts")
    path = resolve(data.source, folder)
    if path.is_file():
        rows = _read_file(path, data.limit)
    elif path.is_dir():
        rows = _load(str(path), data)
    elif _means_a_file(data.source):
        raise ConfigError(f"data.source {data.source!r}: there is no file {path}")
    else:
        rows = _load(data.source, data)
    if not rows:
        raise ConfigError(f"data.source {data.source!r} has no rows")
    present = columns_of(rows)
    if data.prompt_column not in present:
        raise ConfigError(
            f"data.prompt_column {data.prompt_column!r}: no row of {data.source!r} has it; its columns: {', '.join(present)}"
        )
    return rows


def columns_of(rows: Sequence[Row]) -> tuple[str, ...]:
    """The keys that any row has, in order of appearance."""
    return tuple(dict.fromkeys(key for row in rows for key in row))


def _means_a_file(source: str) -> bool:
    return source.lower().endswith(_FILES) or source.startswith(("/", "./", "../", "~")) or source.count("/") > 1


def _read_file(path: Path, limit: int | None) -> list[Row]:
    suffix = path.suffix.lower()
    if suffix in _LINES:
        return list(islice(read_jsonl(path), limit))
    if suffix == ".parquet":
        return _read_parquet(path, limit)
    raise ConfigError(f"data.source {str(path)!r} is neither JSONL ({', '.join(_LINES)}) nor Parquet (.parquet)")


def read_jsonl(path: Path) -> Iterator[Row]:
    """Raises ConfigError naming the file, the row (from 0, as logs count them), its line (from 1) and the byte in the file."""
    with path.open("rb") as file:  # binary iteration ends a line at \n only
        offset, row = 0, 0
        for number, line in enumerate(file, start=1):
            start, offset = offset, offset + len(line)
            if number == 1:
                for bom, name in _FOREIGN_BOMS.items():
                    if line.startswith(bom):
                        raise ConfigError(
                            f"data.source {str(path)!r} is {name} (bytes {bom.hex(' ')} at byte 0); JSONL is UTF-8"
                        )
                start += len(codecs.BOM_UTF8) if line.startswith(codecs.BOM_UTF8) else 0
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip(b" \t\r\n"):
                continue
            yield _parse(line, f"data.source {str(path)!r}: row {row} (line {number}", start)
            row += 1


def _parse(line: bytes, where: str, start: int) -> Row:
    try:
        text = line.rstrip(b"\r\n").decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}, byte {start + error.start}) is not UTF-8: {error.reason}") from error
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        at = start + len(text[: error.pos].encode())
        raise ConfigError(f"{where}, byte {at}) is not one whole JSON value: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; brackets nested too deep
        raise ConfigError(f"{where}, byte {start}) cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where}, byte {start}) is a {type(value).__name__}; a JSON object was expected")
    return value


def _read_parquet(path: Path, limit: int | None) -> list[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path).read()
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"data.source {str(path)!r} is no whole Parquet file: {error}") from error
    rows: list[Row] = table.slice(0, limit).to_pylist()
    return rows


def _load(source: str, data: DataSection) -> list[Row]:
    with IMPORTING:
        import datasets

    try:
        dataset = datasets.load_dataset(source, name=data.subset, split=data.split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        # datasets words a Hub that answers 503 as a missing file, with this name in its text
        if isinstance(error, ConnectionError | TimeoutError) or "LocalEntryNotFoundError" in str(error):
            raise NotReady(f"data.source {source!r}: the Hub cannot be reached: {error}") from error
        raise ConfigError(f"data.source {source!r} (split {data.split!r}) cannot be loaded: {error}") from error
    if data.limit is not None:
        dataset = dataset.select(range(min(data.limit, len(dataset))))
    rows: list[Row] = dataset.to_list()
    return rows
