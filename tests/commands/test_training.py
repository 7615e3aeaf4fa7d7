"""What a notebook calls to train: the same as the commands, with a typed result."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import surgeon
from surgeon.commands.app import main
from surgeon.language.operations.applied import AppliedOperation


def test_healing_is_what_its_command_writes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    text = tmp_path / "long.txt"
    text.write_text(" ".join(f"{number} sheep and {number * 7 % 31} dogs" for number in range(150)))
    program, settings = "A0 F0 [A1 A2] [F1 F2] A3 F3", surgeon.TrainSettings(batch=2, steps=2, lora=2)
    recipe = surgeon.Recipe(str(tiny_checkpoint), (AppliedOperation("pair", (range(1, 3),)),))
    found = surgeon.heal(recipe, text, tmp_path / "ours", settings=settings, window=16, eval_tokens=64)
    assert found is not None
    assert (found.files, found.record["steps"], found.record["tokens"]) == ((tmp_path / "ours",), 2, 64)
    assert found.healing.original is not None
    assert found.healing.healed.divergence == pytest.approx(
        found.table()["divergence"].iloc[-1], rel=1e-6
    )
    assert 0 < found.healing.healed.greedy_acceptance <= 1
    assert found.plot().axes
    command = [
        "heal",
        str(tiny_checkpoint),
        "--program",
        program,
        "--data",
        str(text),
        "--lora",
        "2",
        "--batch",
        "2",
    ]
    assert (
        main(
            [
                *command,
                "--steps",
                "2",
                "--window",
                "16",
                "--eval-tokens",
                "64",
                "-o",
                str(tmp_path / "theirs"),
            ]
        )
        == 0
    )
    written = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("ours", "theirs")]
    assert written[0] == written[1]


def test_a_model_from_scratch(tiny_checkpoint: Path, tmp_path: Path) -> None:
    text, config = tmp_path / "long.txt", tmp_path / "config.yaml"
    text.write_text(" ".join(f"{number} sheep and {number * 7 % 31} dogs" for number in range(150)))
    config.write_text(
        "surgeon: 1\nmodel: {model_type: llama, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, "
        f"num_attention_heads: 4}}\ntokenizer: {tiny_checkpoint}\ndata: {text}\neval_tokens: 64\nwindow: 16\n"
        "training: {steps: 9, batch: 2}\n"
    )
    found = surgeon.train(config, tmp_path / "new", steps=2, arguments={"weight_decay": 0.1})
    assert found is not None
    assert (found.record["steps"], list(found.table()["step"])) == (2, [0, 2])
    assert surgeon.open(found.files[0]).num_layers == 2
    keys = yaml.safe_load(config.read_text())
    again = surgeon.train(keys, tmp_path / "again", steps=2, arguments={"weight_decay": 0.1})
    assert again is not None
    assert list(again.table()["perplexity"]) == list(found.table()["perplexity"])
    with pytest.raises(ValueError, match="unknown key 'mode'; did you mean 'model'"):
        surgeon.train({**keys, "mode": 1}, tmp_path / "no")
