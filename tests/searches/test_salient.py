"""A search's experts against REAP's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import surgeon
from surgeon.findings.edit import Edit
from surgeon.language.program import Program
from surgeon.searches.mixture import Mixture
from surgeon.searches.salient import against_most_salient
from surgeon.searches.spaces import parse_spaces
from surgeon.searches.trial import MeasuredProgram
from surgeon.testing.spaces import small_model
from tests.tiny_models import save_checkpoint

MIXTURE = Mixture(parse_spaces("experts:2,drop"), small_model("qwen3_moe", layers=3)).by_saliency({1: [3, 1, 0, 2]})
SALIENT = "A0 F0 A1 F1!e1,e3 A2"


def measured(*divergences: float) -> MeasuredProgram:
    return MeasuredProgram(1.0, sum(divergences) / len(divergences), 0.0, 0.0, 10, divergences=divergences)


def said(texts: list[str], **programs: MeasuredProgram) -> str | None:
    choice = tuple(sorted(map(Edit.parse, texts)))
    found = {Program.parse(name): one for name, one in programs.items()}
    return against_most_salient(MIXTURE, choice, found, "held-out text")


def test_window_by_window() -> None:
    texts = ["experts 1:2 0,3", "drop 2:3 mlp"]
    ours = {"A0 F0 A1 F1!e0,e3 A2": measured(1.0, 2.0, 3.0)}
    worse, alike = measured(1.2, 2.21, 3.19), measured(0.5, 2.5, 3.01)
    assert said(texts, **ours, **{SALIENT: worse}) == (
        "divergence 2, 2.2 of the most salient ones (REAP), on held-out text: difference -0.2 (95% interval -0.22 to "
        "-0.18), better"
    )
    assert str(said(texts, **ours, **{SALIENT: alike})).endswith("not told apart")
    assert said(["experts 1:2 1,3"]) == (
        "the most salient ones of their layers (REAP): no other choice that was tried is better"
    )
    assert said(["drop 2:3 mlp"]) is None


@pytest.mark.thorough
def test_what_a_search_says(tmp_path: Path, tiny_text: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", "qwen3_moe", 3)
    asked: dict[str, Any] = {"tokens": 128, "window": 32, "space": "experts:2", "budget": "experts=2", "trials": 9}
    found = surgeon.search(folder, tiny_text, tmp_path / "out", **asked)
    kept = [len(one.experts or ()) for one in found.program.sublayers() if one.kind == "F"]
    assert kept == [2, 2, 0], "the last layer of this model is dense"
    assert "REAP" in found.record["experts"]
    mixture = found.question.mixture
    reap = mixture.program(mixture.with_most_salient(found.winner.trial.proposal.choice))
    assert str(reap) in set(found.trials["program"]), "it is tried"
