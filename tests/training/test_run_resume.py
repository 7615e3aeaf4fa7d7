"""Runs that are killed, that meet another one in their folder, that are finished."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from surgeon.training.checkpoints import checkpoints_of, fault_of, write_manifest
from surgeon.training.run import finish_run, lock_run, open_run, run_folder
from tests.training.runs import record, run, same, student, tables, weights
from tests.waiting import PATIENCE
from tests.warm import Popen

KILLED = "import sys; from tests.training.killed import main; main(*sys.argv[1:])"


@pytest.mark.thorough
def test_a_run_killed_anywhere_ends_as_one_that_is_not(tmp_path: Path) -> None:
    """Weights bit for bit, tables, files: all weights, adapters, early stop, with dropout, files torn."""
    process = Popen(
        [sys.executable, "-c", KILLED, tmp_path, "2", "1"], stdout=subprocess.PIPE, cwd=Path.cwd()
    )
    found = [json.loads(line) for line in process.communicate(timeout=PATIENCE)[0].splitlines()]
    assert [each["name"] for each in found] == ["all", "adapters", "patience"]
    assert not any(each["different"] for each in found)
    assert all(each["ended"][-1] == 0 for each in found)
    assert sum(each["ended"].count(-9) for each in found) >= 4
    assert sum(each["begun"] for each in found) >= 3  # processes that went on from a checkpoint


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "healed")
    with (
        lock_run(folder, "cpu"),
        pytest.raises(OSError, match=r"another run is writing to .*healed\.run; wait for it"),
    ):
        run(folder)
    run(folder, steps=1)


def test_what_was_half_written_or_half_removed_goes(tmp_path: Path) -> None:
    identity = {"settings": 1}
    assert open_run(tmp_path, identity) is None
    for name in (".saving/checkpoint-8", ".removing-checkpoint-2", "checkpoint-4", "teacher"):
        (tmp_path / name).mkdir(parents=True)
    for name in (".training.csv.77.part", ".lock"):
        (tmp_path / name).write_text("{}")
    write_manifest(tmp_path / "checkpoint-4")
    assert open_run(tmp_path, identity) == tmp_path / "checkpoint-4"
    assert {path.name for path in tmp_path.iterdir()} == {
        "run.json",
        "checkpoint-4",
        "teacher",
        ".lock",
    }


def test_a_checkpoint_that_is_not_whole_is_passed_over(tmp_path: Path) -> None:
    """Tables that are gone are those of the checkpoint."""
    whole = run(tmp_path / "a", student(0.2), save_every=2)
    run(tmp_path / "b", student(0.2), save_every=2)
    folder = tmp_path / "b"
    (folder / "checkpoint-4" / "optimizer.pt").unlink()
    for name in ("training.csv", "held_out.csv"):
        (folder / name).unlink()
    with pytest.warns(
        UserWarning, match=r"checkpoint-4: optimizer\.pt is missing; the run goes on from checkpoint-2"
    ):
        again = run(folder, student(0.2), save_every=2)
    assert same(weights(whole), weights(again))
    assert all(
        tables(tmp_path / "a")[name].equals(tables(folder)[name]) for name in ("training", "held_out")
    )
    assert list(checkpoints_of(folder)) == [2, 4]
    assert fault_of(folder / "checkpoint-4") is None


def test_a_folder_that_does_not_say_whose_it_is_is_refused(tmp_path: Path) -> None:
    run(tmp_path, steps=1)
    said = (tmp_path / "run.json").read_text()
    (tmp_path / "run.json").write_text(said[:100])
    with pytest.raises(
        ValueError, match=r"run\.json is not valid JSON: .*; remove .* to begin the run again"
    ):
        run(tmp_path, steps=1)
    (tmp_path / "run.json").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"has no run\.json, which says of what run it is; remove"
    ):
        run(tmp_path, steps=1)


def test_a_finished_run_keeps_its_record_and_its_tables(tmp_path: Path) -> None:
    found = run(tmp_path)
    finish_run(tmp_path, {"steps": found.steps, "healed": found.after.to_json()})
    finish_run(tmp_path, {"steps": found.steps})
    said = record(tmp_path)
    assert said["steps"] == 4
    assert said["healed"]["perplexity"] == found.after.perplexity
    assert said["before"] == json.loads(json.dumps(found.before.to_json()))
    assert said["identity"]["settings"]["batch"] == 4
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"run.json", "training.csv", "held_out.csv", "tensorboard"}


@pytest.mark.parametrize(
    ("family", "program", "settings"),
    [
        ("gpt2", "[A0 A1] [F0 F1]", {"lora": 2}),
        ("llama", "{A0/2:0 F0/2:0 A1/2:0 F1/2:0 | A0/2:1 F0/2:1 A1/2:1 F1/2:1}", {}),
        ("gpt2", "A0~A1 F0~F1", {"scope": "edited"}),
        ("llama", "A0#1 F0#20 A1 F1", {"scope": "edited"}),
    ],
)
def test_a_run_goes_on_whatever_is_trained(
    tmp_path: Path, family: str, program: str, settings: dict[str, object]
) -> None:
    whole = run(tmp_path / "a", student(0.2, family, program), steps=3, **settings)
    run(tmp_path / "b", student(0.2, family, program), steps=3, **settings)
    shutil.rmtree(tmp_path / "b" / "checkpoint-3")
    again = run(tmp_path / "b", student(0.2, family, program), steps=3, **settings)
    assert same(weights(whole), weights(again))
    assert all(
        tables(tmp_path / "a")[name].equals(tables(tmp_path / "b")[name])
        for name in ("training", "held_out")
    )
