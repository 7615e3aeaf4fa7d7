"""Factors that a search measures are made once, whatever ranks are asked for, and are those that recipes make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import surgeon
from surgeon.analysis.subject import open_subject
from surgeon.findings.result import RunResult
from surgeon.models.weights import TruncatedSVD
from surgeon.searches.evaluate import Evaluator
from surgeon.searches.known_factors import open_factors
from surgeon.searches.settings import SearchSettings

TEXT: dict[str, Any] = {"tokens": 128, "window": 32}


@pytest.fixture
def decomposed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the matrices that are decomposed."""
    monkeypatch.setattr(RunResult, "draw", lambda *_: [])
    found: list[tuple[int, ...]] = []
    factorise = TruncatedSVD.factors

    def noted(self: Any, *asked: Any) -> Any:
        made = factorise(self, *asked)
        found.append((made.second.shape[0], made.first.shape[1]))
        return made

    monkeypatch.setattr(TruncatedSVD, "factors", noted)
    return found


def test_factors_of_single_edits_serve_all_trials(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, decomposed: list[tuple[int, ...]]
) -> None:
    """Each of the four layers' matrices is decomposed once, also where another command goes on."""
    asked: dict[str, Any] = {"space": "rank", "budget": "params=0.7x", "holdout": 0, **TEXT}
    first = surgeon.search(tiny_checkpoint, tiny_text, tmp_path, 3, **asked)
    files = sorted((tmp_path / "factors").rglob("*.safetensors"))
    assert len(decomposed) == len(files) == len({*files}) > 0
    more = surgeon.search(tiny_checkpoint, tiny_text, tmp_path, 6, **asked)
    assert len(decomposed) == len(files)
    assert [*more.trials["divergence"]][:3] == [*first.trials["divergence"]]
    by_recipe = surgeon.evaluate(more.recipe, tiny_text, **TEXT).text
    assert by_recipe is not None
    assert by_recipe.divergence == pytest.approx(more.winner.trial.measured.divergence, rel=1e-4)


def test_they_are_the_best_ones_of_every_rank(tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path) -> None:
    """By the singular values and vectors of `torch.linalg.svd` (Eckart and Young)."""
    subject = open_subject(tiny_checkpoint, tiny_text, **TEXT)
    mixture = SearchSettings("rank").mixture(subject.opened)
    factors = open_factors(subject, mixture.single_edits, None, tmp_path, make=True)
    assert factors is not None
    Evaluator(subject.model, subject.windows, factors=factors).measure(mixture.single_edits)
    weights = dict(subject.model.named_parameters())
    sublayers = {one for program in mixture.single_edits for one in program.sublayers() if one.rank("down")}
    assert len({one.rank("down") for one in sublayers}) == 3
    for sublayer in sublayers:
        whole = weights[f"model.layers.{sublayer.layers[0]}.mlp.down_proj.weight"].detach()
        left, sizes, right = torch.linalg.svd(whole.double(), full_matrices=False)
        rank = sublayer.rank("down") or 0
        best = (left[:, :rank] * sizes[:rank]) @ right[:rank]
        made = factors.factors(sublayer, "down", None)  # type: ignore[arg-type]
        torch.testing.assert_close(made.product().double(), best, rtol=1e-4, atol=1e-5)
