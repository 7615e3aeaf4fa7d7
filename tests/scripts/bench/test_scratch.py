"""The table of small models from scratch, by hand; and that its rows are models of one size."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from scipy import stats

from scripts.bench import scratch
from surgeon.training.scratch.build import blueprint
from surgeon.training.scratch.tracks import count_parameters

LOSSES = {
    ("dense", 0): [3.0, 3.2, 3.4],
    ("dense", 1): [3.1, 3.1, 3.5],
    ("ladder", 0): [3.1, 3.1, 3.6],
    ("ladder", 1): [3.3, 3.2, 3.6],
}


def make_runs(folder: Path) -> None:
    for (row, seed), losses in LOSSES.items():
        path = folder / f"{row}-{seed}.run"
        path.mkdir()
        record = {
            "row": row,
            "seed": seed,
            "trained": {},
            "tokens": 1024,
            "parameters_in": {"layers": 9000, "ends": 77},
        }
        (path / "run.json").write_text(json.dumps(record))
        (path / "windows.csv").write_text("nll\n" + "\n".join(map(str, losses)) + "\n")
    (folder / "tracks-2-1-0.run").mkdir()  # one that has not come to its end
    (folder / "tracks-2-1-0.run" / "run.json").write_text(json.dumps({"identity": {}}))


def test_differences_are_paired_by_window_and_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_runs(tmp_path)
    scratch.main(["-o", str(tmp_path), "--table"])
    _, _, dense, ladder = capsys.readouterr().out.splitlines()
    assert dense.startswith("| dense | 9,000 | 77 | 1,024 | 2 | 3.2167 (")
    assert dense.endswith("| 3.2000 to 3.2333 | 24.94 |  |  |")
    apart = [(0.1 + 0.2) / 2, (-0.1 + 0.1) / 2, (0.2 + 0.1) / 2]
    low, high = stats.t.interval(0.95, 2, loc=sum(apart) / 3, scale=stats.sem(apart))
    assert f"| +0.1000 ({low:+.4f} to {high:+.4f}) | +0.0667 to +0.1333 |" in ladder


@pytest.mark.parametrize("row", ["dense", "ladder", "tracks-4-8"])
def test_rows_are_of_one_size(row: str) -> None:
    arguments = scratch._parse(["-o", "x"])
    found = blueprint(scratch.ScratchRun(row, 2, 1e-3).config(arguments, "demo"))
    assert count_parameters(found.architecture).layers == pytest.approx(884_736, rel=0.01)
    assert (found.config.settings.seed, found.config.settings.rate) == (2, 1e-3)
    assert found.config.settings.save_every == 150


def test_slices_are_cut_out_of_the_trained_dense_model(tmp_path: Path) -> None:
    arguments = scratch._parse(["-o", "x", "--steps", "500"])
    found = blueprint(scratch.ScratchRun("sliced-2-4", 2, 1e-3).config(arguments, "demo"))
    assert (found.config.settings.steps, found.config.settings.rate) == (100, 2e-4)
    assert str(found.program).startswith("{A0/2:0 F0/2:0 A1/2:0")
    with pytest.raises(
        FileNotFoundError, match=r"no .*dense-0.run/model to cut slices out of; run the row dense first"
    ):
        scratch.main(["-o", str(tmp_path), "--rows", "sliced-2-4", "--seeds", "1", "--steps", "10"])


def test_unknown_rows_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        scratch.main(["-o", "x", "--rows", "dense,lader"])
    assert re.search("'lader' is no row; known: dense, attention-mlp", capsys.readouterr().err)
