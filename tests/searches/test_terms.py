"""Second-order terms, against divergences of logits that are written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from surgeon.analysis.engine.sharing import share
from surgeon.opened import Model
from surgeon.quality.data import Windows
from surgeon.quality.head import OutputHead
from surgeon.searches.evaluate import (
    Evaluator,
    Terms,
    TermsPlan,
    correlations,
    covariances,
    measure_terms,
)
from surgeon.searches.question import Question
from tests.tiny_models import VOCABULARY, tiny_model

TOKENS = 6


def divergence(head: OutputHead, original: torch.Tensor, changed: torch.Tensor) -> float:
    p, q = (head.logits(hidden).double().log_softmax(-1) for hidden in (original, changed))
    return float(functional.kl_div(q, p, reduction="none", log_target=True).sum(-1).mean())


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_covariances_are_what_small_changes_do_to_the_divergence(family: str) -> None:
    model: Any = tiny_model(family)
    head = OutputHead(model)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        original = torch.randn(TOKENS, model.config.hidden_size, generator=draw)
        steps = [3e-2 * torch.randn(original.shape, generator=draw) for _ in range(3)]
        found = covariances(head, original, [original + step for step in steps])
        for i in range(3):
            assert found[i, i] / 2 == pytest.approx(
                divergence(head, original, original + steps[i]), rel=0.1
            )
            for j in range(i):
                both = divergence(head, original, original + steps[i] + steps[j])
                apart = sum(divergence(head, original, original + steps[k]) for k in (i, j))
                assert found[i, j] == pytest.approx(
                    both - apart, abs=0.1 * float(found.diagonal().max())
                )
    torch.testing.assert_close(found, found.T)


def test_the_same_whatever_the_size_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_model("llama")
    hidden = torch.randn(3, TOKENS, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    whole = covariances(OutputHead(model), hidden[0], list(hidden[1:]))
    monkeypatch.setattr("surgeon.searches.evaluate._BLOCK_BYTES", 1)
    torch.testing.assert_close(covariances(OutputHead(model), hidden[0], list(hidden[1:])), whole)


def test_two_edits_of_one_direction_add_up_as_amplitudes() -> None:
    """(a + b)^2 = a^2 + b^2 + 2 a b: edits that do the same to the logits."""
    damage = Terms(np.array([0.04, 0.09]), np.ones((2, 2))).damage
    assert damage.total([0, 1]) == pytest.approx((0.2 + 0.3) ** 2)


def test_correlations_are_scaled_covariances() -> None:
    covariance = torch.tensor([[4.0, 3.0, 0.0], [3.0, 9.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    assert correlations(covariance) == pytest.approx(np.array([[1, 0.5, 0], [0.5, 1, 0], [0, 0, 0]]))


def test_terms_are_json_and_back() -> None:
    terms = Terms(np.array([0.1, np.inf, 0.3]), np.array([[1, 0.25, -0.5], [0.25, 1, 0], [-0.5, 0, 1]]))
    again = Terms.from_json(terms.to_json())
    assert again.divergence.tolist() == terms.divergence.tolist()
    assert again.correlation.tolist() == terms.correlation.tolist()
    assert np.isfinite(terms.damage.total([0, 1, 2])), (
        "a model that is broken is far worse, not beyond numbers"
    )


IDS = torch.randint(3, VOCABULARY, (8, 64), generator=torch.Generator().manual_seed(5))
MIXTURE = Question("pair,drop,rank:0.5").mixture(Model.of_config(tiny_model("llama", 2).config, "tiny"))


@pytest.mark.parametrize(("runs", "tokens"), [(15, 512), (5, 384), (1, 128)])
def test_edits_run_on_as_much_text_as_so_many_runs_of_the_original_allow(
    runs: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surgeon.searches.evaluate._RUNS", runs)
    monkeypatch.setattr("surgeon.searches.evaluate._LEAST_TOKENS", 128)
    evaluator = Evaluator(tiny_model("llama", 2), Windows(IDS, "ids", "digest"))
    plan = TermsPlan.whole(MIXTURE)
    found = measure_terms(evaluator, plan)
    assert found.tokens == plan.tokens(IDS) == tokens
    assert plan.work(IDS) <= runs * 4 or tokens == 128
    shared = share([MIXTURE.model.program, *plan.programs]).total_sublayers
    assert found.sublayers == pytest.approx(shared * tokens / IDS.numel()), (
        "what they begin with in common runs once"
    )
    assert found.divergence == pytest.approx(divergences(IDS[: tokens // 64]), rel=1e-4)


def test_of_long_windows_edits_run_on_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surgeon.searches.evaluate._RUNS", 3)
    monkeypatch.setattr("surgeon.searches.evaluate._LEAST_TOKENS", 128)
    ids = IDS.view(2, 256)
    plan = TermsPlan.whole(MIXTURE)
    found = measure_terms(Evaluator(tiny_model("llama", 2), Windows(ids, "ids", "digest")), plan)
    assert 128 < found.tokens < 256
    assert 0.98 * 12 <= plan.work(ids) <= 12
    assert found.divergence == pytest.approx(divergences(ids[:1, : found.tokens]), rel=1e-4)


def divergences(ids: torch.Tensor) -> list[float]:
    """Of each edit alone, on a text that is no longer."""
    measured = Evaluator(tiny_model("llama", 2), Windows(ids, "ids", "short")).measure(
        MIXTURE.single_edits
    )
    return [measured[program].divergence for program in MIXTURE.single_edits]
