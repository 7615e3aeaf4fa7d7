"""Checkpoints of models that were trained after their edit: what they say of it, and that their program is proven."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import surgeon
from surgeon.checkpoint.describe import Training, compare, describe, layers_by_recipe
from surgeon.checkpoint.stored import Checkpoint
from surgeon.commands.show import differences, facts
from surgeon.errors import NotProven
from surgeon.exports.export import source_record
from surgeon.findings.card import identity_of, open_edited, trained_how, write_card
from surgeon.language.program import Program
from surgeon.opened import open_model
from tests.checkpoint.helpers import load_shipped, logits_of, relative_error, run_export
from tests.tiny_models import save_checkpoint

RECIPE = 'surgeon: 1\nmodel: tiny\noperations:\n  - tracks: {layers: "1:2", count: 2, depth: 1}\n'
PROGRAM = "A5 F5 {A1/2:0 F1/2:0 | A1/2:1 F1/2:1} [A2 A3~A4] F3~F4 A0 F0 F2"
QUALITY = {
    "perplexity": 3.25,
    "perplexity_interval": (3.0, 3.5),
    "divergence": None,
    "divergence_interval": None,
    "tokens": 4096,
}
SAID: dict[str, Any] = {
    "method": "full fine-tuning of the edited layers",
    "steps": 400,
    "tokens": 1638400,
    "data": "/home/somebody/corpus.txt",
    "data_hash": "c0ffee",
    "held_out": "demo:1",
    "held_out_hash": "decaf",
    "settings": {"learning_rate": 1e-4},
    "original": QUALITY,
    "edited": QUALITY
    | {"perplexity": float("inf"), "divergence": 1.5, "divergence_interval": (1.0, 2.0)},
    "healed": QUALITY | {"perplexity": 3.5, "divergence": 0.25, "divergence_interval": (0.2, 0.3)},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("healed") / "tiny", num_layers=6, dropout=0.0)


def training_on(source: Path, program: str = PROGRAM, **said: Any) -> Training:
    return Training(RECIPE, Program.parse(program), source_record(open_model(source)), SAID | said)


def moved(source: Path, program: str = PROGRAM) -> Any:
    """An edited model of which every parameter was changed."""
    model = surgeon.edit(surgeon.load(source), program)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def healed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed."""
    folder = tmp_path_factory.mktemp("targets") / "healed"
    model = moved(source)
    surgeon.export(model, folder, training=training_on(source))
    assert relative_error(logits_of(load_shipped(folder)), logits_of(model)) < 1e-5
    return folder


def test_the_report_is_of_the_original(healed: Path, source: Path) -> None:
    report = json.loads((healed / "surgeon.json").read_text())
    assert report["program"] == PROGRAM
    assert (report["effective_depth"], report["recipe"]) == (4.5, RECIPE)
    assert report["source"] == source_record(open_model(source))
    assert report["source"]["num_layers"] == 6
    assert report["trained"]["edited"]["perplexity"] is None  # JSON has no infinity
    assert report["trained"]["steps"] == 400
    found = describe(healed)
    assert (found.original, found.num_layers, str(found.program)) == ("tiny", 6, PROGRAM)
    # In memory the track's layer and the merged one lie behind the others.
    assert found.sources == [(0,), (2,), (5,), (1,), (3, 4)]


def test_the_card_says_that_it_was_trained(healed: Path) -> None:
    text = " ".join((healed / "README.md").read_text().split())
    assert "without further training" not in text
    assert (
        "then trained further (healed): 400 steps, 1,638,400 tokens of corpus.txt (SHA-256 `c0ffee`), full fine-tuning "
        "of the edited layers." in text
    )
    assert "| | healed | before training | unedited | | :-- | --: | --: | --: | " in text
    assert "| perplexity | 3.5 (3 to 3.5) | | 3.25 (3 to 3.5) |" in text
    assert "nats per token | 0.25 (0.2 to 0.3) | 1.5 (1 to 2) | |" in text
    assert "On 4,096 tokens of demo:1 (SHA-256 `decaf`) that were not trained on" in text
    assert "does not hold for them" in text
    assert "So what is measured of the original" not in text
    assert "`tracks: {" in text  # the recipe's operation


def test_a_second_training_is_told_behind_the_first(source: Path) -> None:
    first = training_on(source).training
    said = trained_how(training_on(source, earlier=first | {"steps": 7, "method": "the norms"}).training)
    assert said.startswith("then trained further (healed): 7 steps, 1,638,400 tokens of corpus.txt")
    assert "the norms; then again: 400 steps, 1,638,400 tokens" in said
    with pytest.raises(
        ValueError, match="the training needs earlier to be the record of another training"
    ):
        training_on(source, earlier={"steps": 7})


