"""`surgeon train` as users call it."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import surgeon
from surgeon.checkpoint.tensor_file import verify
from surgeon.models.edit import program_of
from surgeon.training import run
from surgeon.training.scratch.build import blueprint
from surgeon.training.scratch.config import parse_config
from tests.commands.conftest import Run
from tests.waiting import PATIENCE

CONFIG = """\
surgeon: 1
model:
  {{model_type: llama, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4}}
tokenizer: {tokenizer}
operations: [{operations}]
data: {data}
eval_tokens: 64
window: 16
training: {{steps: 3, batch: 2, evaluate_every: 2, save_every: 2, learning_rate: 1e-2}}
"""
LADDER = 'ladder: {layers: "0:2"}'


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "long.txt"
    path.write_text(" ".join(f"{number} sheep and {number * 7 % 31} dogs" for number in range(150)))
    return path


@pytest.fixture
def train(surgeon_says: Run, tiny_checkpoint: Path, text: Path, tmp_path: Path) -> Any:
    """Trains a model with these operations into the folder "new"."""

    def call(
        operations: str, *arguments: object, output: str = "new", **changed: str
    ) -> tuple[int, str, str]:
        path = tmp_path / "config.yaml"
        written = CONFIG.format(tokenizer=tiny_checkpoint, operations=operations, data=text)
        for before, after in changed.items():
            assert before in written
            written = written.replace(before, after)
        path.write_text(written)
        return surgeon_says("train", path, "-o", tmp_path / output, *arguments)

    return call


def hashed(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_a_ladder_from_scratch(train: Any, tmp_path: Path) -> None:
    code, out, err = train(LADDER)
    assert (code, out.strip()) == (0, str(tmp_path / "new")), err
    assert (
        "Llama of 36,768 random weights (seed 0), program >A0 >F0 >A1 >F1; trained on 96 tokens of"
        in err
    )
    assert [line.split()[0] for line in err.splitlines() if "perplexity" in line and "over" in line] == [
        "untrained",
        "trained",
    ]
    assert "proof: the program is the configuration's; on " in err
    folder = tmp_path / "new"
    report = json.loads((folder / "surgeon.json").read_text())
    assert report["source"] == {"model": None, "num_layers": 2}
    assert (report["form"], report["program"], report["recipe"]) == ("program", ">A0 >F0 >A1 >F1", None)
    assert report["trained"]["method"] == "all weights, from random ones (seed 0)"
    assert (report["trained"]["steps"], report["trained"]["tokens"], report["trained"]["data"]) == (
        3,
        96,
        "long.txt",
    )
    assert str(tmp_path) not in (folder / "surgeon.json").read_text()
    assert verify(folder, folder / "surgeon.json") > 3
    said = json.loads((tmp_path / "new.run" / "run.json").read_text())
    assert said["identity"]["task"] == "train"
    assert (
        said["trained"]["perplexity"]
        == report["trained"]["trained"]["perplexity"]
        < said["untrained"]["perplexity"]
    )
    assert said["parameters"] == 36768
    assert not list((tmp_path / "new.run").glob("checkpoint-*"))
    assert str(program_of(surgeon.load(folder))) == ">A0 >F0 >A1 >F1"


def test_what_others_say_of_it(train: Any, surgeon_says: Run, tmp_path: Path, text: Path) -> None:
    assert train(LADDER)[0] == 0
    folder = tmp_path / "new"
    card = " ".join((folder / "README.md").read_text().split())
    assert "This is a Llama of 2 layers, made with surgeon" in card
    assert "trained from scratch: 3 steps, 96 tokens of long.txt (SHA-256 `" in card
    assert "all weights, from random ones (seed 0). There is no original behind it." in card
    assert "| | new | with random weights | | :-- |" in card
    assert '`ladder: {layers: "0:2"}`: Make steps of the layers read' in card
    for wrong in ("after surgery", "unedited", "base model", "The original has"):
        assert wrong not in card
    code, shown, _ = surgeon_says("show", folder)
    assert code == 0
    assert "new, trained from scratch, in program form, by surgeon" in " ".join(shown.split())
    code, _, err = surgeon_says("eval", folder, "--data", text, "--tokens", 64, "--window", 16)
    assert code == 0, err
    code, _, err = surgeon_says("show", folder, folder)
    assert code == 0, err


def test_a_plain_one_is_a_model_like_any_other(
    train: Any, surgeon_says: Run, tmp_path: Path, text: Path
) -> None:
    assert train("")[0] == 0
    folder = tmp_path / "new"
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    assert json.loads((folder / "surgeon.json").read_text())["form"] == "plain"
    assert model.config.vocab_size == len(tokenizer)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f'surgeon: 1\nmodel: {folder}\noperations:\n  - pair: {{layers: "0:2"}}\n')
    code, _, err = surgeon_says("export", recipe, "-o", tmp_path / "paired")
    assert code == 0, err
    quick = ("--window", 16, "--eval-tokens", 64, "--batch", 2, "--steps", 2, "--train", "all")
    code, _, err = surgeon_says("heal", folder, "--data", text, *quick, "-o", tmp_path / "on")
    assert code == 0, err
    card = " ".join((tmp_path / "on" / "README.md").read_text().split())
    assert "trained from scratch: 3 steps, 96 tokens of long.txt" in card
    assert "; then trained further (healed): 2 steps, 64 tokens of long.txt" in card


@pytest.mark.thorough
def test_a_killed_run_goes_on_to_the_same_weights(train: Any, tmp_path: Path, monkeypatch: Any) -> None:
    assert train(LADDER, "--steps", 6, output="whole")[0] == 0
    in_full = run.ModelTrainer.training_step

    def interrupted(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.state.global_step == 5:
            raise KeyboardInterrupt
        return in_full(self, *arguments, **options)

    monkeypatch.setattr(run.ModelTrainer, "training_step", interrupted)
    code, _, err = train(LADDER, "--steps", 6, output="cut")
    assert code == 130
    assert err.splitlines()[-1] == "interrupted; run the same command again to go on"
    assert not (tmp_path / "cut").exists()
    assert sorted(path.name for path in (tmp_path / "cut.run").glob("checkpoint-*")) == [
        "checkpoint-2",
        "checkpoint-4",
    ]
    monkeypatch.undo()
    torch.manual_seed(99)  # nothing may follow from where random numbers happen to be
    code, _, err = train(LADDER, "--steps", 7, output="cut")
    assert (code, err.splitlines()[-1][:6]) == (1, "error:")
    assert "its steps was 6, and now it is 7" in err
    assert train(LADDER, "--steps", 6, output="cut")[0] == 0
    assert hashed(tmp_path / "cut") == hashed(tmp_path / "whole")


def test_rack_by_rack(train: Any, surgeon_says: Run, tmp_path: Path) -> None:
    code, out, err = train("", **{"window: 16": 'window: 16\nracks: {ranges: ["0:1", "1:2"], coda: 1}'})
    assert (code, out.strip()) == (0, str(tmp_path / "new")), err
    assert "rack 0:1: perplexity by its coda " in err
    folder = tmp_path / "new"
    codas = json.loads((folder / "codas" / "codas.json").read_text())
    assert (codas["racks"], codas["depth"]) == (["0:1", "1:2"], 1)
    said = json.loads((folder / "surgeon.json").read_text())["trained"]
    assert said["method"].startswith(
        "all weights, rack by rack (layers 0:1, 1:2) with codas of 1 layer, from random"
    )
    assert said["racks"]["each"][1]["after"]["perplexity"] == said["trained"]["perplexity"]
    record = json.loads((tmp_path / "new.run" / "run.json").read_text())
    assert record["identity"]["task"] == "train"
    assert record["trained"] == said["trained"]
    assert surgeon_says("show", folder)[0] == 0
    assert surgeon_says("report", tmp_path / "new.run", folder, "-o", tmp_path / "page.html")[0] == 0
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.isfinite(model(input_ids=torch.arange(3, 9)[None]).logits).all()


def test_racks_in_processes(train: Any, tmp_path: Path) -> None:
    """The same figures as one after the other, to the last digit; others where codas are averaged."""
    figures = []
    for more in ("", ", processes: true", ", processes: true, average: 1"):
        racks = f'window: 16\nracks: {{ranges: ["0:1", "1:2"], coda: 1{more}}}'
        code, _, err = train("", "--overwrite", **{"window: 16": racks})
        assert code == 0, err
        said = json.loads((tmp_path / "new" / "surgeon.json").read_text())["trained"]
        figures.append([rack["after"] for rack in said["racks"]["each"]])
        assert (tmp_path / "new.run" / "rack-0" / "traffic.json").is_file() == bool(more)
        shutil.rmtree(tmp_path / "new.run")
    assert figures[0] == figures[1]
    assert all(
        averaged["perplexity"] != alone["perplexity"]
        for averaged, alone in zip(figures[2], figures[1], strict=True)
    )


def test_another_model_is_not_gone_on_with(train: Any) -> None:
    assert train(LADDER)[0] == 0
    code, _, err = train(LADDER, "--overwrite", **{"hidden_size: 32": "hidden_size: 64"})
    assert code == 1
    assert (
        "its head dim was 8, and now it is 16" in err
        or "its hidden size was 32, and now it is 64" in err
    )
    code, _, err = train(LADDER)
    assert (code, "exists and is not empty" in err) == (1, True)
    code, _, err = train(LADDER, "--overwrite")
    assert code == 0, err


def test_a_full_disk_leaves_the_run(train: Any, tmp_path: Path, monkeypatch: Any) -> None:
    from surgeon.training import trainer

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer, "save_file", full)
    code, _, err = train(LADDER)
    assert code == 1
    assert "filled up at step 2" in err
    assert not (tmp_path / "new").exists()
    monkeypatch.undo()
    assert train(LADDER)[0] == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch: 2": "batch: 500"}, "config.yaml:6: data: the training text has "),
        (
            {"model_type: llama": "model_type: lama"},
            "config.yaml:3: model: model_type 'lama' is not supported",
        ),
        (
            {"window: 16": "window: 5000"},
            "config.yaml:8: window: 5000 tokens are more than the model's 2048 positions",
        ),
        ({"data: ": "data: /none"}, "/none"),
    ],
)
def test_what_does_not_fit_is_refused(
    changed: dict[str, str], message: str, train: Any, tmp_path: Path
) -> None:
    code, out, err = train(LADDER, **changed)
    assert (code, out) == (1, "")
    assert message in " ".join(err.split())
    assert err.splitlines()[-1].startswith("error: ")
    assert not (tmp_path / "new").exists()


def test_the_configuration_in_the_record_builds_the_same(
    train: Any, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    assert train(LADDER, "--seed", 5)[0] == 0
    said = json.loads((tmp_path / "new" / "surgeon.json").read_text())["trained"]
    config = parse_config(said["configuration"].replace('"tiny-llama"', str(tiny_checkpoint)))
    assert config.settings.seed == 5
    known = json.loads((tmp_path / "new.run" / "run.json").read_text())["identity"]
    assert json.loads(json.dumps(blueprint(config).identity())).items() <= known.items()


@pytest.mark.thorough
def test_from_the_shell(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "surgeon: 1\nmodel: {model_type: llama}\ntokenizer: demo\ndata: demo:train\nwindow: 1\n"
    )
    command = [sys.executable, "-m", "surgeon.commands", "train", str(path), "-o", str(tmp_path / "new")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    expected = f"error: {path}:5: window: Input should be greater than or equal to 2, not 1\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", expected)


def test_all_chat_templates_of_the_tokenizer_go_along(
    train: Any, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    templates = {"default": "{{ messages }}", "rag": "R {{ messages }}"}
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    tokenizer.chat_template = templates
    tokenizer.save_pretrained(tiny_checkpoint)
    (tiny_checkpoint / "LICENSE").write_text(
        "of the tokenizer's model, which this one does not come from"
    )
    code, _, err = train("")
    assert code == 0, err
    assert AutoTokenizer.from_pretrained(tmp_path / "new").chat_template == templates
    assert verify(tmp_path / "new", tmp_path / "new" / "surgeon.json")
    assert not (tmp_path / "new" / "LICENSE").exists()
    assert json.loads((tmp_path / "new" / "surgeon.json").read_text())["companions"]["left_behind"] == {}


@pytest.mark.thorough
def test_a_papers_configuration_small(
    surgeon_says: Run, text: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Ladder Residual's 1.2B, as deep and 32 wide, for two steps on a text that is here."""
    config = Path(__file__).resolve().parents[2] / "recipes" / "train" / "papers" / "ladder-1.2b.yaml"
    (held_out := tmp_path / "other.txt").write_text(
        text.read_text().replace("sheep and", "cats or")[:900]
    )
    small = (
        "--scale",
        "1/64",
        "--steps",
        2,
        "--tokenizer",
        tiny_checkpoint,
        "--data",
        text,
        "--eval-data",
        held_out,
    )
    code, _, err = surgeon_says("train", config, "-o", tmp_path / "new", *small)
    assert code == 0, err
    written = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (written["num_hidden_layers"], written["hidden_size"], written["num_attention_heads"]) == (
        22,
        32,
        16,
    )
    assert "trained on 2,048 tokens" in err
    code, _, err = surgeon_says("train", config, "-o", tmp_path / "none", "--scale", "2")
    assert (code, "a scale is above 0 and at most 1, such as 1/64 or 0.125, not '2'" in err) == (1, True)
