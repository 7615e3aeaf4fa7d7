"""`surgeon calibrate` from the command line: the file it writes, and what it refuses before it measures anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from surgeon.commands.app import main
from surgeon.cost.calibrate import MachineCalibration
from surgeon.cost.hardware import load_hardware


def test_a_file_is_written_that_predictions_read(
    tiny_checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "here.yaml"
    assert (
        main(["calibrate", str(tiny_checkpoint), "-o", str(output), "--ranks", "1", "--rounds", "1"])
        == 0
    )
    captured = capfd.readouterr()
    assert captured.out == f"{output}\n"
    assert "calibrate: done" in captured.err
    hardware = load_hardware(output)
    assert hardware.name == "here"
    assert hardware.note == "measured at the shapes of tiny-llama"
    assert not hardware.sharing
    assert output.read_text().startswith("# Measured by `")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["here.yaml"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ranks", "2"], "ranks 2: name each number once, and 1 among them, as in 1,2,4"),
        (
            ["-o", "{folder}/here.txt"],
            "{folder}/here.txt must end in .yaml, by which hardware files are known",
        ),
        (
            ["-o", "{folder}/there.yaml"],
            "{folder}/there.yaml is there already; remove it, or write another file",
        ),
        (["-o", "{folder}/nowhere/here.yaml"], "{folder}/nowhere/here.yaml: No such file or directory"),
        (["--ranks", "1,100"], "100 ranks cannot share this model"),
        (["--device", "cuda"], "ranks need a GPU each"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    options: list[str],
    said: str,
    tiny_checkpoint: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measure(*_: object) -> None:
        raise AssertionError("measuring has begun")

    monkeypatch.setattr(MachineCalibration, "measure", measure)
    (tmp_path / "there.yaml").write_text("kept\n")
    given = [option.format(folder=tmp_path) for option in options]
    output = [] if "-o" in given else ["-o", str(tmp_path / "here.yaml")]
    assert main(["calibrate", str(tiny_checkpoint), *given, *output]) == 1
    error = capfd.readouterr().err
    assert error.startswith("error: ")
    assert said.format(folder=tmp_path) in error
    assert (tmp_path / "there.yaml").read_text() == "kept\n"
    assert not (tmp_path / "here.yaml").exists()


def test_an_interrupted_calibration_leaves_nothing(
    tiny_checkpoint: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measure(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(MachineCalibration, "measure", measure)
    folder = tmp_path / "results"
    folder.mkdir()
    assert main(["calibrate", str(tiny_checkpoint), "-o", str(folder / "here.yaml")]) == 130
    assert "interrupted; nothing was written" in capfd.readouterr().err
    assert not list(folder.iterdir())
