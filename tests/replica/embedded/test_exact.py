"""What the embedded replica returns is what a plain forward pass of transformers and PEFT gives, whatever shared its batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grpod.replica.embedded import batch as batch_module
from grpod.replica.embedded.jobs import Job
from grpod.replica.embedded.lora import Lora
from grpod.replica.embedded.model import Model
from grpod.replica.embedded.sampling import Sampling
from tests.replica.embedded.made import job, make_adapter, plain_logprobs, run

PROMPTS = [list(range(5, 12)), [9, 8], list(range(40, 61)), [100, 200, 300]]
GREEDY = Sampling(temperature=0, top_p=1.0, top_k=0)


@pytest.fixture(scope="module")
def model(tiny_base: Path) -> Model:
    return Model(tiny_base, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def adapters(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "a": make_adapter(tiny_base, folder / "a", seed=1),
        "b": make_adapter(tiny_base, folder / "b", seed=2, rank=8, targets=("q_proj", "v_proj"), use_rslora=True),
    }


@pytest.fixture(scope="module")
def loras(model: Model, adapters: dict[str, Path]) -> dict[str, Lora]:
    return {name: model.loras.load(name, str(path), max_rank=8) for name, path in adapters.items()}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "CHUNK", 5)


def check(base: Path, adapters: dict[str, Path], jobs: list[Job], temperature: float = 1.0) -> None:
    for one in jobs:
        adapter = None if one.lora is None else adapters[one.lora.name]
        for choice in one.choices:
            assert choice.finish_reason == "length"
            plain = plain_logprobs(base, adapter, [*one.prompt_ids, *choice.token_ids]) / temperature
            begin = len(one.prompt_ids) - 1
            expected = plain[begin:-1].log_softmax(-1).gather(-1, torch.tensor(choice.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(choice.logprobs), expected, atol=1e-4, rtol=0)


def test_two_adapters_and_the_base_share_a_batch_of_prompts_of_all_lengths(
    tiny_base: Path, model: Model, adapters: dict[str, Path], loras: dict[str, Lora]
):
    jobs = [
        job(prompt, lora=lora, n=2, seed=at, max_tokens=3 + 2 * at)
        for at, prompt in enumerate(PROMPTS)
        for lora in (loras["a"], None, loras["b"])
    ]
    run(model, jobs)
    check(tiny_base, adapters, jobs)
    greedy = [job(PROMPTS[0], lora=lora, sampling=GREEDY) for lora in (loras["a"], loras["b"], None)]
    run(model, greedy)
    assert len({tuple(one.choices[0].token_ids) for one in greedy}) == 3  # or the adapters would prove nothing


@pytest.mark.usefixtures("small_chunks")
def test_prompts_that_join_and_leave_between_steps_change_nothing_for_others(
    tiny_base: Path, model: Model, adapters: dict[str, Path], loras: dict[str, Lora]
):
    first = [job(PROMPTS[0], lora=loras["a"], n=3, max_tokens=4), job(PROMPTS[1], n=2, max_tokens=14)]
    second = [job(PROMPTS[2], lora=loras["b"], max_tokens=2), job(PROMPTS[3], lora=loras["a"], n=2, max_tokens=9)]
    third = [job(PROMPTS[0], lora=loras["b"], n=2, max_tokens=5)]
    run(model, first, second, third)
    check(tiny_base, adapters, first + second + third)


def test_log_probs_are_those_of_the_tempered_distribution(tiny_base: Path, model: Model):
    jobs = [job(PROMPTS[0], sampling=Sampling(temperature=0.5, top_p=1.0, top_k=0), n=4), job(PROMPTS[2])]
    run(model, jobs)
    check(tiny_base, {}, jobs[:1], temperature=0.5)
    check(tiny_base, {}, jobs[1:])


@pytest.mark.parametrize("chunk", [4, 512])
def test_a_scored_prompt_has_the_log_probs_of_a_plain_pass(
    tiny_base: Path,
    model: Model,
    adapters: dict[str, Path],
    loras: dict[str, Lora],
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(batch_module, "CHUNK", chunk)
    monkeypatch.setattr(batch_module, "LOGITS", chunk * 512)  # of three prompts: 16 columns at least
    jobs = [job(PROMPTS[2], lora=lora, max_tokens=1, score=True) for lora in (None, loras["a"])]
    jobs.append(job(PROMPTS[1], lora=loras["b"], max_tokens=3, score=True))
    run(model, jobs)
    for one in jobs:
        plain = plain_logprobs(tiny_base, None if one.lora is None else adapters[one.lora.name], one.prompt_ids)
        expected = plain[:-1].gather(-1, torch.tensor(one.prompt_ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(one.prompt_logprobs), expected, atol=1e-4, rtol=0)
    check(tiny_base, adapters, jobs)


def test_a_seed_gives_the_same_tokens_whatever_the_company(model: Model, loras: dict[str, Lora]):
    alone, in_company, other_seed = (job(PROMPTS[0], lora=loras["a"], n=3, seed=seed) for seed in (7, 7, 8))
    run(model, [alone])
    run(model, [job(PROMPTS[2], n=4)], [in_company, job(PROMPTS[3], lora=loras["b"])], [other_seed])

    def tokens(one: Job) -> list[list[int]]:
        return [choice.token_ids for choice in one.choices]

    assert tokens(alone) == tokens(in_company)
    assert tokens(alone) != tokens(other_seed)
    assert len({tuple(ids) for ids in tokens(alone)}) == 3


def test_every_end_token_ends_a_completion_and_is_returned(model: Model):
    one = job(PROMPTS[0], n=40, seed=3, max_tokens=30, end_ids=frozenset(range(0, 512, 10)))
    run(model, [one])
    for choice in one.choices:
        ends = [token for token in choice.token_ids if token % 10 == 0]
        if choice.finish_reason == "stop":
            assert ends == choice.token_ids[-1:]
        else:
            assert (choice.finish_reason, ends, len(choice.token_ids)) == ("length", [], 30)
        assert len(choice.logprobs) == len(choice.token_ids)
    assert len({choice.token_ids[-1] for choice in one.choices if choice.finish_reason == "stop"}) > 2


def test_a_cancelled_job_gets_no_more_tokens_and_others_go_on(tiny_base: Path, model: Model):
    gone, stays = job(PROMPTS[0], n=3, max_tokens=50), job(PROMPTS[1], max_tokens=10)
    with torch.inference_mode():
        batch = batch_module.Batch(model)
        batch.admit([gone, stays])
        batch.step()
        gone.cancelled = True
        while batch.num_live:
            batch.step()
    assert [len(choice.token_ids) for choice in gone.choices] == [2, 2, 2]
    check(tiny_base, {}, [stays])


def test_sliding_windows_hold_after_the_batch_was_made_anew(tmp_path: Path, tiny_base: Path):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(tiny_base)
    config.use_sliding_window, config.sliding_window = True, 6
    config.layer_types = ["sliding_attention", "full_attention"]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = Model(tmp_path, dtype="float32", device="cpu")
    first = [job(PROMPTS[0], n=2, max_tokens=3), job(PROMPTS[1], max_tokens=20)]
    second = [job(PROMPTS[2], max_tokens=12)]
    run(model, first, second, between=4)
    check(tmp_path, {}, first + second)
