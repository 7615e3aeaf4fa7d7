"""Candidates of a search healed for real: trained as `surgeon heal` does it, measured as the search does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from surgeon.checkpoint.load import load
from surgeon.checkpoint.read import Checkpoint
from surgeon.checkpoint.streamed import load_streamed
from surgeon.language.program import Program
from surgeon.models.edit import edit, program_of
from surgeon.quality.data import Windows, digest_of
from surgeon.searches.evaluate import Evaluator
from surgeon.searches.healer import CandidateHealer, brief_settings, require_apart
from surgeon.training.distill.distiller import Distillation
from surgeon.training.run import train
from surgeon.training.texts import TrainingText, TrainTexts
from tests.tiny_models import save_checkpoint

PAIRED = Program.parse("A0 F0 [A1 A2] [F1 F2]")


def windows(count: int, seed: int) -> Windows:
    ids = torch.randint(3, 40, (count, 12), generator=torch.Generator().manual_seed(seed))
    return Windows(ids, f"text {seed}", digest_of(ids))


TEXTS = TrainTexts(TrainingText.of(windows(12, 1)), windows(3, 2))


def healer(folder: Path, steps: int = 4, texts: TrainTexts = TEXTS) -> CandidateHealer:
    model = save_checkpoint(folder / "model", num_layers=3)
    settings = replace(brief_settings(steps, 2, "divergence"), learning_rate=3e-3)
    return CandidateHealer(model, Checkpoint(model).model_hash(), load(model), texts, settings, folder / "healing")


def test_a_healed_candidate_is_that_of_a_run_of_its_own(tmp_path: Path) -> None:
    own = healer(tmp_path)
    before = {name: tensor.clone() for name, tensor in own.original.state_dict().items()}
    found = own(PAIRED)
    student = edit(load(own.source), PAIRED)
    run = train(student, TEXTS, own.settings, tmp_path / "other", lambda: load(own.source))
    assert run is not None
    assert found.measured.divergence == pytest.approx(run.after.divergence, rel=1e-6)
    assert found.measured.perplexity == pytest.approx(run.after.perplexity, rel=1e-6)
    assert (found.measured.tokens, found.tokens) == (3 * 11, 4 * 2 * 12)
    unhealed = Evaluator(own.original, TEXTS.held_out).measure([PAIRED])[PAIRED]
    assert unhealed.divergence == pytest.approx(run.before.divergence, rel=1e-4)
    assert found.measured.divergence < unhealed.divergence
    assert found.measured.divergence == pytest.approx(sum(found.measured.divergences) / 3)
    assert program_of(own.original) == Program.dense(3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in own.original.state_dict().items())
    assert not list(own.folder.iterdir()), "checkpoints of runs that are over are gone"


def test_what_healing_depends_on_tells_keys_apart(tmp_path: Path) -> None:
    own = healer(tmp_path)
    others = [
        replace(own, settings=brief_settings(5, 2, "divergence")),
        replace(own, settings=brief_settings(4, 2, "perplexity")),
        replace(own, texts=TrainTexts(TrainingText.of(windows(12, 3)), TEXTS.held_out)),
        replace(own, texts=TrainTexts(TEXTS.training, windows(3, 4))),
        replace(own, model_hash="another"),
    ]
    assert len({own.key, *(other.key for other in others)}) == 6
    assert own.key == replace(own, folder=tmp_path / "elsewhere").key
    assert own.how == "healed for 4 steps (edited sublayers, distilled from the original) on 96 tokens of text 1"


def test_candidates_are_healed_towards_what_they_are_compared_by() -> None:
    assert brief_settings(9, 8, "divergence").distillation == Distillation()
    assert brief_settings(9, 8, "perplexity").distillation is None
    with pytest.raises(ValueError, match="steps must be at least 1, not 0"):
        brief_settings(0, 8, "divergence")


def test_text_that_candidates_are_judged_by_is_refused() -> None:
    training, held_out = TEXTS.training, TEXTS.held_out
    require_apart(training, held_out, windows(5, 6))
    ids = torch.cat([held_out.ids[:1], windows(4, 7).ids])
    for other in (training, Windows(ids, "mixed", digest_of(ids))):
        with pytest.raises(ValueError, match=r"windows of .* in the text of the search or in what it holds out"):
            require_apart(other, training, held_out)


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    own = healer(tmp_path)
    with pytest.raises(ValueError, match="leave healing out"):
        replace(own, original=load_streamed(own.source))
