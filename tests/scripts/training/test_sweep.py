"""scripts/training/sweep.py: the models of a sweep, and how they are compared."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest

from scripts.training import sweep

CONFIG = """
surgeon: 1
model: {model_type: llama}
training: {steps: 4, batch: 2, learning_rate: 1.0e-3}
sweep:
  programs: {dense: {}, ladder: {operations: [ladder: {layers: "0:2"}]}}
  seeds: [0, 1]
"""


def test_every_program_has_every_seed(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(CONFIG)
    found = list(sweep.configurations(path))
    assert [(program, rate, seed) for program, rate, seed, _ in found] == [
        ("dense", 1e-3, 0),
        ("dense", 1e-3, 1),
        ("ladder", 1e-3, 0),
        ("ladder", 1e-3, 1),
    ]
    keys = found[3][3]
    assert keys["training"] == {"steps": 4, "batch": 2, "learning_rate": 1e-3, "seed": 1}
    assert keys["operations"] == [{"ladder": {"layers": "0:2"}}]
    assert "sweep" not in keys


def test_differences_are_taken_seed_by_seed() -> None:
    losses = {"dense": (3.0, 3.2, 3.4), "ladder": (2.9, 3.3, 3.25), "tracks": (3.5, math.inf, 3.5)}
    runs = pd.DataFrame(
        {"program": program, "learning_rate": 1e-3, "seed": seed, "loss": loss}
        for program, values in losses.items()
        for seed, loss in enumerate(values)
    )
    dense, ladder, tracks = sweep.summarise(runs)[2:]
    # Student's t of two degrees of freedom: 4.3027 deviations of the mean.
    half = 4.302653 * pd.Series([-0.1, 0.1, -0.15]).std() / math.sqrt(3)
    assert dense.endswith("| 3 | 3.2000 (2.7032 to 3.6968) |  |")
    assert ladder.endswith(f"| -0.0500 ({-0.05 - half:+.4f} to {-0.05 + half:+.4f}) |")
    assert tracks == "| tracks | 0.001 | 3 | inf | +inf |"


@pytest.mark.thorough
def test_models_that_are_there_are_not_trained_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sweep.yaml"
    model = "{model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2}"
    text = CONFIG.replace("{model_type: llama}", model)
    path.write_text(
        f"{text}tokenizer: demo\ndata: demo:train\neval_data: demo\neval_tokens: 128\nwindow: 64\n"
    )
    sweep.main([str(path), "-o", str(tmp_path / "out")])
    table = capsys.readouterr().out
    assert "| ladder | 0.001 | 2 |" in table
    before = (tmp_path / "out" / "ladder-lr0.001-seed1" / "config.json").stat().st_mtime_ns
    sweep.main([str(path), "-o", str(tmp_path / "out")])
    assert capsys.readouterr().out.endswith(table[table.index("| program") :])
    assert (tmp_path / "out" / "ladder-lr0.001-seed1" / "config.json").stat().st_mtime_ns == before
