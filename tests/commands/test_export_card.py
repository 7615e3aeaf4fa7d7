"""`surgeon card`, and `surgeon export --results`, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surgeon.checkpoint.stored import Checkpoint
from tests.commands.conftest import Run


@pytest.fixture
def recipe(tmp_path: Path, tiny_checkpoint: Path) -> Path:
    path = tmp_path / "edit.yaml"
    path.write_text(f"surgeon: 1\nmodel: {tiny_checkpoint}\noperations:\n  - prune: {{layers: '1:2'}}\n")
    return path


def write_text_quality(folder: Path, model_hash: str, program: str, perplexity: float) -> Path:
    folder.mkdir()
    numbers = {
        "perplexity": perplexity,
        "perplexity_interval": None,
        "divergence": None,
        "divergence_interval": None,
    }
    record = {
        "model_hash": model_hash,
        "program": program,
        "data": "demo",
        "data_hash": "d",
        "tokens": 100,
    }
    (folder / "text.json").write_text(json.dumps(record | numbers))
    return folder


def test_results_at_export_and_afterwards(
    surgeon_says: Run, recipe: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    source = Checkpoint(tiny_checkpoint).model_hash()
    before = write_text_quality(tmp_path / "before", source, "A0 F0 A1 F1 A2 F2 A3 F3", 3.5)
    found = write_text_quality(tmp_path / "found", source, "A0 F0 A2 F2 A3 F3", 4.5)
    other = write_text_quality(tmp_path / "other", "0" * 64, "A0 F0", 4.5)
    target = tmp_path / "edited"
    code, _, err = surgeon_says("export", recipe, "-o", target, "--results", other)
    assert (code, err.count("\n"), target.exists()) == (1, 1, False)
    assert "was measured on another model (sha256:000000000000...)" in err
    assert surgeon_says("export", recipe, "-o", target, "--results", found, "--results", before)[0] == 0
    card = target / "README.md"
    assert "| perplexity (demo, 100 tokens) | 4.5 | 3.5 |" in card.read_text()

    own = write_text_quality(
        tmp_path / "own", Checkpoint(target).model_hash(), "A0 F0 A1 F1 A2 F2", 4.25
    )
    assert surgeon_says("card", target, "--results", own / "text.json") == (0, f"{card}\n", "")
    assert "| perplexity (demo, 100 tokens) | 4.25 |" in card.read_text()
    assert "| 3.5 |" not in card.read_text()
    # The card is none of the files that are verified.
    assert surgeon_says("show", target, "--verify")[0] == 0
    card.write_text(card.read_text() + "My own words.\n")
    code, out, err = surgeon_says("card", target)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "pass --overwrite" in err
    assert surgeon_says("card", target, "--overwrite")[0] == 0
    assert "Quality" not in card.read_text()


def test_a_damaged_card_of_the_base_model_is_a_warning(
    surgeon_says: Run, recipe: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    (tiny_checkpoint / "README.md").write_text("---\nlicense: [\n---\n")
    code, _, err = surgeon_says("export", recipe, "-o", tmp_path / "out")
    assert code == 0
    assert "warning: the base model's card: The front matter of its README.md cannot be read (" in err
    assert "license" not in (tmp_path / "out" / "README.md").read_text().partition("# out")[0]


def test_what_it_refuses(surgeon_says: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    for arguments, said in [
        ((tiny_checkpoint,), "has no surgeon.json; cards are for checkpoints"),
        ((tmp_path / "none",), "there is no model folder"),
        ((tmp_path,), "has no config.json"),
    ]:
        code, out, err = surgeon_says("card", *arguments)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert said in err
    assert not (tiny_checkpoint / "README.md").exists()
