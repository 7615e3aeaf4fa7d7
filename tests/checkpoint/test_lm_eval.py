"""lm-eval's own model class on the modeling files inside checkpoints: the scores that `surgeon.edit` gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer

import surgeon
from tests.checkpoint.helpers import load_shipped, run_export

PAIRS = [("A few words", " and more"), ("B", " b c d e f"), ("Another text that is longer", " end")]


@pytest.mark.parametrize(
    ("form", "program"),
    [
        ("fused", "A0 F0 [A1 A2] [F1 F2] A3 F3"),
        ("program", "A0 F0 >A1 >F1 {A2/2:0 F2/2:0 | A2/2:1 F2/2:1} A3 F3"),
    ],
)
def test_scores_and_texts(form: str, program: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    run_export(tiny_checkpoint, tmp_path / form, program, form=form)
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    scores, greedy, texts = _scores_and_texts(load_shipped(tmp_path / form), tokenizer)
    edited = surgeon.edit(surgeon.load(tiny_checkpoint, dtype=torch.float32), program)
    expected, *same = _scores_and_texts(edited, tokenizer)
    assert scores == pytest.approx(expected, rel=1e-5)
    assert [greedy, texts] == same
    assert len(set(scores)) == len(PAIRS)


def _scores_and_texts(model: Any, tokenizer: Any) -> tuple[list[float], list[bool], list[str]]:
    evaluated = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, device="cpu")
    scores = evaluated.loglikelihood(
        [Instance("loglikelihood", {}, pair, 0) for pair in PAIRS], disable_tqdm=True
    )
    options = {"until": ["\n"], "max_gen_toks": 5, "do_sample": False}
    asked = [Instance("generate_until", {}, (text, options), 0) for text, _ in PAIRS]
    texts = evaluated.generate_until(asked, disable_tqdm=True)
    return [score for score, _ in scores], [greedy for _, greedy in scores], texts
