"""What a notebook calls: models that are opened without their weights, and passes with a result that has a type."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

import surgeon
from surgeon.cli.app import main

TEXT = {"tokens": 128, "window": 32}
ARGUMENTS = ["--tokens", "128", "--window", "32"]


def test_a_model_is_opened_without_its_weights(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surgeon.checkpoint.read.Checkpoint.tensor", lambda *_: pytest.fail("weights were read"))
    model = surgeon.open(tiny_checkpoint)
    assert (model.num_layers, model.family.name, str(model.form)) == (4, "Llama", "plain")
    assert str(model.program) == "A0 F0 A1 F1 A2 F2 A3 F3"
    assert (model.own, model.label, model.public_name) == (None, tiny_checkpoint.name, tiny_checkpoint.name)
    assert repr(model) == f"<surgeon.Model {tiny_checkpoint}: Llama, 4 layers, plain form>"
    assert surgeon.open("demo").label == "demo"


def test_a_recipe_and_a_program_are_no_models(tmp_path: Path) -> None:
    for text, what in ((str(tmp_path / "a.yaml"), "a recipe"), ("A0 F0 [A1 A2]", "a program")):
        with pytest.raises(ValueError, match=f"is {what}, which is applied to a model"):
            surgeon.open(text)


def test_a_scan_is_what_its_command_writes(tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path) -> None:
    model = surgeon.open(tiny_checkpoint)
    found = surgeon.scan(model, tiny_text, tmp_path / "ours", operations=["prune"], layers="1:4", **TEXT)
    command = ["scan", str(tiny_checkpoint), "--data", str(tiny_text), "--operation", "prune", "--layers", "1:4"]
    assert main([*command, *ARGUMENTS, "-o", str(tmp_path / "theirs")]) == 0
    assert (tmp_path / "ours/cells.csv").read_bytes() == (tmp_path / "theirs/cells.csv").read_bytes()
    assert list(found.table["operation"].unique()) == ["prune"]
    assert len(found.table) == 6
    assert [path.name for path in found.files] == ["cells.csv", "heatmap-prune.png"]


def test_a_pass_goes_on_from_another(tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path) -> None:
    surgeon.scan(tiny_checkpoint, tiny_text, tmp_path / "scan", operations=["prune"], **TEXT)
    found = surgeon.similarity(tiny_checkpoint, tiny_text, tmp_path / "alike", scan=tmp_path / "scan", **TEXT)
    assert isinstance(found.proxies, pd.DataFrame)
    assert all(path.is_file() for path in found.files)
    with pytest.raises(ValueError, match="--sensitivity is used with --scan only"):
        surgeon.similarity(tiny_checkpoint, tiny_text, tmp_path / "x", sensitivity=tmp_path / "none")


def test_an_evaluation_of_a_program_is_against_the_model_itself(
    tiny_checkpoint: Path, tiny_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = surgeon.evaluate(tiny_checkpoint, tiny_text, program="A0 F0 [A1 A2] [F1 F2] A3 F3", **TEXT)
    assert found.text is not None
    assert found.text.divergence is not None
    assert found.tasks is None
    capsys.readouterr()
    command = ["eval", str(tiny_checkpoint), "--data", str(tiny_text), "--program", "A0 F0 [A1 A2] [F1 F2] A3 F3"]
    assert main([*command, *ARGUMENTS]) == 0
    assert capsys.readouterr().out == f"{found}\n"


def test_texts_are_those_of_the_command(tiny_checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prompts, events = ["The quick brown fox", "went on sleeping:"], list[tuple[str, str]]()
    found = surgeon.generate(
        surgeon.open(tiny_checkpoint),
        prompts,
        max_new_tokens=6,
        ranks=2,
        on_event=lambda text, event: events.append((text.prompt, event.text)),
    )
    command = [word for prompt in prompts for word in ("--prompt", prompt)]
    assert main(["generate", str(tiny_checkpoint), *command, "--max-new-tokens", "6", "--tp", "2"]) == 0
    out, err = capfd.readouterr()
    assert out == "\n".join(
        f"==> {number} of 2: {text.prompt} <==\n{text.text}\n" for number, text in enumerate(found.texts, start=1)
    )
    assert str(found).splitlines()[0] == err.splitlines()[0] == "ranks    2 (cpu, shm, float32)"
    for text in found.texts:
        assert "".join(piece for prompt, piece in events if prompt == text.prompt) == text.text
        assert text.usage.new == len(text.tokens)


def test_a_prompt_that_is_none_is_named(tiny_checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="prompt 2: the prompt is not text"):
        surgeon.generate(tiny_checkpoint, ["the fox", "\udcff"])
    with pytest.raises(ValueError, match="second: the prompt is not text"):
        surgeon.generate(tiny_checkpoint, {"first": "the fox", "second": "\udcff"})
