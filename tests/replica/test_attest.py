"""Judgements on log-probs alone: the right weights pass under any arithmetic, the wrong ones under none that could tell."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from grpod.replica.attest import CANARY_MOST, OTHER_BASE, Verdict, canary_wanted, judge, rms, same_base

N = 160


def draw(seed: int, scale: float) -> list[float]:
    random_ = random.Random(seed)
    return [random_.gauss(0.0, scale) for _ in range(N)]


BASE = [-abs(value) - 0.1 for value in draw(1, 3.0)]


def moved(by: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(BASE, by, strict=True)]


def engine(values: Sequence[float], seed: int, noise: float) -> list[float]:
    """As an engine of other arithmetic answers: off by up to several times `noise` on single tokens."""
    return [a + b for a, b in zip(values, draw(seed, noise), strict=True)]


def verdict(learner: Sequence[float], served: Sequence[float], *, noise: float = 0.0) -> Verdict:
    return judge(
        base_logprobs=BASE,
        logprobs=list(learner),
        engine_base=engine(BASE, 2, noise),
        engine=engine(served, 3, noise),
    )


NOISES = [0.0, 1e-6, 1e-4, 0.09]  # exact; float32; another float32; bfloat16, at 0.37 on the worst of 160 tokens


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("effect", [0.0, 1e-8, 1e-5, 1e-3, 0.05, 1.0])
def test_the_right_weights_are_accepted_however_little_they_do(effect: float, noise: float) -> None:
    right = moved(draw(4, effect))
    assert verdict(right, right, noise=noise).kind != "refused"


@pytest.mark.parametrize("noise", NOISES)
def test_the_base_under_an_adapters_name_is_refused_when_the_adapter_does_more_than_the_noise(noise: float) -> None:
    found = verdict(moved(draw(4, max(2 * noise, 1e-3))), BASE, noise=noise)
    assert found.kind == "refused"
    assert found.to_adapter > found.to_base
    assert "distance to the adapter" in str(found)
    assert "to the base" in str(found)


@pytest.mark.parametrize("noise", [0.0, 1e-6, 1e-4])
def test_an_older_version_under_a_newer_name_is_refused(noise: float) -> None:
    """A version a sixth further on, as the sixth one is from the fifth."""
    far, further = draw(4, 0.05), draw(5, 0.01)
    newer = moved([a + b for a, b in zip(far, further, strict=True)])
    assert verdict(newer, moved(far), noise=noise).kind == "refused"


def test_moves_that_an_engine_rounds_away_refuse_nothing() -> None:
    """Smaller than its noise, an adapter may leave its log-probs unmoved to the last bit."""
    for noise, effect in ((0.09, 0.01), (1e-6, 1e-7), (0.0, 1e-8)):
        off = engine(BASE, 2, noise)
        found = judge(base_logprobs=BASE, logprobs=moved(draw(4, effect)), engine_base=off, engine=off)
        assert found.kind == "unproven", (noise, effect)


@pytest.mark.parametrize("scale", [0.5, 2.0, -1.0])
def test_a_wrong_scale_is_refused(scale: float) -> None:
    """alpha / r of another config, say."""
    by = draw(4, 0.2)
    assert verdict(moved(by), moved([scale * value for value in by]), noise=0.01).kind == "refused"


@pytest.mark.parametrize(
    ("learner", "served", "kind"),
    [
        (lambda: draw(4, 0.2), lambda: draw(4, 0.2), "proven"),
        (lambda: [0.0] * N, lambda: [0.0] * N, "unproven"),
        (lambda: [0.0] * N, lambda: draw(4, 0.2), "refused"),
    ],
    ids=["right", "no effect", "an effect where none should be"],
)
def test_verdicts(learner: Callable[[], list[float]], served: Callable[[], list[float]], kind: str) -> None:
    assert verdict(moved(learner()), moved(served()), noise=1e-6).kind == kind


def test_the_canary_has_to_move_more_than_the_noise() -> None:
    for noise in NOISES:
        off = engine(BASE, 2, noise)
        wanted = canary_wanted(BASE, off)
        assert rms(off, engine(BASE, 3, noise)) < wanted, "a server that ignores it, and repeats nothing exactly"
        assert wanted <= CANARY_MOST
    assert canary_wanted(BASE, BASE) < 0.01, "a model whose logits are small cannot be moved far"


def test_another_base_model_is_told_from_noise() -> None:
    assert same_base(BASE, engine(BASE, 2, 0.09))
    assert not same_base(BASE, draw(7, 3.0))


def test_two_models_that_know_nothing_are_told_apart() -> None:
    """All their log-probs are near that of chance, and so near each other."""
    untrained, other = ([-6.2 + value for value in draw(seed, 0.22)] for seed in (8, 9))
    assert rms(untrained, other) < OTHER_BASE
    assert not same_base(untrained, other)
    assert same_base(untrained, engine(untrained, 2, 0.01))
    assert same_base([-6.2] * N, engine([-6.2] * N, 2, 1e-4))
