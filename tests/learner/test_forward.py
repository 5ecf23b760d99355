"""The layouts and the fused head against the model's own forward pass, for each family that is trusted with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grpod.learner import forward
from grpod.learner.batch import credit, micro_batches
from grpod.learner.forward import completion_logprobs, selected_logprobs
from grpod.learner.model import STOCK, load
from tests.learner.policies import FOUR, config, family, group, plain_logprobs, rollout

GROUPS = [group(*FOUR), group(rollout((20, 21), 0.2), rollout((22, 23, 24, 25, 2), 0.9), prompt=(30, 31, 32, 33, 34, 35))]


@pytest.mark.parametrize("model_type", [*sorted(STOCK), "gemma2"])
def test_every_layout_gives_the_model_s_own_log_probs(tmp_path: Path, model_type: str) -> None:
    model = load(config(), family(tmp_path, model_type), 0)
    assert model.stock == (model_type in STOCK)

    class Plain:
        _model = model

    rollouts = [(g.prompt_ids, r.completion_ids) for g in GROUPS for r in g.rollouts]
    with torch.no_grad():
        expected = sorted(float(plain_logprobs(Plain, p, c).sum()) for p, c in rollouts)  # type: ignore[arg-type]
    for share in {False, model.stock}:
        for budget in (16, 4096):
            found = []
            rows = credit(GROUPS, config())
            batches = micro_batches(rows, token_budget=budget, hidden_size=32, share=share, device=torch.device("cpu"))
            for batch in batches:
                logprobs_BT, entropy_BT = completion_logprobs(model.causal, batch, fused=share)
                found += logprobs_BT.sum(1).tolist()
                assert (entropy_BT[batch.mask_BT] > 0).all()
            assert sorted(found) == pytest.approx(expected, abs=1e-4)


def test_attention_across_completions_would_show(tmp_path: Path) -> None:
    """So that the test above can fail."""
    model = load(config(), family(tmp_path, "qwen2"), 0)
    rows = credit(GROUPS, config())
    batch = micro_batches(rows, token_budget=4096, hidden_size=32, share=True, device=torch.device("cpu"))[0]
    assert batch.attention_mask is not None
    with torch.no_grad():
        good, _ = completion_logprobs(model.causal, batch, fused=True)
        batch.attention_mask.copy_(torch.ones_like(batch.attention_mask).tril())
        wrong, _ = completion_logprobs(model.causal, batch, fused=True)
    assert float((good - wrong).abs().max()) > 1e-2


@pytest.mark.parametrize("chunk", [1, 64 * 3, 1 << 24])
def test_the_fused_head_is_log_softmax(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(forward, "CHUNK_LOGITS", chunk)
    random = torch.Generator().manual_seed(0)
    weight_VH = torch.randn(64, 16, generator=random)
    targets_N, temperatures_N = torch.arange(10), torch.linspace(0.5, 2.0, 10)
    one, other = (torch.randn(10, 16, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    logprobs_N, entropy_N = selected_logprobs(one, weight_VH, targets_N, temperatures_N)
    all_NV = ((other @ weight_VH.T) / temperatures_N[:, None]).log_softmax(-1)
    torch.testing.assert_close(logprobs_N, all_NV.gather(1, targets_N[:, None])[:, 0])
    torch.testing.assert_close(entropy_N, -(all_NV.exp() * all_NV).sum(-1).detach())
    (logprobs_N * torch.arange(10)).sum().backward()
    (all_NV.gather(1, targets_N[:, None])[:, 0] * torch.arange(10)).sum().backward()
    torch.testing.assert_close(one.grad, other.grad)
    assert not entropy_N.requires_grad
