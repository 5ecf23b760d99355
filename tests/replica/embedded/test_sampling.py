from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from grpod.replica.embedded.sampling import Sampler, Sampling, pick

V = 12


def sampler(*rows: Sampling) -> Sampler:
    return Sampler(rows, torch.device("cpu"))


def plain(logits: Tensor, sampling: Sampling) -> list[float]:
    """One row, by the words of the definition."""
    kept = {token: float(logit) / sampling.temperature for token, logit in enumerate(logits)}
    if sampling.top_k:
        kept = dict(sorted(kept.items(), key=lambda item: -item[1])[: sampling.top_k])
    total = sum(math.exp(value) for value in kept.values())
    nucleus, mass = {}, 0.0
    for token, value in sorted(kept.items(), key=lambda item: -item[1]):
        if nucleus and mass >= sampling.top_p:
            break
        nucleus[token] = value
        mass += math.exp(value) / total
    norm = math.log(sum(math.exp(value) for value in nucleus.values()))
    return [nucleus[token] - norm if token in nucleus else -math.inf for token in range(len(logits))]


def test_processed_log_probs_follow_the_definition_row_by_row():
    generator = torch.Generator().manual_seed(0)
    rows = [
        Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
        for temperature in (1.0, 0.3, 2.5)
        for top_p in (1.0, 0.9, 0.4, 1e-6)
        for top_k in (0, 1, 3, V, 10 * V)
    ]
    logits = torch.randn(len(rows), V, generator=generator) * 2
    got = sampler(*rows).processed(logits)
    expected = torch.tensor([plain(logits[at], row) for at, row in enumerate(rows)])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_tokens_come_as_often_as_they_should_and_carry_their_own_log_prob():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    sampling = Sampling(temperature=0.8, top_p=0.95, top_k=3)
    expected = plain(logits[0], sampling)
    dice = random.Random(0)
    draws = 20_000
    tokens, logprobs = sampler(*[sampling] * draws)(logits.expand(draws, -1), [dice.random() for _ in range(draws)])
    for token, logprob in enumerate(expected):
        share = tokens.count(token) / draws
        assert share == pytest.approx(math.exp(logprob), abs=4 * math.sqrt(0.25 / draws))
    assert logprobs == pytest.approx([expected[token] for token in tokens], abs=1e-5)


def test_no_die_picks_a_token_of_probability_zero():
    logprobs = torch.tensor([[-math.inf, math.log(0.5), -math.inf, math.log(0.5), -math.inf]])
    dice = [0.0, 0.25, 0.5, 0.75, math.nextafter(1.0, 0.0)]
    assert [int(pick(logprobs, [die])) for die in dice] == [1, 1, 3, 3, 3]


def test_temperature_zero_is_greedy_and_leaves_other_rows_alone():
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    rows = Sampling(temperature=0, top_p=0.1, top_k=1), Sampling(temperature=1.0, top_p=1.0, top_k=0)
    tokens, logprobs = sampler(*rows)(logits, [0.0, 0.0])
    assert tokens == [1, 0]
    assert logprobs == pytest.approx([float(logits[0].log_softmax(-1)[token]) for token in (1, 0)])
    assert sampler(rows[0])(logits[:1], [0.99])[0] == [1]
