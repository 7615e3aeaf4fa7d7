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


def test_a_step_of_a_training(surgeon_says: Run) -> None:
    folder = Path(__file__).resolve().parents[2] / "recipes" / "train" / "papers"
    asked = ("--hardware", "h100-sxm", "--tokenizer", "demo", "--devices")
    code, said, _ = surgeon_says("predict", folder / "racks-1b.yaml", *asked, "8,64")
    eight, sixty_four = (line.split() for line in said.splitlines()[-2:])
    assert (code, eight[:2], sixty_four[:2]) == (0, ["8", "fsdp"], ["64", "fsdp"])
    assert 1 < float(eight[2]) / float(sixty_four[2]) < 9
    code, _, error = surgeon_says("predict", folder / "racks-1b.yaml", *asked, "6")
    assert (code, "6 devices do not divide among 4 racks; take a multiple of 4" in error) == (1, True)
    code, _, error = surgeon_says("predict", folder / "racks-1b.yaml", *asked, "many")
    assert (code, "--devices 'many' is no whole number from 1; write numbers such as 1,8" in error) == (1, True)
    code, _, error = surgeon_says("predict", folder / "racks-1b.yaml", *asked[:-1])
    assert (code, "--tokenizer is for --devices; give --devices, too" in error) == (1, True)
