"""What was written once goes on being read: stored bytes of every format, for each version that ever was.

`python -m tests.wire.test_golden` writes the files of the present format that are not there yet. It changes none.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpod.wire.doc import FORMAT
from grpod.wire.rollout import decode_shipment, encode_shipment
from grpod.wire.tables import decode_ledger, decode_metrics, encode_ledger, encode_metrics
from tests.wire.examples import DOCUMENTS, ENDS, METRICS, SHIPMENT

GOLDEN = Path(__file__).parent / "golden"
TABLES: dict[str, tuple[Any, Callable[[Any], bytes], Callable[[bytes, str], Any]]] = {
    "rollouts.parquet": (SHIPMENT, encode_shipment, decode_shipment),
    "ledger.parquet": (ENDS, encode_ledger, decode_ledger),
    "metrics.parquet": (METRICS, encode_metrics, decode_metrics),
}
VERSIONS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()) if GOLDEN.exists() else []


def test_the_present_format_is_kept_too() -> None:
    assert FORMAT in VERSIONS
    for version in VERSIONS:
        assert {path.name for path in (GOLDEN / version).iterdir()} == {*DOCUMENTS, *TABLES}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_of_each_version_means_what_it_meant(version: str, name: str) -> None:
    example = DOCUMENTS[name]
    found = type(example).decode((GOLDEN / version / name).read_bytes(), name)
    assert found.model_dump(exclude={"format"}) == example.model_dump(exclude={"format"})


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_each_version_means_what_it_meant(version: str, name: str) -> None:
    example, _, decode = TABLES[name]
    assert decode((GOLDEN / version / name).read_bytes(), name) == example


def write_missing() -> None:
    folder = GOLDEN / FORMAT
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: example.encode() for name, example in DOCUMENTS.items()}
    files |= {name: encode(example) for name, (example, encode, _) in TABLES.items()}
    for name, data in files.items():
        if not (folder / name).exists():
            (folder / name).write_bytes(data)


if __name__ == "__main__":
    write_missing()
