"""`surgeon search` from the command line: what it writes, that it goes on where it was, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from surgeon.cli.app import main
from surgeon.program import Program
from surgeon.recipe import read_recipe

SIZES = ["--tokens", "256", "--window", "64", "--trials", "6"]


def search(model: Path, text: Path, output: Path, *more: str) -> int:
    return main(["search", str(model), "--budget", "depth=3", "--data", str(text), "-o", str(output), *SIZES, *more])


def test_results_and_resumption(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "search"
    assert search(tiny_checkpoint, tiny_text, output) == 0
    said = capsys.readouterr().out
    assert "depth       3 of 4 layers" in said
    recipe = read_recipe(output / "recipe.yaml")
    program = recipe.program(4)
    assert program.effective_depth() == 3
    assert str(program) in said
    assert Path(recipe.model) == tiny_checkpoint
    table = pd.read_csv(output / "trials.csv")
    assert len(table) == 6
    assert (table["depth"] == 3).all()
    assert ((table["divergence_low"] <= table["divergence"]) & (table["divergence"] <= table["divergence_high"])).all()
    best = table.loc[table["divergence"].idxmin()]
    assert Program.parse(best["program"]) == program
    record = json.loads((output / "search.json").read_text())
    assert record["best"]["program"] == str(program)
    assert {"model", "weights_hash", "data_hash", "seed", "versions", "command"} <= record.keys()
    assert (output / "quality-against-depth.png").stat().st_size > 10_000
    before = (output / "trials.csv").read_bytes()
    assert search(tiny_checkpoint, tiny_text, output) == 0
    assert (output / "trials.csv").read_bytes() == before


def test_another_search_in_the_same_folder_is_refused(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert search(tiny_checkpoint, tiny_text, tmp_path / "search") == 0
    before = (tmp_path / "search" / "recipe.yaml").read_text()
    assert search(tiny_checkpoint, tiny_text, tmp_path / "search", "--seed", "7") == 1
    assert "holds a search with another seed (0, not 7)" in capsys.readouterr().err
    assert (tmp_path / "search" / "recipe.yaml").read_text() == before


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ("depth=0", "error: budget depth=0 should be a whole number of layers, at least 1\n"),
        ("depth=40", "error: budget depth=40 is more than the model's 4 layers; use at most 4\n"),
        ("depth=1", "error: budget depth=1 is out of reach: pairs bring 4 layers to 2 at the least\n"),
        ("dpeth=3", "error: unknown budget 'dpeth'; did you mean 'depth'?\n"),
    ],
)
def test_budgets_that_make_no_sense(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], budget: str, said: str
) -> None:
    output = tmp_path / "search"
    code = main(
        ["search", str(tiny_checkpoint), "--budget", budget, "--data", str(tiny_text), "-o", str(output), *SIZES]
    )
    assert code == 1
    assert capsys.readouterr().err.endswith(said)
    assert not output.exists()
