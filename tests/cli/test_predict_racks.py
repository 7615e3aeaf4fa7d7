"""`surgeon predict --racks` from the command line."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Run

RACKS = ("--hardware", "h100-sxm", "--racks")


def test_both_ways_are_told(tiny_checkpoint: Path, surgeon_says: Run) -> None:
    code, said, _ = surgeon_says("predict", tiny_checkpoint, *RACKS, "4", "--tokens", "1000", "--coda", "0")
    assert code == 0
    pipeline, local = (line.split() for line in said.splitlines() if line.startswith(("pipeline", "local")))
    assert (pipeline[2], local[-2:], pipeline[-1]) == ("1.00", ["0", "1"], "4")
    assert pipeline[-3] == pipeline[-2] == local[-3]  # as much forward as back, and forward in both ways


def test_layers_have_to_divide(tiny_checkpoint: Path, surgeon_says: Run) -> None:
    code, _, error = surgeon_says("predict", tiny_checkpoint, *RACKS, "3")
    assert code == 1
    assert "4 layers do not divide into 3 racks" in error