def test_measurements_of_the_original_under_the_program_are_refused(healed: Path, source: Path) -> None:
    identity = identity_of(open_edited(healed))
    original = Checkpoint(source).model_hash()
    with pytest.raises(ValueError, match="healed was trained since; measure it itself"):
        identity.is_edited(Path("x"), original, Program.parse(PROGRAM))
    assert not identity.is_edited(Path("x"), original, Program.dense(6))
    assert identity.is_edited(
        Path("x"), Checkpoint(healed).model_hash(), surgeon.program_of(surgeon.load(healed))
    )


def test_it_is_shown_and_compared(healed: Path, source: Path, tmp_path: Path) -> None:
    said = dict(facts(describe(healed)))
    assert said["name"].endswith(
        f"tiny in program form, by surgeon {surgeon.__version__}, trained since"
    )
    assert (
        said["trained"]
        == "400 steps on 1,638,400 tokens of corpus.txt, full fine-tuning of the edited layers"
    )
    assert "those of the trained weights" in said["proof"]
    run_export(source, tmp_path / "untrained", PROGRAM)
    untrained = describe(tmp_path / "untrained")
    found = compare(untrained, describe(healed))
    # What lies in another place is still the same layer's: only values differ.
    assert not found.only_a
    assert not found.only_b
    assert found.different
    labels = [label for label, _ in differences(untrained, describe(healed))]
    assert labels.count("trained") == 1
    assert "program" not in labels
    assert compare(describe(healed), describe(healed)).is_equal


def test_a_card_is_written_again(healed: Path) -> None:
    before = (healed / "README.md").read_text()
    write_card(healed, "healed")
    assert (healed / "README.md").read_text() == before


@pytest.mark.parametrize(
    ("recipe", "stored", "difference"),
    [
        ("A0 F0 A1 F1", "A0 F0 A1", "it has 3 steps or forks where that has 4"),
        ("A0 >F0", "A0 F0", "where that has >F0, it has F0"),
        ("A0 [F0 F1]", "A0 F0", r"where that has \[F0 F1\], it has F0"),
        ("A0 {F0 | F1}", "A0 [F0 F1]", r"where that has {F0 \| F1}, it has"),
        ("A0/2:0 F0", "A0/2:1 F0", "where that has A0/2:0, it has A0/2:1"),
        ("A0@q5 F0", "A0@q6 F0", "where that has A0@q5, it has A0@q6"),
        (
            "[A0/2:0 A0/2:1]",
            "[A0/2:0 A1/2:1]",
            "where that has A0/2:1, it has A1/2:1, which stands for another",
        ),
        ("A0 F0 A1", "A0 F0 A0", "where that has A1, it has A0, which stands for another"),
    ],
)
def test_another_program_than_the_recipes_is_refused(recipe: str, stored: str, difference: str) -> None:
    with pytest.raises(NotProven, match=f"does not run the recipe's program: .*{difference}"):
        layers_by_recipe(Program.parse(recipe), Program.parse(stored))


def test_the_recipes_program_under_other_numbers() -> None:
    recipe = Program.parse("A2 F2 [A5~A6 A4 F4] {A1/2:0 | A1/2:1} A1/4:1 A2 A2")
    stored = Program.parse("A0 F0 [A1 F1 A7] {A2/2:0 | A2/2:1} A3/4:1 A0 A8")
    attentions = {0: (2,), 1: (5, 6), 7: (4,), 2: (1,), 3: (1,), 8: (2,)}  # one of them is stored twice
    expected = {("A", place): layers for place, layers in attentions.items()} | {
        ("F", 0): (2,),
        ("F", 1): (4,),
    }
    assert layers_by_recipe(recipe, stored) == expected


def test_nothing_is_written_of_another_program(source: Path, tmp_path: Path) -> None:
    model = moved(source, "A0 F0 A2 F2")
    with pytest.raises(NotProven, match="it has 4 steps or forks where that has 12"):
        surgeon.export(model, tmp_path / "target", training=training_on(source, str(Program.dense(6))))
    assert not list(tmp_path.iterdir())


def test_records_that_lack_something(source: Path, healed: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the training needs steps, a whole number, and has '400'"):
        training_on(source, steps="400")
    with pytest.raises(ValueError, match="the training needs healed with its perplexity"):
        training_on(source, healed={"perplexity": "low"})
    with pytest.raises(ValueError, match="the source needs model_hash, a text, and has None"):
        replace(training_on(source), source={"model": "tiny", "num_layers": 6, "parameters": 1})
    report = json.loads((healed / "surgeon.json").read_text())
    for name, wrong in {"trained": {"steps": 1}, "stored_layers": [[9]]}.items():
        folder = save_checkpoint(tmp_path / name, num_layers=1)
        (folder / "surgeon.json").write_text(json.dumps(report | {name: wrong}))
        with pytest.raises(ValueError, match=f"is not what surgeon export writes: it has {name}"):
            describe(folder)
