"""`surgeon search` from the command line: what it writes, that it goes on where it was, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from surgeon.analysis import subject
from surgeon.checkpoint.config_only import read_config_only
from surgeon.checkpoint.read import Checkpoint
from surgeon.cli.app import main
from surgeon.cli.options import DATA_HELP
from surgeon.cost.hardware_file import load_hardware
from surgeon.cost.predict import Deployment, Workload, predict
from surgeon.cost.shapes import ModelShapes
from surgeon.program import Program
from surgeon.quality.head import OutputHead, Quality, ReferencePredictions
from surgeon.recipe import read_recipe
from tests.models import save_checkpoint
from tests.stored import configure

SIZES = ["--tokens", "256", "--window", "64", "--trials", "6"]


def search(model: Path, text: Path, output: Path, *more: str) -> int:
    return main(["search", str(model), "--budget", "depth=3", "--data", str(text), "-o", str(output), *SIZES, *more])


def test_results_and_resumption(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "search"
    assert search(tiny_checkpoint, tiny_text, output) == 0
    said = capsys.readouterr().out
    assert "depth       3 of 4 layers" in said
    recipe = read_recipe(output / "recipe.yaml")
    program = recipe.program(4)
    assert program.effective_depth() == 3
    assert str(program) in said
    assert Path(recipe.model) == tiny_checkpoint
    assert recipe.weights == Checkpoint(tiny_checkpoint).model_hash()
    table = pd.read_csv(output / "trials.csv")
    assert len(table) == 6
    assert (table["depth"] == 3).all()
    assert ((table["divergence_low"] <= table["divergence"]) & (table["divergence"] <= table["divergence_high"])).all()
    best = table.loc[table["divergence"].idxmin()]
    assert Program.parse(best["program"]) == program
    record = json.loads((output / "search.json").read_text())
    assert record["best"]["program"] == str(program)
    assert record["original"]["divergence"] == pytest.approx(0, abs=1e-6)
    assert record["original"].keys() < record["best"].keys()
    assert {"model", "model_hash", "data_hash", "seed", "versions", "command"} <= record.keys()
    assert (output / "quality-against-depth.png").stat().st_size > 10_000
    before = (output / "trials.csv").read_bytes()
    assert search(tiny_checkpoint, tiny_text, output) == 0
    assert (output / "trials.csv").read_bytes() == before


def test_another_search_in_the_same_folder_is_refused(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert search(tiny_checkpoint, tiny_text, tmp_path / "search") == 0
    before = (tmp_path / "search" / "recipe.yaml").read_text()
    assert search(tiny_checkpoint, tiny_text, tmp_path / "search", "--seed", "7") == 1
    assert "holds a search with another seed (0, not 7)" in capsys.readouterr().err
    assert (tmp_path / "search" / "recipe.yaml").read_text() == before


def test_a_budget_of_predicted_time(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "search"
    budget = ("--budget", "speedup>=1.05@cpu-2", "--ranks", "2", "--prompt", "16", "--new", "8", "--trials", "2")
    assert search(tiny_checkpoint, tiny_text, output, *budget) == 0
    program = read_recipe(output / "recipe.yaml").program(4)
    shapes = ModelShapes.of("tiny", read_config_only(tiny_checkpoint).config)
    hardware, workload = load_hardware("cpu-2"), Workload(1, 16, 8)
    deployment = Deployment(2, "float32")
    dense, found = (
        predict(shapes, one, hardware, workload, deployment).per_token for one in (Program.dense(4), program)
    )
    assert dense / found >= 1.05
    assert json.loads((output / "search.json").read_text())["ranks"] == 2
    capsys.readouterr()
    assert search(tiny_checkpoint, tiny_text, output, *budget, "--ranks", "1") == 1
    assert "out of reach" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ("depth=0", "error: budget depth=0 should be a whole number of layers, at least 1\n"),
        ("depth=40", "error: budget depth=40 is more than the model's 4 layers; use at most 4\n"),
        ("depth=1", "error: budget depth=1 is out of reach: pairs bring 4 layers to 2 at the least\n"),
        ("dpeth=3", "error: unknown budget 'dpeth'; did you mean 'depth'?\n"),
    ],
)
def test_budgets_that_make_no_sense(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], budget: str, said: str
) -> None:
    output = tmp_path / "search"
    code = main(
        ["search", str(tiny_checkpoint), "--budget", budget, "--data", str(tiny_text), "-o", str(output), *SIZES]
    )
    assert code == 1
    assert capsys.readouterr().err.endswith(said)
    assert not output.exists()


def test_a_limit_of_memory_and_what_goes_wrong_is_said_as_in_a_scan(
    tiny_checkpoint: Path,
    tiny_text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert search(tiny_checkpoint, tiny_text, tmp_path / "whole") == 0
    with monkeypatch.context() as context:
        context.setattr(subject, "available_bytes", lambda *_: 0)
        assert search(tiny_checkpoint, tiny_text, tmp_path / "streamed", "--memory", "100GB") == 0
        assert "they are read layer by layer" in capsys.readouterr().err
    whole, streamed = (pd.read_csv(tmp_path / name / "trials.csv") for name in ("whole", "streamed"))
    pd.testing.assert_frame_equal(whole, streamed, rtol=1e-4)
    for limit, message in (("lots", "write e.g. 512MB or 2GB"), ("1MB", "use --memory")):
        assert search(tiny_checkpoint, tiny_text, tmp_path / "other", "--memory", limit) == 1
        assert message in capsys.readouterr().err
    path = tiny_checkpoint / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.2.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(weights, path, metadata={"format": "pt"})
    assert search(tiny_checkpoint, tiny_text, tmp_path / "broken") == 1
    assert "not finite: NaN or infinity appears first in F2; check that layer's weights" in capsys.readouterr().err


def test_out_of_memory_in_a_trial(
    tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer windows together, with a warning; with one alone the command ends, and goes on when it is given again."""
    model, more = save_checkpoint(tmp_path / "model", num_layers=6), ("--budget", "depth=4")
    assert search(model, tiny_text, tmp_path / "whole", *more) == 0
    compare, room, left = OutputHead.compare, 2, 10**6

    def small(self: OutputHead, stream: torch.Tensor, reference: ReferencePredictions) -> Quality:
        nonlocal left
        left -= 1
        if len(stream) > (room if left >= 0 else 0):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return compare(self, stream, reference)

    monkeypatch.setattr(OutputHead, "compare", small)
    assert search(model, tiny_text, tmp_path / "halved", *more) == 0
    assert "warning: out of memory with 4 windows together; going on with 2" in capsys.readouterr().err
    room, left = 4, 12
    assert search(model, tiny_text, tmp_path / "ended", *more) == 1
    assert "error: out of memory (CUDA out of memory); use a smaller model" in capsys.readouterr().err
    done = len(pd.read_csv(tmp_path / "ended" / "trials.csv"))
    assert 0 < done < 6
    left = 10**6
    assert search(model, tiny_text, tmp_path / "ended", *more) == 0
    whole, *others = (pd.read_csv(tmp_path / name / "trials.csv") for name in ("whole", "halved", "ended"))
    for table in others:
        pd.testing.assert_frame_equal(table.drop(columns="trial"), whole.drop(columns="trial"), rtol=1e-4)


def test_help_has_the_words_of_the_other_commands(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for command in ("scan", "search"):
        assert main([command, "--help"]) == 0
        texts.append(" ".join(capsys.readouterr().out.split()))
    for words in (DATA_HELP, "Tokens in a window. Default: 512", "The most memory the process may take"):
        assert all(words in text for text in texts)
    assert "depth=12" in texts[1]


def test_a_search_on_another_configuration_is_refused(
    tiny_checkpoint: Path, tiny_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert search(tiny_checkpoint, tiny_text, tmp_path / "search") == 0
    configure(tiny_checkpoint, rms_norm_eps=0.5)
    assert search(tiny_checkpoint, tiny_text, tmp_path / "search") == 1
    assert "holds a search with another model_hash (" in capsys.readouterr().err
