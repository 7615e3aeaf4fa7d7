"""`surgeon export` as a user runs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import surgeon
from surgeon.checkpoint.factor_cache import FactorCache
from surgeon.checkpoint.stored import Checkpoint
from surgeon.language.recipe import parse_recipe, read_recipe
from surgeon.models.edit import recipe_program
from surgeon.models.weights import TruncatedSVD
from tests.commands.conftest import Run
from tests.tiny_models import VOCABULARY


@pytest.fixture
def run(surgeon_says: Run) -> Run:
    """Runs the command."""
    return partial(surgeon_says, "export")


@pytest.fixture
def recipe(tmp_path: Path, tiny_checkpoint: Path) -> Callable[[str], Path]:
    """A factory of recipes for the tiny checkpoint: `recipe("- prune: {layers: '1:2'}")`."""

    def write(operations: str, model: str = str(tiny_checkpoint)) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(f"surgeon: 1\nmodel: {model}\noperations:\n  {operations}\n")
        return path

    return write


@pytest.mark.parametrize(
    ("operations", "form", "program", "said"),
    [
        ("- prune: {layers: '1:2'}", "plain", "A0 F0 A2 F2 A3 F3", "which any software loads"),
        ("- pair: {layers: '1:3'}", "fused", "A0 F0 [A1 A2] [F1 F2] A3 F3", "vLLM"),
        (
            "- ladder: {layers: '2:4'}",
            "program",
            "A0 F0 A1 F1 >A2 >F2 >A3 >F3",
            "because the step >A2 is late",
        ),
    ],
)
def test_it_says_which_form_and_why(
    run: Run,
    recipe: Callable[[str], Path],
    tmp_path: Path,
    operations: str,
    form: str,
    program: str,
    said: str,
) -> None:
    written = recipe(operations)
    code, out, err = run(written, "-o", tmp_path / "out")
    assert (code, out) == (0, f"{tmp_path / 'out'}\n")
    assert err.startswith(f"{form} form: ")
    assert said in err
    assert "Proof: on 128 random tokens" in err
    report = json.loads((tmp_path / "out" / "surgeon.json").read_text())
    assert (report["form"], report["program"]) == (form, program)
    # The same recipe, without the place where the model lies.
    assert report["recipe"] == replace(read_recipe(written), model="tiny-llama").to_yaml()
    ids = torch.randint(2, VOCABULARY, (1, 7))
    assert surgeon.load(tmp_path / "out")(ids).logits.isfinite().all()


def test_form_dtype_and_model_can_be_given(
    run: Run, recipe: Callable[..., Path], tmp_path: Path, tiny_checkpoint: Path
) -> None:
    path = recipe("- prune: {layers: '1:2'}", model="no/such-model")
    options = ("--model", tiny_checkpoint, "--form", "program", "--dtype", "bfloat16")
    code, _, err = run(path, "-o", tmp_path / "out", *options)
    assert code == 0
    assert "once computed weights are rounded to bfloat16" in err
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["dtype"], config["surgeon_program"]) == ("bfloat16", "A0 F0 A1 F1 A2 F2")


@pytest.mark.parametrize(
    ("operations", "options", "said"),
    [
        (
            "- prune: {layers: '3:9'}",
            (),
            "recipe.yaml:4: prune: layers 3:9 are out of range: the model's layers are 0:4",
        ),
        ("- prune: {layer: '3:4'}", (), "prune needs layers"),
        ("- ladder: {layers: '0:4'}", ("--form", "fused"), "cannot be written in the fused form"),
        (
            "- prune: {layers: '1:2'}",
            ("--model", "/no/such/folder"),
            "there is no model folder /no/such/folder",
        ),
        (
            "- prune: {layers: '1:2'}",
            ("--form", "fuse"),
            "'--form': 'fuse' is not one of 'auto', 'plain',",
        ),
    ],
)
def test_mistakes_get_one_line_and_write_nothing(
    run: Run,
    recipe: Callable[[str], Path],
    tmp_path: Path,
    operations: str,
    options: tuple[str, ...],
    said: str,
) -> None:
    code, out, err = run(recipe(operations), "-o", tmp_path / "out", *options)
    assert code != 0
    assert out == ""
    assert said in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_recipe_made_for_other_weights(
    run: Run, recipe: Callable[[str], Path], tmp_path: Path, tiny_checkpoint: Path
) -> None:
    path, own, other = (
        recipe("- prune: {layers: '1:2'}"),
        Checkpoint(tiny_checkpoint).model_hash(),
        "0" * 64,
    )
    text = path.read_text()
    path.write_text(f"{text}weights: sha256:{other}\n")
    code, out, err = run(path, "-o", tmp_path / "out")
    assert (code, out, err.count("\n"), (tmp_path / "out").exists()) == (1, "", 1, False)
    assert (
        f"recipe.yaml:5: weights: the recipe was made for sha256:{other}, and the model has sha256:{own}; "
        in err
    )
    code, _, err = run(path, "-o", tmp_path / "out", "--model", tiny_checkpoint)
    assert code == 0
    assert (
        f"warning: {path}:5: weights: the recipe was made for sha256:{other}, and the model has sha256:{own}\n"
        in err
    )
    assert (
        f"weights: sha256:{own}" in json.loads((tmp_path / "out" / "surgeon.json").read_text())["recipe"]
    )
    path.write_text(f"{text}weights: sha256:{own}\n")
    code, _, err = run(path, "-o", tmp_path / "out", "--overwrite")
    assert (code, "warning" in err) == (0, False)


def test_an_existing_target_is_refused_before_anything_is_read(
    run: Run, recipe: Callable[[str], Path], tmp_path: Path
) -> None:
    path = recipe("- prune: {layers: '1:2'}")
    assert run(path, "-o", tmp_path / "out")[0] == 0
    before = (tmp_path / "out" / "config.json").read_bytes()
    code, _, err = run(path, "-o", tmp_path / "out", "--model", "/no/such/folder")
    assert code == 1
    assert "pass --overwrite" in err
    assert (tmp_path / "out" / "config.json").read_bytes() == before
    assert run(recipe("- prune: {layers: '1:3'}"), "-o", tmp_path / "out", "--overwrite")[0] == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_hidden_layers"] == 2


def test_damaged_models_are_said_in_one_line(
    run: Run, recipe: Callable[[str], Path], tmp_path: Path, tiny_checkpoint: Path
) -> None:
    path = recipe("- prune: {layers: '1:2'}")
    weights = tiny_checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    code, _, err = run(path, "-o", tmp_path / "out")
    assert (code, err.count("\n")) == (1, 1)
    assert "truncated" in err
    (tiny_checkpoint / "config.json").unlink()
    code, _, err = run(path, "-o", tmp_path / "out")
    assert (code, err.count("\n")) == (1, 1)
    assert "has no config.json" in err


def test_help_says_how_layers_count(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert "Layers count from 0" in out
    assert "plain: an ordinary checkpoint" in " ".join(out.split())


LOWRANK = (
    "- lowrank: {{layers: '1:3', keep: 0.5, method: whitened, calibration: {{data: {}, tokens: 320, window: 32, "
    "sequential: true}}}}"
)


def test_calibrated_factors_are_made_kept_and_recorded(
    run: Run, recipe: Callable[..., Path], tmp_path: Path, tiny_checkpoint: Path, tiny_text: Path
) -> None:
    written = recipe(LOWRANK.format(tiny_text))
    code, _, err = run(
        written, "-o", tmp_path / "out", "--factors", tmp_path / "kept", "--memory", "8GB"
    )
    assert code == 0, err
    report = json.loads((tmp_path / "out" / "surgeon.json").read_text())
    (operation,) = parse_recipe(report["recipe"]).operations
    text = operation.parameters["calibration"]
    assert (text["data"], text["tokens"], text["window"], text["sequential"]) == (
        "text.txt",
        320,
        32,
        True,
    )
    assert (
        text["hash"]
        == "sha256:" + json.loads((tmp_path / "kept" / "factors.json").read_text())["calibration"]
    )
    original = surgeon.load(tiny_checkpoint)
    kept = FactorCache(TruncatedSVD(), tmp_path / "kept")
    files = set((tmp_path / "kept").glob("*.safetensors"))
    assert len(files) == 14
    edited = surgeon.edit(original, recipe_program(read_recipe(written), original.config), factors=kept)
    ids = torch.randint(2, VOCABULARY, (1, 7))
    expected = edited(ids).logits
    assert set((tmp_path / "kept").glob("*.safetensors")) == files
    torch.testing.assert_close(
        surgeon.load(tmp_path / "out")(ids).logits, expected, rtol=1e-4, atol=1e-4
    )
    plain = surgeon.edit(original, recipe_program(read_recipe(written), original.config))(ids).logits
    assert not torch.allclose(plain, expected, rtol=0.1)
    # Without --factors they lie beside the output while they are needed.
    code, _, err = run(written, "-o", tmp_path / "again")
    assert code == 0, err
    assert not (tmp_path / "again.factors").exists()
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    tiny_text.unlink()
    code, _, err = run(written, "-o", tmp_path / "gone")
    assert code == 1
    assert f"error: the calibration text is gone: there is no file {tiny_text}" in err
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_minds_what_factors_are_rounded_to(
    run: Run, recipe: Callable[..., Path], tmp_path: Path, tiny_text: Path, dtype: str
) -> None:
    written = recipe(
        LOWRANK.format(tiny_text).replace("sequential: true", "sequential: true, update: true")
    )
    rounded = ["--dtype", dtype] if dtype != "float32" else []
    code, _, err = run(written, "-o", tmp_path / "out", "--factors", tmp_path / "kept", *rounded)
    assert code == 0, err
    assert json.loads((tmp_path / "kept" / "factors.json").read_text())["kept"] == dtype
