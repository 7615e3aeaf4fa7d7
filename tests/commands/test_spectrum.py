"""`surgeon spectrum` as a user meets it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

from surgeon.analysis.subject import load_recorded
from surgeon.checkpoint.config import open_stored
from surgeon.language.program import Program
from surgeon.language.recipe import read_recipe
from surgeon.models.families.llama import LLAMA
from surgeon.opened import open_model
from tests.commands.conftest import Run


@pytest.fixture
def spectrum(on_tiny_text: Run) -> Run:
    """Runs the command, with more arguments."""
    return partial(
        on_tiny_text, "spectrum", "--window", "32", "--tokens", "128", "--calibration-tokens", "320"
    )


def test_everything(spectrum: Run, tmp_path: Path) -> None:
    code, out, err = spectrum("--ranks", "1/4,3", "--keep", "0.5")
    assert code == 0, err
    folder = tmp_path / "out"
    tables = {"spectrum.csv", "singular_values.csv", "damage.csv", "spectrum.json"}
    pictures = {"damage.png", "rank95.png", "singular-values-plain.png", "singular-values-whitened.png"}
    assert {path.name for path in folder.iterdir()} == tables | pictures | {
        "journal.jsonl",
        "recipe.yaml",
    }
    named = [Path(line).name for line in out.splitlines() if line.startswith(str(folder))]
    assert len(named) == 9
    assert set(named) == tables | pictures | {"recipe.yaml"}
    assert all(len(line.rstrip()) <= 80 for line in out.splitlines() if not line.startswith("/"))
    assert len(pd.read_csv(folder / "spectrum.csv")) == 4 * 7
    assert len(pd.read_csv(folder / "damage.csv")) == 4 * 7 * 2
    record = json.loads((folder / "spectrum.json").read_text())
    assert (record["tokens"], record["calibration_tokens"], record["method"]) == (128, 320, "whitened")
    assert record["calibration_hash"] != record["data_hash"]
    assert f"base perplexity {record['base_perplexity']:.4g} over 124 predicted tokens" in out
    assert "spectrum: done" in err
    recipe = read_recipe(folder / "recipe.yaml")
    (lowrank,) = recipe.operations
    assert (lowrank.name, lowrank.layers, lowrank.parameters["method"]) == (
        "lowrank",
        (range(4),),
        "whitened",
    )
    text = lowrank.parameters["calibration"]
    assert (text["tokens"], text["after"], text["window"]) == (320, 128, 32)
    assert text["hash"] == f"sha256:{record['calibration_hash']}"
    again = load_recorded(open_model(recipe.model), text)
    assert again.digest == record["calibration_hash"]
    assert recipe.weights == record["model_hash"]
    shapes = LLAMA.layer_shapes(open_stored(recipe.model).config)
    program = recipe.program(4, shapes=shapes)
    assert 0.45 < program.parameters(shapes) / Program.dense(4).parameters(shapes) <= 0.5


def test_a_budget_on_the_wire(spectrum: Run, tmp_path: Path) -> None:
    arguments = (
        "--no-damage",
        "--weights",
        "o,down",
        "--allocation",
        "energy",
        "--budget",
        "wire_bytes=1KB",
    )
    code, _, err = spectrum(*arguments)
    assert code == 0, err
    ranks = read_recipe(tmp_path / "out" / "recipe.yaml").operations[0].parameters["ranks"]
    by_layer = [given if isinstance(given, list) else [given] * 4 for given in ranks.values()]
    values = [rank if rank is not None else 32 for given in by_layer for rank in given]
    assert (list(ranks), len(values)) == (["o", "down"], 8)
    assert 0.9 * 1024 < 2 * 4 * sum(values) <= 1024  # float32, and a reduced value is sent twice


def test_some_matrices_without_damage(spectrum: Run, tmp_path: Path) -> None:
    code, out, err = spectrum(
        "--no-damage", "--layers", "1:3", "--weights", "down,q", "--calibration-tokens", "32"
    )
    assert code == 0, err
    assert "divergence" not in out
    table = pd.read_csv(tmp_path / "out" / "spectrum.csv")
    assert table[["layer", "weight"]].to_numpy().tolist() == [
        [1, "q"],
        [1, "down"],
        [2, "q"],
        [2, "down"],
    ]
    assert not (tmp_path / "out" / "damage.csv").exists()
    assert (
        "warning: the calibration text does not reach all inputs of 2 of 4 matrices (of down of layer 1 32 direc"
        in (err)
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--weights", "q,gat"), "Llama has no weight 'gat'; did you mean 'gate'?"),
        (("--keep", "0"), "keep must be more than 0 and at most 1, not 0"),
        (("--keep", "0.5", "--no-damage"), "allocation by damage goes by what is left out"),
        (("--keep", "0.5", "--budget", "params=9"), "keep 0.5 is the same as the budget params=0.5x; give one of them"),
        (("--budget", "wires_byte=9"), "there is no budget on 'wires_byte'; did you mean 'wire_bytes'?"),
        (("--layers", "2:5"), "layers 2:5 are out of range: the model's layers are 0:4"),
        (("--layers", "4"), "write \"4:30\" for layers 4 to 29"),
        (("--ranks", "1/2,0"), "rank 0 must be more than 0"),
        (("--ranks", "20"), "rank 20 is above the full rank 16 of k of layer 0"),
        (("--ranks", "some"), "'some' is no rank"),
        (("--calibration-tokens", "8"), "at least one window of 32, not 8"),
        (("--calibration", "nothing.txt"), "no file nothing.txt"),
    ],
)  # fmt: skip
def test_bad_options(spectrum: Run, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = spectrum(*arguments)
    assert (code, out) == (1, "")
    assert message in err
    assert sum("error" in line or "Traceback" in line for line in err.splitlines()) == 1
    assert not (tmp_path / "out" / "spectrum.csv").exists()


def test_of_a_short_text_a_tenth_is_left_to_calibrate_on(spectrum: Run, tmp_path: Path) -> None:
    code, _, err = spectrum("--no-damage", "--weights", "q", "--tokens", "100000")
    assert code == 0
    record = json.loads((next(tmp_path.rglob("spectrum.json"))).read_text())
    measured = record["tokens"] // 32
    left = next(rest for rest in range(1, measured) if rest == (measured + rest) // 10)
    assert f"are used of the 100,000 asked for, and the last {left * 32:,} are held out" in err
    assert record["calibration_tokens"] == 320  # of them


def test_a_folder_of_another_text(spectrum: Run) -> None:
    assert spectrum("--no-damage", "--weights", "q")[0] == 0
    code, _, err = spectrum("--no-damage", "--weights", "q", "--tokens", "96")
    assert code == 1
    assert "holds a spectrum of another text (hash of its tokens)" in err
