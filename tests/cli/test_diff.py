"""`surgeon diff` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from surgeon import __version__
from tests.cli.conftest import Run


@pytest.fixture
def recipe(tmp_path: Path, tiny_checkpoint: Path) -> Path:
    path = tmp_path / "edit.yaml"
    path.write_text(f"surgeon: 1\nmodel: {tiny_checkpoint}\noperations:\n  - pair: {{layers: '1:3'}}\n")
    return path


def test_a_checkpoint_an_edited_one_and_the_recipe(
    surgeon_says: Run, recipe: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    assert surgeon_says("export", recipe, "-o", tmp_path / "edited")[0] == 0
    code, out, err = surgeon_says("diff", tiny_checkpoint, tmp_path / "edited")
    assert code == 1
    assert err.startswith("comparing: done")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "A           tiny-llama, a checkpoint"
    for line in (
        "form        plain | fused",
        "depth       4 | 3",
        "syncs       8 | 6",
        "program     layers 1 to 2: as unedited | [A1 A2] [F1 F2]",
        "files       modeling_surgeon_fused.py: only in B",
        "tensors     21 equal, bit for bit",
        "only in A   layers 1 to 2: all 9 of each",
        "only in B   layer 1+2: all 9",
    ):
        assert line in lines
    code, out, err = surgeon_says("diff", recipe, tmp_path / "edited")
    assert (code, err) == (0, "")
    assert out.endswith(f"by surgeon {__version__}\nprogram     the same\n")


def test_ranks_are_told_beside_the_programs(surgeon_says: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    for name, pairs in (("both", "  - pair: {layers: '0:2'}\n"), ("ranks", "")):
        ranks = "  - lowrank: {layers: '1:4', ranks: {q: 6, k: 6, down: [8, null, 8]}}\n"
        text = f"surgeon: 1\nmodel: {tiny_checkpoint}\noperations:\n{pairs}{ranks}"
        (tmp_path / f"{name}.yaml").write_text(text)
    code, out, err = surgeon_says("diff", tiny_checkpoint, tmp_path / "both.yaml")
    assert (code, err) == (1, "")
    assert "program     layers 0 to 1: as unedited | [A0 A1] [F0 F1]\n" in out
    assert out.endswith("sizes       layers 1, 3: whole | q, k 6; down 8\n            layer 2: whole | q, k 6\n")
    code, out, _ = surgeon_says("diff", tiny_checkpoint, tmp_path / "ranks.yaml", "--json")
    record = json.loads(out)
    assert (code, record["equal"], record["program"]) == (1, False, [])
    assert record["sizes"][0] == {"layers": [[1], [3]], "a": "whole", "b": "q, k 6; down 8"}
    before, after = record["facts"]["in layers"]
    assert before > after
    assert surgeon_says("diff", tmp_path / "ranks.yaml", tmp_path / "ranks.yaml")[0] == 0


def test_values_and_json(surgeon_says: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in tiny_checkpoint.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    assert surgeon_says("diff", tiny_checkpoint, other, "--json")[0] == 0
    tensors = load_file(other / "model.safetensors")
    largest = max(tensors[f"model.layers.{k}.mlp.up_proj.weight"].abs().max().item() for k in (1,))
    for layer in (1, 2, 3):
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"][0, :4] += 0.25 / layer
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    code, out, _ = surgeon_says("diff", tiny_checkpoint, other)
    assert code == 1
    said = " ".join(out.split())
    total = 3 * tensors["model.layers.1.mlp.up_proj.weight"].numel()
    assert "program the same config the same files the same" in said
    assert (
        f"values layers 1 to 3: mlp.up_proj.weight: 12 of {total:,} elements differ, by 0.25 at most, "
        f"{0.25 / largest:.2g} of the largest value (layer 1 mlp.up_proj.weight)"
    ) in said
    code, out, _ = surgeon_says("diff", tiny_checkpoint, other, "--json")
    record = json.loads(out)
    assert (code, record["equal"]) == (1, False)
    assert [one["layers"] for one in record["tensors"]["different"]] == [[1], [2], [3]]
    assert record["tensors"]["different"][0]["largest"] == pytest.approx(0.25)


def test_trouble_is_exit_code_2(surgeon_says: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for arguments, said in [
        ((tiny_checkpoint, tmp_path / "none"), "there is no model folder"),
        ((tmp_path / "empty", tiny_checkpoint), "has no config.json"),
        ((tiny_checkpoint, tmp_path / "none.yaml"), "there is no recipe"),
        ((tiny_checkpoint,), "Missing argument 'B'"),
    ]:
        code, out, err = surgeon_says("diff", *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert said in err
    assert "The exit code is 0 if nothing differs, 1 if something does" in " ".join(
        surgeon_says("diff", "--help")[1].split()
    )
