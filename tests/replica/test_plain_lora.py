"""What an adapter's config asks for beside the LoRA of its manifest."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from grpod.learner.adapter_file import encode
from grpod.replica.plain_lora import beyond
from grpod.wire.adapter import Lora
from grpod.wire.keys import ADAPTER_CONFIG

LORA = Lora(r=2, alpha=4.0, targets=["q_proj"])
PLAIN = json.loads(encode({"a": torch.zeros(1)}, rank=2, alpha=4.0, targets=["q_proj"], base="base")[ADAPTER_CONFIG])


def asked(**fields: Any) -> list[str]:
    return beyond(json.dumps({**PLAIN, **fields}).encode(), LORA)


def test_what_the_learner_writes_is_plain() -> None:
    assert asked() == []
    assert beyond(b"{}", LORA) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alpha_pattern", {"layers.0.self_attn.q_proj": 64}),
        ("rank_pattern", {"q_proj": 1}),
        ("use_rslora", True),
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("bias", "all"),
        ("r", 4),
        ("lora_alpha", 8),
    ],
)
def test_whatever_engines_might_make_different_things_of_is_named(field: str, value: Any) -> None:
    (words,) = asked(**{field: value})
    assert words == f"{field}: {value!r}"


def test_a_config_that_cannot_be_read_is_not_plain() -> None:
    assert "no JSON" in beyond(b"{", LORA)[0]
    assert "no JSON object" in beyond(b"[]", LORA)[0]
