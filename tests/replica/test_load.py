"""What a replica's /metrics page says of how busy it is."""

from __future__ import annotations

import re

import pytest

from grpod.replica.client import ReplicaClient, UnusableAnswer
from grpod.replica.load import Load, parse_load
from tests.fakes import FakeReplica

# Of vLLM 0.32 as it stands there, without the histograms: names that begin alike are other things.
VLLM = """\
# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 22139.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="base"} 12.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="base"} 5.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="base",reason="capacity"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="base",reason="deferred"} 1.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="base"} 0.625
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="base"} 3.0
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{engine="0",model_name="base"} 1.7961824901493056e+09
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="base"} 1000.0
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="base",source="local_compute"} 900.0
# TYPE vllm:prompt_tokens_cached_total counter
vllm:prompt_tokens_cached_total{engine="0",model_name="base"} 100.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="base"} 2.5e+06
# TYPE vllm:generation_tokens_created gauge
vllm:generation_tokens_created{engine="0",model_name="base"} 1.796182490149462e+09
"""


def test_a_page_of_vllms() -> None:
    assert parse_load(VLLM) == Load(running=12, waiting=5, kv_usage=0.625, preemptions=3, tokens=2_501_000)


def test_of_several_engines_the_counts_are_summed_and_the_fullest_cache_counts() -> None:
    lines = VLLM.splitlines()
    other = [re.sub(r'engine="0"', 'engine="1"', line) for line in lines if not line.startswith("#")]
    other = [line.replace("0.625", "0.75") for line in other]
    both = parse_load("\n".join([*lines, *other]))
    assert both == Load(running=24, waiting=10, kv_usage=0.75, preemptions=6, tokens=5_002_000)


def test_the_embedded_engines_page_has_no_cache_to_fill() -> None:
    text = "".join(
        f'# TYPE vllm:{name} gauge\nvllm:{name}{{model_name="base"}} {value}\n'
        for name, value in {
            "num_requests_running": 3,
            "num_requests_waiting": 0,
            "prompt_tokens_total": 40,
            "generation_tokens_total": 2,
        }.items()
    )
    assert parse_load(text) == Load(running=3, waiting=0, kv_usage=0.0, preemptions=0, tokens=42)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<html><body>hello</body></html>",
        '{"error": "no"}',
        VLLM.replace("vllm", "other"),
        VLLM.replace("waiting{", "w{"),
    ],
    ids=["empty", "html", "json", "another server", "half of it"],
)
def test_a_page_that_does_not_tell(text: str) -> None:
    assert parse_load(text) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [('"base"} 12.0', '"base"} twelve'), ('"base"} 12.0', '"base" 12.0'), ("} 12.0", "} NaN"), ("} 12.0", "} +Inf")],
)
def test_a_page_that_is_spoilt(old: str, new: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_load(VLLM.replace(old, new))


@pytest.mark.anyio
async def test_over_http_a_spoilt_page_is_an_unusable_answer() -> None:
    async with FakeReplica() as replica, ReplicaClient(replica.url) as client:
        replica.spoil("status", (200, VLLM), path="/metrics", times=1)
        found = await client.load()
        assert found is not None
        assert found.running == 12
        replica.spoil("status", (200, VLLM.replace("12.0", "twelve")), path="/metrics", times=1)
        with pytest.raises(UnusableAnswer, match="/metrics"):
            await client.load()
