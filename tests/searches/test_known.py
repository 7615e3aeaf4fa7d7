"""What a search takes from passes: nothing is measured again, what is taken is told, and what cannot be is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import surgeon
from surgeon.analysis.subject import open_subject
from surgeon.findings.result import RunResult
from surgeon.language.operations.applied import Edit
from surgeon.language.program import Program
from surgeon.models.weights import TruncatedSVD
from surgeon.quality.summary import ACCEPTANCES, Quality
from surgeon.searches.evaluate import Evaluator, TermsPlan
from surgeon.searches.known import FEW, Known, KnownPass, open_factors, read_known
from surgeon.searches.question import PricedQuestion, Question
from surgeon.testing.spaces import small_model
from tests.searches.made_up_search import LAYERS, damage, search, try_programs
from tests.tiny_models import save_checkpoint

TEXT: dict[str, Any] = {"tokens": 256, "window": 32}
ASKED: dict[str, Any] = {"budget": "depth=3", "trials": 6, "holdout": 64}


@pytest.fixture(autouse=True)
def _without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunResult, "draw", lambda *_: [])


@pytest.fixture
def scanned(tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path) -> surgeon.findings.scan.Scan:
    return surgeon.scan(tiny_checkpoint, tiny_text, tmp_path / "scan", operations=["lp"], **TEXT)


def test_what_a_scan_has_measured_is_what_the_search_would_measure(
    scanned: Any, tiny_checkpoint: Path, tiny_text: Path
) -> None:
    subject = open_subject(tiny_checkpoint, tiny_text, **TEXT)
    known = read_known([scanned.files[0].parent], subject.opened, subject.windows)
    evaluator = Evaluator(subject.model, subject.windows)
    mixture = Question("pair").mixture(subject.opened)
    programs = [mixture.program((edit,)) for edit in mixture.edits]
    pairs = Edit(0, 2, "pair"), Edit(2, 4, "pair")
    assert list(known.choices(mixture)) == [pairs], "the one stretch of two pairs"
    for program, measured in evaluator.measure([*programs, mixture.program(pairs)]).items():
        found = known.find_quality(program)
        assert found is not None
        assert found.whole
        assert found.windows["divergence"] == pytest.approx(
            measured.windows["divergence"], rel=1e-5, abs=1e-9
        )
        assert found.windows["nll"] == pytest.approx(measured.windows["nll"], rel=1e-6)
        assert {name: found.windows.get(name) for name in ACCEPTANCES} == {
            name: measured.windows.get(name) for name in ACCEPTANCES
        }
        assert found.divergence_high == pytest.approx(measured.divergence_high, rel=1e-4)
        assert found.tokens == measured.tokens
    asked = Question("pair", "depth=3")
    question = PricedQuestion(asked, mixture, asked.pricing(subject.opened), Quality(9, divergence=0))
    assert known.plan(question).known == pytest.approx(
        [known.find_quality(p).divergence for p in programs]
    )
    assert known.find_quality(Program.parse("A0 F0 A2 F2 A1 F1 A3 F3")) is None


def test_a_search_finds_the_same_with_no_more(
    scanned: Any, tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path
) -> None:
    alone = surgeon.search(tiny_checkpoint, tiny_text, tmp_path / "alone", **ASKED, **TEXT)
    fed = surgeon.search(tiny_checkpoint, tiny_text, tmp_path / "fed", using=scanned, **ASKED, **TEXT)
    assert str(fed.program) == str(alone.program)
    assert fed.winner.trial.measured.divergence == pytest.approx(
        alone.winner.trial.measured.divergence, rel=1e-5
    )
    # In so small a model trials are single edits, whose states are kept: they run nothing either way.
    assert fed.record["sublayers_run"] <= alone.record["sublayers_run"]
    (taken,) = fed.record["using"]
    assert taken == {
        "pass": "scan", "folder": str(tmp_path / "scan"), "same_text": True, "edits": 3, "choices": 1, "trials": 3,
        "foreseen": 0,
    }  # fmt: skip
    assert "using" not in alone.record
    terms = pd.read_csv(tmp_path / "fed/terms.csv").set_index("edit")["divergence"]
    cells = scanned.cells[scanned.cells["last"] == scanned.cells["first"] + 1].set_index("first")[
        "divergence"
    ]
    assert terms["pair 1:3"] == pytest.approx(cells[1], rel=1e-6)


@pytest.mark.thorough
def test_a_search_finds_the_same_with_less(tiny_text: Path, tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "six", num_layers=6)
    scan = surgeon.scan(model, tiny_text, tmp_path / "scan", operations=["lp"], **TEXT)
    asked = ASKED | {"budget": "depth=4"}
    alone = surgeon.search(model, tiny_text, tmp_path / "alone", **asked, **TEXT)
    fed = surgeon.search(model, tiny_text, tmp_path / "fed", using=scan, **asked, **TEXT)
    assert str(fed.program) == str(alone.program)
    assert fed.winner.trial.measured.divergence == pytest.approx(
        alone.winner.trial.measured.divergence, rel=1e-5
    )
    assert fed.record["sublayers_run"] < alone.record["sublayers_run"]


def test_it_goes_on_with_the_same_passes_only(
    scanned: Any, tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path
) -> None:
    folder = scanned.files[0].parent
    surgeon.search(
        tiny_checkpoint, tiny_text, tmp_path / "out", using=[folder], **{**ASKED, "trials": 2}, **TEXT
    )
    first = pd.read_csv(tmp_path / "out/trials.csv")
    surgeon.search(tiny_checkpoint, tiny_text, tmp_path / "out", using=[folder], **ASKED, **TEXT)
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "out/trials.csv").head(2), first)
    with pytest.raises(ValueError, match="has another using"):
        surgeon.search(tiny_checkpoint, tiny_text, tmp_path / "out", **ASKED, **TEXT)


def test_folders_that_are_of_no_use_are_refused(scanned: Any, tiny_text: Path, tmp_path: Path) -> None:
    other = save_checkpoint(tmp_path / "other", "llama", num_layers=5)
    asked = ASKED | TEXT | {"budget": "depth=4"}
    with pytest.raises(ValueError, match="holds a scan of another model"):
        surgeon.search(other, tiny_text, tmp_path / "out", using=scanned, **asked)
    with pytest.raises(
        FileNotFoundError, match="holds no finished scan, spectrum, similarity or sensitivity"
    ):
        surgeon.search(other, tiny_text, tmp_path / "out", using=tmp_path, **asked)


def test_a_damaged_journal_is_named(
    scanned: Any, tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path
) -> None:
    journal = tmp_path / "scan/journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join([*lines[:3], '{"program": 3}\n']))
    with pytest.raises(ValueError, match=r"journal.jsonl is damaged; run surgeon scan again"):
        surgeon.search(tiny_checkpoint, tiny_text, tmp_path / "out", using=scanned, **ASKED, **TEXT)
    journal.unlink()
    with pytest.raises(FileNotFoundError, match=r"journal.jsonl is gone"):
        surgeon.search(tiny_checkpoint, tiny_text, tmp_path / "out", using=scanned, **ASKED, **TEXT)


@pytest.fixture
def spectrum(tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path) -> Any:
    more: dict[str, Any] = {"ranks": "1/4,1/2", "layers": "1:3", "calibration_tokens": 256}
    return surgeon.spectrum(tiny_checkpoint, tiny_text, tmp_path / "spectrum", **more, **TEXT)


def test_a_spectrum_makes_ranks_those_of_single_matrices_with_its_factors(
    spectrum: Any, tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path
) -> None:
    subject = open_subject(tiny_checkpoint, tiny_text, **TEXT)
    known = read_known([tmp_path / "spectrum"], subject.opened, subject.windows)
    mixture = known.mixture(Question("rank").mixture(subject.opened))
    rows = spectrum.damage[spectrum.damage["kept"] < 1]
    assert {(edit.first, edit.option) for edit in mixture.edits} == {
        (row.layer, f"{row.weight}:{row.rank}") for row in rows.itertuples()
    }
    factors = open_factors(subject, mixture.single_edits, known.ranks, tmp_path / "factors", True)
    evaluator = Evaluator(subject.model, subject.windows, factors=factors)
    programs = [mixture.program((edit,)) for edit in mixture.edits]
    for program, measured in evaluator.measure(programs).items():
        found = known.find_quality(program)
        assert found is not None
        assert found.windows["divergence"] == pytest.approx(
            measured.windows["divergence"], rel=1e-4, abs=1e-8
        )
    assert not mixture.exclude(Edit(1, 2, "rank", "q:8"), Edit(1, 2, "rank", "k:4"))
    assert mixture.exclude(Edit(1, 2, "rank", "q:8"), Edit(1, 2, "rank", "q:16"))


def test_what_is_searched_with_whitened_factors_is_what_the_recipe_gives(
    spectrum: Any, tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path
) -> None:
    asked = {"space": "rank", "budget": "params=0.95x", "trials": 4, "holdout": 64}
    found = surgeon.search(tiny_checkpoint, tiny_text, tmp_path / "out", using=spectrum, **asked, **TEXT)
    (operation, *_) = found.recipe.operations
    assert operation.parameters["method"] == "whitened"
    assert operation.parameters["calibration"] == spectrum.record["calibration_text"]
    (taken,) = found.record["using"]
    assert (taken["pass"], taken["edits"]) == ("spectrum", len(found.terms))
    edited = surgeon.evaluate(tmp_path / "out/recipe.yaml", tiny_text, **TEXT)
    assert edited.text.divergence == pytest.approx(found.winner.trial.measured.divergence, rel=1e-3)


def test_of_many_edits_the_better_half_by_a_pass_is_measured() -> None:
    searching, _ = search("drop", "depth=7")
    mixture = searching.question.mixture
    whole = {("", layer): 1.0 + layer for layer in range(LAYERS)}
    attentions = {("attention", layer): 20.0 - layer for layer in range(LAYERS)}
    plan = Known((KnownPass("similarity", Path("a"), removed=whole | attentions),)).plan(
        searching.question
    )
    run = {edit for edit, runs in zip(mixture.edits, plan.run, strict=True) if runs}
    left = {str(edit) for edit in mixture.edits if edit not in run}
    assert left == {f"drop {layer}:{layer + 1}" for layer in range(FEW, LAYERS)} | {
        f"drop {layer}:{layer + 1} attention" for layer in range(LAYERS - FEW)
    }, "nothing is said of MLPs, which are all measured"


def test_edits_of_which_a_pass_says_nothing_are_measured_beside_the_better_half_of_the_others() -> None:
    """As the first layer by itself, which misses no layer before it."""
    searching, _ = search("pair,desync", "depth=9")
    mixture = searching.question.mixture
    missed = {layer: 1.0 + layer % 7 for layer in range(1, LAYERS)}
    rest = KnownPass("other", Path("b"), missed={8: 0.0, 9: math.inf})
    one = KnownPass("sensitivity", Path("a"), missed=missed)
    for passes in ((one,), (rest, one), (one, rest)):
        plan = Known(passes).plan(searching.question)
        left = {str(edit) for edit, runs in zip(mixture.edits, plan.run, strict=True) if not runs}
        assert left == {"desync 6:7", "pair 5:7"}, "8 of 9 of each are measured"
        measured = np.where(plan.run, 0.1 + 0.1 * np.arange(len(plan.run)), np.nan)
        assert np.isfinite(plan.complete(measured)).all(), "what does not run can be estimated"
    few = Known((KnownPass("similarity", Path("c"), missed={9: 1.0}),)).plan(searching.question)
    assert few.run.all(), "one has no order"


def test_what_is_not_measured_is_a_power_of_what_was_foreseen() -> None:
    foreseen = np.array([1.0, 2.0, 4.0, 8.0, 1.0, 5.0])
    true = 0.1 * foreseen[:4] ** 1.5
    mixture = Question("pair").mixture(small_model(layers=7))
    plan = replace(
        TermsPlan.whole(mixture), foreseen=foreseen, groups=np.array([0, 0, 0, 0, 1, 1], dtype=np.int64)
    )
    found = plan.complete(np.array([*true[:3], np.nan, 0.7, np.nan]))
    assert found == pytest.approx([*true, 0.7, 0.7], rel=1e-9), (
        "of a group of which little is known, the worst"
    )


def test_what_a_pass_foresees() -> None:
    mixture = Question("pair:3,ladder,desync,drop,rank").mixture(small_model(layers=4))
    one = KnownPass("x", Path("x"), missed={1: 0.1, 2: 0.2, 3: 0.4}, removed={("mlp", 2): 5.0})
    said = {
        "pair 1:3": 0.2, "pair 1:4": 0.6, "desync 2:3": 0.2, "drop 2:3 mlp": 5.0, "drop 2:3": math.nan,
        "ladder 2:3": math.nan, "desync 0:1": math.nan, "rank 1:2 mlp:0.8": math.nan,
    }  # fmt: skip
    for text, value in said.items():
        assert one.foresees(Edit.parse(text), mixture) == pytest.approx(value, nan_ok=True)
    (note,) = Known((replace(one, missed={}, removed={}),)).notes(mixture)
    assert note == "the x in x says nothing of the edits of this search; nothing is taken of it"


def test_choices_that_were_measured_before_rule_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With everything known the search ends when the best that is left is surely worse, with the same winner."""
    searching, _ = search("pair", "depth=7")
    best = min(trial.measured.divergence for trial in try_programs(searching, 60))
    fed, evaluator = search("pair", "depth=7")
    mixture = fed.question.mixture
    programs = {}
    for stretch in mixture.stretches():
        for length in range(1, len(stretch) + 1):
            value = damage(stretch[:length])
            programs[str(mixture.program(stretch[:length]))] = evaluator.measured(value)
    divergence = {text: measured.divergence for text, measured in programs.items()}
    known = Known((KnownPass("scan", Path("scan"), programs, divergence),))
    fed.known = known
    trials = [*try_programs(fed, 60)]
    assert min(trial.measured.divergence for trial in trials) == pytest.approx(best)
    assert 8 <= len(trials) < 30
    patient, _ = search("pair", "depth=7")
    patient.known = known
    monkeypatch.setattr("surgeon.searches.search.SURE", None)
    assert len([*try_programs(patient, 60)]) == math.comb(LAYERS - 3, 3), (
        "all choices of three pairs are tried"
    )
    (taken,) = known.record(mixture, trials)
    assert (taken["edits"], taken["choices"]) == (9, len(programs) - 9)
    single, _ = search("pair", "depth=9")
    plan = known.plan(single.question)
    assert plan.run.tolist() == (plan.known <= 2 * plan.known.min()).tolist(), (
        "only what a good choice may have runs"
    )


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


def test_they_are_the_best_ones_of_every_rank(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path
) -> None:
    """By the singular values and vectors of `torch.linalg.svd` (Eckart and Young)."""
    subject = open_subject(tiny_checkpoint, tiny_text, **TEXT)
    mixture = Question("rank").mixture(subject.opened)
    factors = open_factors(subject, mixture.single_edits, None, tmp_path, make=True)
    assert factors is not None
    Evaluator(subject.model, subject.windows, factors=factors).measure(mixture.single_edits)
    weights = dict(subject.model.named_parameters())
    sublayers = {
        one for program in mixture.single_edits for one in program.sublayers() if one.rank("down")
    }
    assert len({one.rank("down") for one in sublayers}) == 3
    for sublayer in sublayers:
        whole = weights[f"model.layers.{sublayer.layers[0]}.mlp.down_proj.weight"].detach()
        left, sizes, right = torch.linalg.svd(whole.double(), full_matrices=False)
        rank = sublayer.rank("down") or 0
        best = (left[:, :rank] * sizes[:rank]) @ right[:rank]
        made = factors.factors(sublayer, "down", None)  # type: ignore[arg-type]
        torch.testing.assert_close(made.product().double(), best, rtol=1e-4, atol=1e-5)
