"""Models and tokenizers that disagree, over all commands that open both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, ByT5Tokenizer

from surgeon.checkpoint.texts import open_tokenizer
from tests.commands.conftest import Run
from tests.tiny_models import tiny_model, tiny_tokenizer

LP = "A0 F0 [A1 A2] [F1 F2] A3 F3"
ON_TEXT = ["--data", "text.txt", "--window", "64", "--tokens", "256"]
COMMANDS: dict[str, list[str]] = {
    "eval": ["MODEL", *ON_TEXT],
    "eval of tasks": ["MODEL", "--tasks", "tasks.jsonl"],
    "eval of a recipe": ["recipe.yaml", *ON_TEXT],
    "scan": ["MODEL", *ON_TEXT, "-o", "out"],
    "similarity": ["MODEL", *ON_TEXT, "-o", "out"],
    "sensitivity": ["MODEL", *ON_TEXT, "-o", "out"],
    "spectrum": ["MODEL", *ON_TEXT, "-o", "out"],
    "search": ["MODEL", *ON_TEXT, "-o", "out", "--trials", "2"],
    "heal": [
        "MODEL",
        "--program",
        LP,
        "--data",
        "text.txt",
        "--window",
        "64",
        "--steps",
        "2",
        "-o",
        "out",
    ],
    "export": ["recipe.yaml", "-o", "out"],
    "generate": ["MODEL", "--prompt", "The quick"],
    "serve": ["MODEL", "--port", "0"],
    "bench": ["MODEL", "--compress", "int8", "--data", "text.txt"],
}


@pytest.fixture
def here(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The folder of a model, in a folder with what the commands read."""
    monkeypatch.chdir(tmp_path)
    calibration = f"calibration: {{data: {tiny_text}, tokens: 256, window: 64}}"
    operation = f'lowrank: {{layers: "0:2", keep: 0.6, method: whitened, {calibration}}}'
    (tmp_path / "recipe.yaml").write_text(
        f"surgeon: 1\nmodel: {tiny_checkpoint}\noperations:\n  - {operation}\n"
    )
    row = {"query": "the dog", "choices": ["fox jumps", "lazy dog"], "gold": 0}
    (tmp_path / "tasks.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    return tiny_checkpoint


@pytest.mark.parametrize("command", COMMANDS)
def test_tokens_without_a_row_in_the_embedding(command: str, here: Path, surgeon_says: Run) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(here)
    rows = len(tokenizer)
    tokenizer.add_tokens([f"<tool {number}>" for number in range(5)])
    tokenizer.save_pretrained(here)
    arguments = [str(here) if word == "MODEL" else word for word in COMMANDS[command]]
    code, out, err = surgeon_says(command.split()[0], *arguments)
    assert (code, out) == (1, "")
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (
        f"gives token ids up to {rows + 4}, and the model's embedding has {rows} rows, none for '<tool 0>'"
        in line
    )
    assert f"and 2 more; give it rows (model.resize_token_embeddings({rows + 5}) of transformers" in line


def _save(folder: Path, tokenizer: Any, rows: int) -> None:
    for file in folder.glob("*token*"):
        file.unlink()
    tiny_model("llama", 4, vocab_size=rows).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("kind", ["larger embedding", "no BOS and no EOS", "no fast tokenizer"])
def test_what_fits_well_enough(kind: str, here: Path, surgeon_says: Run) -> None:
    """None of these is a fault, or said to be one."""
    tokenizer: Any = tiny_tokenizer()
    if kind == "no BOS and no EOS":
        tokenizer.bos_token = tokenizer.eos_token = None
    if kind == "no fast tokenizer":
        tokenizer = ByT5Tokenizer(extra_ids=0)
        assert not tokenizer.is_fast
    _save(here, tokenizer, len(tokenizer) + 50 * (kind == "larger embedding"))
    for command in ("eval", "similarity", "generate"):
        arguments = [str(here) if word == "MODEL" else word for word in COMMANDS[command]]
        code, _, err = surgeon_says(command, *arguments)
        assert code == 0, err
        assert "warning" not in err
    code, _, err = surgeon_says("eval", here, "--tasks", "tasks.jsonl")
    if kind == "no BOS and no EOS":
        assert code == 1
        assert err.endswith("neither BOS nor EOS, one of which lm-eval needs; set one in its files\n")
    else:
        assert code == 0, err


def test_special_ids_without_a_row(here: Path, surgeon_says: Run) -> None:
    """They change no number, but a text would never end; which is said once."""
    changes = {
        "config.json": {"bos_token_id": 400, "pad_token_id": -1},
        "generation_config.json": {"eos_token_id": [1, 300]},
    }
    for name, ids in changes.items():
        held = json.loads((here / name).read_text())
        (here / name).write_text(json.dumps(held | ids))
    code, _, err = surgeon_says("eval", here, *ON_TEXT)
    assert code == 0
    (line,) = [line for line in err.splitlines() if line.startswith("warning")]
    assert line == (
        f"warning: {here} names tokens beyond the 300 rows of its embedding, which cannot come: bos_token_id 400 "
        "(config.json), eos_token_id 300 (generation_config.json); correct the numbers there"
    )


def test_the_largest_id_counts_and_not_the_number_of_tokens(here: Path) -> None:
    """Vocabularies may have gaps, and ids behind them."""
    tokenizer: Any = open_tokenizer(here)
    described = json.loads((here / "tokenizer.json").read_text())
    described["model"]["vocab"]["\u0120far"] = len(tokenizer) + 7
    (here / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(
        ValueError, match="ids up to 307, and the model's embedding has 300 rows, none for 'Ġfar'"
    ):
        open_tokenizer(here)
