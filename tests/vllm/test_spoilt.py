"""A real vLLM's answers, each group's first one spoilt on the way in another way: asked again and trained; always: the end."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from grpod.errors import NotReady
from grpod.generator import rollouts, trust
from tests.generator.spoilt import SPOILT, set_logprob
from tests.models import make_tiny_base
from tests.vllm.middle import Asked, Forward
from tests.vllm.real import HIDDEN, MARKS
from tests.vllm.stage import Stage, made_config, served

pytestmark = [pytest.mark.anyio, *MARKS]


def edited(answer: web.StreamResponse, do: str, arg: Any) -> web.StreamResponse:
    assert isinstance(answer, web.Response)
    assert isinstance(answer.body, bytes)
    if do == "raw":
        answer.body = arg(answer.body)
    else:
        body = json.loads(answer.body)
        arg(body)
        answer.body = json.dumps(body).encode()
    return answer


async def test_what_is_no_completion_is_never_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "_PAUSE_S", 0.05)
    base = make_tiny_base(tmp_path / "base", hidden=HIDDEN)
    async with served(made_config(tmp_path, base, "", engine="remote", steps=1), base) as (_, middle):
        folder = tmp_path / "sometimes"
        folder.mkdir()
        # one group after the other, and no two under way: so each way meets one group
        sections = {"run": {"max_lag": 0}, "generator": {"max_in_flight": 1}, "learner": {"groups_per_step": 1}}
        stage = Stage(folder, made_config(folder, base, middle.url, engine="remote", steps=len(SPOILT), **sections))
        ways, models = dict[int, str](), Counter[tuple[int, str]]()

        async def once(asked: Asked, forward: Forward) -> web.StreamResponse:
            answer = await forward()
            if not asked.group:
                return answer
            seed, left = asked.body["seed"], [way for way in SPOILT if way not in ways.values()]
            models[seed, asked.body["model"]] += 1
            if seed not in ways and left:
                ways[seed] = left[0]
                return edited(answer, *SPOILT[left[0]])
            return edited(answer, "edit", lambda body: body["choices"].reverse())

        middle.hook = once
        await stage.play()
        assert await stage.check(base) == {}
        assert list(ways.values()) == list(SPOILT)
        assert {(seed, times) for (seed, _), times in models.items() if seed in ways} == {(seed, 2) for seed in ways}

        folder = tmp_path / "always"
        folder.mkdir()
        monkeypatch.setattr(trust, "UNUSABLE_S", 1.0)
        stage = Stage(folder, made_config(folder, base, middle.url, engine="remote", steps=9))

        async def always(asked: Asked, forward: Forward) -> web.StreamResponse:
            answer = await forward()
            return edited(answer, "edit", set_logprob(None)) if asked.group else answer

        middle.hook, already = always, len(middle.asked)
        with pytest.RaisesGroup(pytest.RaisesExc(NotReady, match="gives no usable answer"), flatten_subgroups=True):
            await stage.play()
        drops = await stage.outcome.drops()
        assert drops.pop("unusable_answer") >= 8
        assert set(drops) <= {"interrupted"}
        assert len(middle.asked) - already < 60, "it is not hammered"
        assert await stage.outcome.groups() == []
