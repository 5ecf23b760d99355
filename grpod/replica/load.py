"""How busy a replica says it is: its /metrics page (Prometheus text), vLLM's names. Pure.

A server with several engines has a line for each: counts are summed, of the KV cache the fullest counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
KV_USAGE, PREEMPTIONS = "vllm:kv_cache_usage_perc", "vllm:num_preemptions_total"
TOKENS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")


@dataclass(frozen=True, kw_only=True)
class Load:
    running: int
    """sequences that are being decoded"""
    waiting: int
    """sequences that found no room yet"""
    kv_usage: float
    """share of the KV cache that is taken, 0 to 1; 0 when the server does not tell"""
    preemptions: int
    """sequences that were thrown out of the KV cache since the server started"""
    tokens: int
    """prompt and generated tokens since the server started: it moves while anything is done"""


def parse_load(text: str) -> Load | None:
    """None: the page does not tell. Raises ValueError for what is no metrics page."""
    values: dict[str, list[float]] = {}
    for name, value in _samples(text):
        values.setdefault(name, []).append(value)
    if RUNNING not in values or WAITING not in values:
        return None
    return Load(
        running=int(sum(values[RUNNING])),
        waiting=int(sum(values[WAITING])),
        kv_usage=max(values.get(KV_USAGE, [0.0])),
        preemptions=int(sum(values.get(PREEMPTIONS, [0.0]))),
        tokens=int(sum(value for name in TOKENS for value in values.get(name, [0.0]))),
    )


def _samples(text: str) -> Iterator[tuple[str, float]]:
    wanted = (RUNNING, WAITING, KV_USAGE, PREEMPTIONS, *TOKENS)  # of hundreds of lines, most of them histograms
    ours = "".join(line + "\n" for line in text.splitlines() if line.startswith(wanted))
    for family in text_string_to_metric_families(ours):
        for sample in family.samples:
            if not math.isfinite(sample.value):
                raise ValueError(f"{sample.name} is {sample.value}")
            yield sample.name, sample.value
