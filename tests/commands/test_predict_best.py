"""`surgeon predict --best` from the command line."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.commands.conftest import Run

BEST = ("--hardware", "h100-sxm", "--best", "--prompt", "16", "--new", "8", "--layers", "0:4")


def test_winners_are_printed_and_written(tiny_checkpoint: Path, surgeon_says: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    load = ("--sweep", "ranks=1..2,batch=1", "--link", "nvlink", "--allow", "ladder,tracks:4")
    code, said, _ = surgeon_says("predict", tiny_checkpoint, *BEST, *load, "-o", out)
    assert code == 0
    assert "Fastest, and times as fast as the dense model" in said
    assert "The batches at which a program pays" in said
    assert {path.name for path in out.iterdir()} == {"best.csv", "best.json"}
    with (out / "best.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["link"], row["ranks"]) for row in rows] == [("nvlink", "1"), ("nvlink", "2")]
    assert float(rows[1]["ladder_speedup"]) > 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--by", "tokn"), "there is no measure 'tokn' to be fastest by; did you mean 'token'?"),
        (("--allow", "laddr"), "there is no program 'laddr' to choose; did you mean 'ladder'?"),
        (("--depth", "99"), "from 1 to"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    tiny_checkpoint: Path, surgeon_says: Run, options: tuple[str, ...], said: str
) -> None:
    code, _, error = surgeon_says("predict", tiny_checkpoint, *BEST, *options)
    assert code == 1
    assert said in error


def test_a_budget_is_for_best(tiny_checkpoint: Path, surgeon_says: Run) -> None:
    code, _, error = surgeon_says("predict", tiny_checkpoint, "--hardware", "h100-sxm", "--keep", "0.5")
    assert code == 1
    assert "--keep is for --best; give --best, too" in error
