"""A model's quality on a text against plain computations, and against what a scan measures."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import surgeon
from surgeon.analysis.engine.measure import MeasureOptions, measure
from surgeon.analysis.engine.sharing import share
from surgeon.language.program import Program
from surgeon.quality.head import logits_of, text_quality
from surgeon.quality.summary import Quality
from tests.tiny_models import VOCABULARY, tiny_model

IDS = torch.randint(VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
def test_numbers_equal_a_scans_and_plain_ones(family: str) -> None:
    original, edited = tiny_model(family), tiny_model(family)
    dense = Program.dense(4, 1 if family == "gpt_neox" else 2)
    program = Program(dense.nodes[: len(dense) // 2])
    (_, by_scan) = list(measure(original, IDS, share([dense, program]), MeasureOptions(3)))
    surgeon.edit(edited, program)
    found = text_quality(logits_of(edited), IDS, logits_of(original))
    assert found.perplexity == pytest.approx(float(by_scan.quality["nll"].mean().exp()), rel=1e-5)
    assert found.divergence == pytest.approx(float(by_scan.quality["divergence"].mean()), rel=1e-4)
    with torch.no_grad():
        logits, wanted = edited(IDS).logits[:, :-1], original(IDS).logits[:, :-1]
    plain = functional.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten())
    assert found.perplexity == pytest.approx(float(plain.exp()), rel=1e-5)
    kl = functional.kl_div(
        logits.log_softmax(-1).flatten(0, 1),
        wanted.log_softmax(-1).flatten(0, 1),
        reduction="batchmean",
        log_target=True,
    )
    assert found.divergence == pytest.approx(float(kl), rel=1e-4)
    low, high = found.ends("perplexity")
    assert low < found.perplexity < high
    assert found.tokens == 24
    assert found.by_window("nll") == pytest.approx(by_scan.quality["nll"].numpy(), rel=1e-5)
    assert found.by_window("greedy_acceptance") == pytest.approx(
        by_scan.quality["greedy_acceptance"].numpy()
    )
    assert found.by_window("divergence") == pytest.approx(
        by_scan.quality["divergence"].numpy(), rel=1e-4
    )


def test_of_answers_every_token_counts_alike_and_nothing_behind_the_last_is_read() -> None:
    model, other = tiny_model("llama", 1), tiny_model("llama", 1, seed=1)
    answers = torch.tensor(
        [[1, 0, 1, 1, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 0, 1, 0]]
    )
    lengths = []

    def read(ids: Tensor) -> Tensor:
        lengths.append(ids.shape[1])
        return logits_of(model)(ids)

    found = text_quality(read, IDS, logits_of(other), answers=answers)
    assert lengths == [4, 9, 8]
    counted = answers[:, 1:].bool()
    with torch.no_grad():
        q, p = (one(IDS).logits[:, :-1][counted].double().log_softmax(-1) for one in (model, other))
    assert found.tokens == len(q) == 12
    nll = -q.gather(-1, IDS[:, 1:][counted][:, None])
    assert found.perplexity == pytest.approx(float(nll.mean().exp()), rel=1e-5)
    assert found.divergence == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)
    every = text_quality(logits_of(model), IDS, logits_of(other), answers=torch.ones_like(IDS))
    plain = text_quality(logits_of(model), IDS, logits_of(other))
    assert every.table().iloc[:, 1:].to_numpy() == pytest.approx(plain.table().iloc[:, 1:].to_numpy())


def test_acceptance_is_the_share_of_equal_choices_and_what_distributions_share() -> None:
    model, other = tiny_model("llama", 1), tiny_model("llama", 1)
    weight = other.lm_head.weight.data  # changed by so little that some choices stay the same
    weight += 0.5 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    found = text_quality(logits_of(model), IDS, logits_of(other))
    equal, common = [], []
    for window in IDS:  # token by token, by the definitions
        with torch.no_grad():
            q, p = (one(window[None]).logits[0, :-1].double().softmax(-1) for one in (model, other))
        equal += [int(p[place].argmax()) == int(q[place].argmax()) for place in range(len(p))]
        # Corollary 3.6: the chance of acceptance, of a token drawn from q, accepted with min(1, p / q).
        for rows in zip(p.tolist(), q.tolist(), strict=True):
            common += [sum(b * min(1.0, a / b) for a, b in zip(*rows, strict=True))]
    assert 0 < sum(equal) < len(equal)
    assert found.greedy_acceptance == pytest.approx(sum(equal) / len(equal))
    assert found.sampled_acceptance == pytest.approx(sum(common) / len(common), rel=1e-6)
    low, high = found.ends("sampled_acceptance")
    assert 0 <= low < found.sampled_acceptance < high <= 1
    assert Quality.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_model_accepts_all_that_it_drafts_itself() -> None:
    model = logits_of(tiny_model("llama", 1))
    found = text_quality(model, IDS, model)
    assert found.greedy_acceptance == 1
    assert found.sampled_acceptance == pytest.approx(1, abs=1e-6)


def test_without_an_original_there_is_no_divergence() -> None:
    found = text_quality(logits_of(tiny_model("llama", 1)), IDS)
    assert not found.knows("divergence")
    assert math.isnan(found.divergence_low)
    assert not found.knows("greedy_acceptance")
    assert not found.knows("sampled_acceptance")
    assert "divergence" not in found.line()
    assert not found.as_draft()


def test_one_window_has_no_interval() -> None:
    found = text_quality(
        logits_of(tiny_model("llama", 1)), IDS[:1], logits_of(tiny_model("llama", 1, seed=1))
    )
    assert math.isnan(found.perplexity_low)
    assert math.isnan(found.divergence_high)
    assert (
        found.line()
        == f"perplexity {found.perplexity:.4g}, divergence {found.divergence:.3g} over 8 tokens"
    )
    assert (
        found.as_draft()
        == f"as a draft: acceptance {found.greedy_acceptance:.3f} greedy, {found.sampled_acceptance:.3f} sampled"
    )


def test_other_vocabularies_and_broken_models_are_refused() -> None:
    model, other = tiny_model("llama", 1), tiny_model("llama", 1, vocab_size=100)
    with pytest.raises(ValueError, match="vocabularies of 100 and 97 tokens"):
        text_quality(logits_of(model), IDS, logits_of(other))
    model.lm_head.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="not finite in window 0"):
        text_quality(logits_of(model), IDS)
