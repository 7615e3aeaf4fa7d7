"""Quality numbers against cross_entropy and kl_div over full logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from surgeon.quality import head as head_module
from surgeon.quality.head import OutputHead
from tests.tiny_models import HIDDEN, VOCABULARY, tiny_model


@pytest.fixture(
    params=[
        "llama",
        "opt",
        "gemma2",
        "granite",
        "llama with a biased head",
        "granite with a biased head",
    ]
)
def model(request: pytest.FixtureRequest) -> Any:
    family, _, biased = request.param.partition(" ")
    model = tiny_model(family, num_layers=1)
    if not biased:
        return model
    model.lm_head = torch.nn.Linear(HIDDEN, VOCABULARY)
    torch.nn.init.normal_(model.lm_head.bias)
    return model


def logits(model: Any, stream: torch.Tensor) -> torch.Tensor:
    head = OutputHead(model)
    raw = model.lm_head(head.norm(stream))[:, :-1].detach() / getattr(model.config, "logits_scaling", 1)
    cap = getattr(model.config, "final_logit_softcapping", None)
    return raw if cap is None else cap * (raw / cap).tanh()


@pytest.mark.parametrize("block", [1, 7, 1000])
def test_quality_equals_full_logits(model: Any, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "BLOCK_BYTES", {"cpu": block * 4 * VOCABULARY})
    monkeypatch.setattr(head_module, "LEAST_ROWS", 1)
    ids = torch.randint(VOCABULARY, (3, 9))
    original = torch.randn(3, 9, HIDDEN)
    # So near that some of the likeliest tokens are the same.
    changed = original + torch.randn(3, 9, HIDDEN)
    head = OutputHead(model)
    reference = head.reference(original, ids, sampled=True)
    quality = head.compare(changed, reference)
    log_p, log_q = (logits(model, stream).log_softmax(-1) for stream in (original, changed))
    assert 0 < quality["greedy_acceptance"].mean() < 1
    for window in range(3):
        nll = functional.cross_entropy(logits(model, changed)[window], ids[window, 1:])
        kl = functional.kl_div(log_q[window], log_p[window], reduction="batchmean", log_target=True)
        base = functional.cross_entropy(logits(model, original)[window], ids[window, 1:])
        assert float(quality["nll"][window]) == pytest.approx(float(nll), rel=1e-5)
        assert float(quality["divergence"][window]) == pytest.approx(float(kl), rel=1e-4)
        chosen, wanted = (logits(model, stream)[window].argmax(-1) for stream in (changed, original))
        same = (chosen == wanted).double().mean()
        assert float(quality["greedy_acceptance"][window]) == pytest.approx(float(same))
        shared = torch.minimum(log_p[window].exp(), log_q[window].exp()).sum(-1).mean()
        assert float(quality["sampled_acceptance"][window]) == pytest.approx(float(shared), rel=1e-5)
        assert float(reference.quality["nll"][window]) == pytest.approx(float(base), rel=1e-5)
    assert not reference.quality["divergence"].any()
    assert (reference.quality["greedy_acceptance"] == 1).all()
    without = head.compare(changed, head.reference(original, ids))
    assert "sampled_acceptance" not in without
    assert torch.equal(without["divergence"], quality["divergence"])
    again = head.compare(original, reference)["sampled_acceptance"]
    assert again is not None
    torch.testing.assert_close(again, torch.ones(3, dtype=torch.double), rtol=1e-5, atol=0)


def test_blocks_are_means_over_parts_of_windows(model: Any) -> None:
    ids = torch.randint(VOCABULARY, (3, 12))
    original, changed = torch.randn(3, 12, HIDDEN), torch.randn(3, 12, HIDDEN)
    head = OutputHead(model)
    quality = head.compare(changed, head.reference(original, ids), blocks=2)
    log_p, log_q = (logits(model, stream).log_softmax(-1) for stream in (original, changed))
    tokens = (log_p.exp() * (log_p - log_q)).sum(-1)
    expected = torch.stack([tokens[:, :6].mean(-1), tokens[:, 6:].mean(-1)], dim=-1)
    torch.testing.assert_close(quality["blocks"].float(), expected, rtol=1e-4, atol=1e-6)
    assert "blocks" not in head.compare(changed, head.reference(original, ids))


def test_the_original_diverges_from_itself_by_rounding_only(model: Any) -> None:
    ids, stream = torch.randint(VOCABULARY, (2, 30)), torch.randn(2, 30, HIDDEN)
    head = OutputHead(model)
    assert head.compare(stream, head.reference(stream, ids))["divergence"].abs().max() < 1e-6


def test_sixteen_bit_weights_keep_float32_numbers() -> None:
    model = tiny_model("llama", num_layers=1).to(torch.bfloat16)
    ids = torch.randint(VOCABULARY, (2, 9))
    original, changed = torch.randn(2, 2, 9, HIDDEN, dtype=torch.bfloat16)
    head = OutputHead(model)
    quality = head.compare(changed, head.reference(original, ids))
    log_p, log_q = (logits(model, stream).float().log_softmax(-1) for stream in (original, changed))
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean(-1)
    torch.testing.assert_close(quality["divergence"].float(), kl, rtol=0.03, atol=0.03)
    assert quality["nll"].dtype == torch.float64


def test_a_head_that_is_not_linear_is_refused() -> None:
    model = tiny_model("llama", num_layers=1)
    model.lm_head = torch.nn.Sequential(model.lm_head, torch.nn.Tanh())
    with pytest.raises(ValueError, match="Sequential"):
        OutputHead(model)
