"""`surgeon sensitivity` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from surgeon.commands.app import main
from tests.tiny_models import save_checkpoint


def test_table_picture_and_correlations(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    command = ["sensitivity", str(tiny_checkpoint), "--data", str(tiny_text), "-o", str(folder)]
    command += ["--window", "16", "--tokens", "64", "--windows-for-jacobians", "2", "--seed", "3"]
    assert main(command) == 0
    captured = capsys.readouterr()
    names = {path.name for path in folder.iterdir()}
    assert names == {"sensitivity.csv", "sensitivity.json", "sensitivity.jsonl", "sensitivity.png"}
    table = pd.read_csv(folder / "sensitivity.csv")
    assert table[["first", "last"]].to_numpy().tolist() == [[0, 1], [1, 2], [2, 3]]
    record = json.loads((folder / "sensitivity.json").read_text())
    assert (record["seed"], record["jacobian_windows"], record["iterations"]) == (3, [0, 3], 100)
    rho = next(
        c["rho"]
        for c in record["correlations"]
        if (c["predictor"], c["damage"]) == ("bound", "divergence")
    )
    (line,) = [line for line in captured.out.splitlines() if line.startswith("bound (equation 12)")]
    assert f"{rho:.3f}" in line
    assert "below the paper's bound in 6 of 6 measurements" in captured.out.replace("\n", " ")
    printed = [line for line in captured.out.splitlines() if str(tmp_path) not in line]
    assert max(map(len, printed)) <= 80
    assert "jacobians: done" in captured.err

    assert main(command) == 0  # nothing is left to do, and all is said again
    assert capsys.readouterr().out == captured.out
    assert main([*command, "--seed", "4"]) == 1
    assert "another seed: 3, now 4" in capsys.readouterr().err


def test_too_few_iterations_are_said(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "sensitivity",
        str(tiny_checkpoint),
        "--data",
        str(tiny_text),
        "-o",
        str(tmp_path / "out"),
    ]
    assert main([*command, "--window", "16", "--tokens", "16", "--iterations", "2"]) == 0
    assert "warning: 2 iterations were too few for pairs 0-1, 1-2, 2-3" in capsys.readouterr().err
    assert not pd.read_csv(tmp_path / "out" / "sensitivity.csv")["converged"].any()


def test_layers_of_one_step(tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_checkpoint(tmp_path / "model", "gpt_neox", num_layers=3)
    command = [str(model), "--data", str(tiny_text), "--window", "16", "--tokens", "32"]
    for name, more in (("sensitivity", ["--iterations", "4"]), ("similarity", [])):
        assert main([name, *command, *more, "-o", str(tmp_path / name)]) == 0, capsys.readouterr().err
    table = pd.read_csv(tmp_path / "sensitivity" / "sensitivity.csv")
    assert (table["mlp_shift"] == 0).all()
    assert (table["next_mlp_shift"] > 0).all()
