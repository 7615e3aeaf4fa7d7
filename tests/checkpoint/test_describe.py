"""Comparing checkpoints: what differs, and that everything else is called equal."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from surgeon.checkpoint.describe import Comparison, compare, describe
from surgeon.language.program import Program
from surgeon.language.sublayer import layers_text, size_lines
from tests.checkpoint.helpers import run_export
from tests.stored import with_head_only, with_own_head
from tests.tiny_models import save_checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("compared") / "tiny", num_layers=5)


@pytest.fixture
def changed(
    source: Path, tmp_path: Path
) -> Callable[[Callable[[dict[str, Tensor]], object]], Comparison]:
    """Compares the source with a copy whose tensors a function changed."""

    def run(change: Callable[[dict[str, Tensor]], object]) -> Comparison:
        copy = Path(shutil.copytree(source, tmp_path / "copy"))
        tensors = load_file(copy / "model.safetensors")
        change(tensors)
        save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
        return compare(describe(source), describe(copy))

    return run


def only(found: Comparison) -> tuple[str, str]:
    """The one tensor that differs, and how."""
    assert not any((found.config, found.files, found.only_a, found.only_b))
    ((name, difference),) = found.different.items()
    return name, difference


def test_a_copy_is_equal(source: Path, changed: Callable[..., Comparison]) -> None:
    found = changed(lambda _: None)
    assert found.is_equal
    assert found.equal == len(load_file(source / "model.safetensors"))


@pytest.mark.parametrize("part", [1 << 24, 640])
def test_values(
    source: Path, monkeypatch: pytest.MonkeyPatch, changed: Callable[..., Comparison], part: int
) -> None:
    """In one go and row by row, against whole tensors."""
    monkeypatch.setattr("surgeon.checkpoint.describe.PART", part)
    name = "model.layers.3.mlp.down_proj.weight"
    before = load_file(source / "model.safetensors")[name]

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name][2, 5] += 0.5
        tensors[name][30, 7] -= 2

    said = f"2 of {before.numel():,} values, by 2 at most"
    assert only(changed(change)) == ("layer 3 mlp.down_proj.weight", said)


def test_values_that_are_no_numbers(changed: Callable[..., Comparison]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"][:2] = torch.tensor([torch.nan, 5.0])

    assert only(changed(change)) == ("model.norm.weight", "2 of 32 values, by nan at most")


def test_the_sign_of_zero_is_a_difference_without_size(source: Path, tmp_path: Path) -> None:
    folders = []
    for zero in (0.0, -0.0):
        folder = Path(shutil.copytree(source, tmp_path / str(zero)))
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"][0] = zero
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        folders.append(folder)
    found = compare(describe(folders[0]), describe(folders[1]))
    assert only(found) == ("model.norm.weight", "1 of 32 values, by 0 at most")


def test_shapes_and_dtypes(changed: Callable[..., Comparison]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        gain = tensors["model.layers.0.input_layernorm.weight"]
        tensors["model.layers.0.input_layernorm.weight"] = gain.to(torch.bfloat16)
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
        tensors["model.spare"] = tensors.pop("lm_head.weight")

    found = changed(change)
    assert found.different["model.norm.weight"] == "shape [32] | [31]"
    narrowed = re.fullmatch(
        r"dtype float32 \| bfloat16, (\d+) of 32 values, by (.+) at most",
        found.different["layer 0 input_layernorm.weight"],
    )
    assert narrowed is not None
    assert 0 < float(narrowed[2]) < 2**-7
    assert (found.only_a, found.only_b) == (["lm_head.weight"], ["model.spare"])


def test_tensors_are_known_by_the_layer_they_come_from(source: Path, tmp_path: Path) -> None:
    """Also where they are stored under another number, or twice."""
    run_export(source, tmp_path / "pruned", "A0 F0 A3 F3 A4 F4 A3 F3", form="plain")
    run_export(source, tmp_path / "paired", "A0 F0 [A1 A2] [F1 F2] A3 F3 A4 F4")
    found = compare(describe(source), describe(tmp_path / "pruned"))
    assert not found.different
    assert {name.rpartition(" ")[0] for name in found.only_a} == {"layer 1", "layer 2"}
    assert {name.rpartition(" ")[0] for name in found.only_b} == {"layer 3 again"}
    assert set(found.config) == {"num_hidden_layers"}
    found = compare(describe(tmp_path / "pruned"), describe(tmp_path / "paired"))
    assert {name.rpartition(" ")[0] for name in found.only_b} == {"layer 1+2"}
    assert found.equal == 3 * 9 + 3
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
    assert not found.is_equal


@pytest.mark.parametrize(("family", "store"), [("gpt_neox", with_own_head), ("llama", with_head_only)])
def test_a_head_under_another_name_is_the_same(
    family: str, store: Callable[[Path], Path], tmp_path: Path
) -> None:
    store(save_checkpoint(tmp_path / "source", family, 3))
    run_export(tmp_path / "source", tmp_path / "target", "{A1 F1 | A2 F2}")
    found = compare(describe(tmp_path / "source"), describe(tmp_path / "target"))
    assert not found.different
    assert not found.only_b
    assert {name.split()[1] for name in found.only_a} == {"0"}


@pytest.mark.parametrize(
    ("program", "lines"),
    [
        ("A0 F0 [A1 A2] >F1", []),
        ("A0@q5,o6 F0@up5,gate7", ["layer 0: q, up 5; o 6; gate 7"]),
        ("A0@q5 F0 A1@q5 F1 A2 F2@up5 A3@q5", ["layers 0 to 1, 3: q 5", "layer 2: up 5"]),
        ("F1@up3 {A0@k2 A1 | A2/2:0@k2}", ["layers 0, 2: k 2", "layer 1: up 3"]),
        ("A0~A1@v4 F0~F1 A2~A3@v4 F2@up4", ["layers 0+1 to 2+3: v 4", "layer 2: up 4"]),
        ("A0@q5 A0 F0@up2 F0@up3", ["layer 0: q 5 or whole; up 2 or 3"]),
        (
            "A0#3@q3 F0#40 A1#3@q3 F1#40 A2 F2#3",
            ["layers 0 to 1: KV groups 3; q 3; neurons 40", "layer 2: neurons 3"],
        ),
        ("A0#3 A0", ["layer 0: KV groups 3 or whole"]),
        (
            " ".join(f"A{k}@q{8 + k % 2}" for k in range(12)),
            ["layers 0, 2, 4, 6, 8, 10: q 8", "layers 1, 3, 5, 7, 9, 11: q 9"],
        ),
    ],
)
def test_equal_ranks_are_said_once(program: str, lines: list[str]) -> None:
    assert size_lines(Program.parse(program).sublayers()) == lines


def test_layers_by_their_numbers() -> None:
    assert layers_text([((2,), 0)]) == "layer 2"
    assert layers_text([((2,), 0), ((4,), 0), ((5,), 0), ((5,), 1)]) == "layers 2, 4 to 5, 5 again"
