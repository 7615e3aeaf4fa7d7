"""Comparing checkpoints and recipes: what differs, and that everything else is called equal."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from surgeon.checkpoint.compare import Comparison, Difference, compare
from surgeon.checkpoint.describe import describe
from surgeon.checkpoint.hunks import Hunk, hunks
from surgeon.language.program import Program
from tests.checkpoint.helpers import run_export
from tests.stored import with_head_only, with_own_head
from tests.tiny_models import save_checkpoint

DENSE = "A0 F0 A1 F1 A2 F2 A3 F3 A4 F4"


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (DENSE, DENSE, []),
        (DENSE, "A0 F0 [A1 A2] [F1 F2] A3 F3 A4 F4", [Hunk(1, 2, "as unedited", "[A1 A2] [F1 F2]")]),
        (DENSE, "A0 F0 A3 F3 A4 F4", [Hunk(1, 2, "as unedited", "left out")]),
        ("A0 F0 A4 F4", "A0 F0 A1 F1 A4 F4", [Hunk(1, 1, "left out", "as unedited")]),
        (DENSE, "A0 F0 A1 F1 >A2 F2 A3 A4 F4", [Hunk(2, 2, "A2", ">A2"), Hunk(3, 3, "F3", "left out")]),
        # What was moved takes in all that it was moved over.
        (DENSE, "A0 F0 A3 F3 A1 F1 A2 F2 A4 F4", [Hunk(1, 3, "as unedited", "A3 F3 A1 F1 A2 F2")]),
        (
            "A0 F0 [A1 A2] [F1 F2] A3 F3 A4 F4",
            "A0 F0 {A1 F1 | A2 F2} A3 F3 A4~A3 F4",
            [Hunk(1, 2, "[A1 A2] [F1 F2]", "{A1 F1 | A2 F2}"), Hunk(3, 4, "A4", "A4~A3")],
        ),
        (
            DENSE,
            "A0 F0 A1 F1 A2 F2 A1 F1 A2 F2 A3 F3",
            [Hunk(1, 2, "as unedited", "A1 F1 A2 F2 A1 F1 A2 F2"), Hunk(4, 4, "as unedited", "left out")],
        ),
    ],
)
def test_where_programs_differ(a: str, b: str, expected: list[Hunk]) -> None:
    assert hunks(Program.parse(a), Program.parse(b)) == expected


def test_layers_of_one_step() -> None:
    a, b = Program.dense(3, steps_per_layer=1), Program.parse("[A0 F0] [A1 F1 A2 F2]")
    assert hunks(a, b, steps_per_layer=1) == [Hunk(1, 2, "as unedited", "[A1 F1 A2 F2]")]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("compared") / "tiny", num_layers=5)


@pytest.fixture
def changed(source: Path, tmp_path: Path) -> Callable[[Callable[[dict[str, Tensor]], object]], Comparison]:
    """Compares the source with a copy whose tensors a function changed."""

    def run(change: Callable[[dict[str, Tensor]], object]) -> Comparison:
        copy = Path(shutil.copytree(source, tmp_path / "copy"))
        tensors = load_file(copy / "model.safetensors")
        change(tensors)
        save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
        return compare(describe(source), describe(copy))

    return run


def only(found: Comparison) -> Difference:
    """The one tensor that differs."""
    assert found.tensors is not None
    assert not found.equal
    assert not any((found.config, found.files, found.hunks, found.tensors.only_a, found.tensors.only_b))
    (difference,) = found.tensors.different
    return difference


def test_a_copy_is_equal(source: Path, changed: Callable[..., Comparison]) -> None:
    found = changed(lambda _: None)
    assert found.equal
    assert found.tensors is not None
    assert found.tensors.equal == len(load_file(source / "model.safetensors"))


@pytest.mark.parametrize("part", [1 << 24, 640])
def test_values(source: Path, monkeypatch: pytest.MonkeyPatch, changed: Callable[..., Comparison], part: int) -> None:
    """In one go and row by row, against whole tensors."""
    monkeypatch.setattr("surgeon.checkpoint.compare.PART", part)
    name = "model.layers.3.mlp.down_proj.weight"
    before = load_file(source / "model.safetensors")[name]

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name][2, 5] += 0.5
        tensors[name][30, 7] -= 2

    found = only(changed(change))
    assert str(found.key) == "layer 3 mlp.down_proj.weight"
    assert (found.count, found.total) == (2, before.numel())
    assert found.largest == pytest.approx(2)
    assert found.relative == pytest.approx(2 / before.abs().max().item())


def test_values_that_are_no_numbers(changed: Callable[..., Comparison]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"][:2] = torch.tensor([torch.nan, 5.0])

    found = only(changed(change))
    assert (found.count, found.largest, found.relative) == (2, None, None)


def test_the_sign_of_zero_is_a_difference_without_size(source: Path, tmp_path: Path) -> None:
    folders = []
    for zero in (0.0, -0.0):
        folder = Path(shutil.copytree(source, tmp_path / str(zero)))
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"][0] = zero
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        folders.append(folder)
    found = only(compare(*map(describe, folders)))
    assert (found.count, found.largest, found.relative) == (1, 0, 0)


def test_shapes_and_dtypes(changed: Callable[..., Comparison]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        gain = tensors["model.layers.0.input_layernorm.weight"]
        tensors["model.layers.0.input_layernorm.weight"] = gain.to(torch.bfloat16)
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
        tensors["model.spare"] = tensors.pop("lm_head.weight")

    found = changed(change).tensors
    assert found is not None
    shape, dtype = found.different
    assert (str(shape.key), shape.shape, shape.count) == ("model.norm.weight", ([32], [31]), None)
    assert (str(dtype.key), dtype.dtype) == ("layer 0 input_layernorm.weight", ("float32", "bfloat16"))
    assert dtype.largest is not None
    assert 0 < dtype.largest < 2**-8
    assert ([str(key) for key in found.only_a], [str(key) for key in found.only_b]) == (
        ["lm_head.weight"],
        ["model.spare"],
    )


def test_tensors_are_known_by_the_layer_they_come_from(source: Path, tmp_path: Path) -> None:
    """Also where they are stored under another number, or twice."""
    run_export(source, tmp_path / "pruned", "A0 F0 A3 F3 A4 F4 A3 F3", form="plain")
    run_export(source, tmp_path / "paired", "A0 F0 [A1 A2] [F1 F2] A3 F3 A4 F4")
    found = compare(describe(source), describe(tmp_path / "pruned"))
    assert found.tensors is not None
    assert not found.tensors.different
    assert {(key.layers, key.copy) for key in found.tensors.only_a} == {((1,), 0), ((2,), 0)}
    assert {(key.layers, key.copy) for key in found.tensors.only_b} == {((3,), 1)}
    assert str(found.tensors.only_b[0]).startswith("layer 3 again ")
    assert set(found.config) == {"num_hidden_layers"}
    found = compare(describe(tmp_path / "pruned"), describe(tmp_path / "paired"))
    assert found.tensors is not None
    assert {key.layer for key in found.tensors.only_b} == {((1, 2), 0)}
    assert found.tensors.equal == 3 * 9 + 3
    assert found.facts["form"] == ("plain", "fused")
    assert found.files == {"modeling_surgeon_fused.py": "only in B"}


def test_files(source: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    (copy / "tokenizer_config.json").write_text("{}")
    (copy / "generation_config.json").unlink()
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    (copy / "README.md").write_text("tells of the checkpoint")
    found = compare(describe(source), describe(copy))
    assert found.files == {
        "chat_template.jinja": "only in B",
        "generation_config.json": "only in A",
        "tokenizer_config.json": "different",
    }
    assert not found.equal


@pytest.mark.parametrize(("family", "store"), [("gpt_neox", with_own_head), ("llama", with_head_only)])
def test_a_head_under_another_name_is_the_same(family: str, store: Callable[[Path], Path], tmp_path: Path) -> None:
    store(save_checkpoint(tmp_path / "source", family, 3))
    run_export(tmp_path / "source", tmp_path / "target", "{A1 F1 | A2 F2}")
    found = compare(describe(tmp_path / "source"), describe(tmp_path / "target")).tensors
    assert found is not None
    assert not found.different
    assert not found.only_b
    assert {key.layers for key in found.only_a} == {(0,)}
