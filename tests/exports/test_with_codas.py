"""A checkpoint and its codas appear together, proven, or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import surgeon
from surgeon.checkpoint.codas import Coda, read_codas
from surgeon.errors import NotProven
from surgeon.exports import in_memory
from surgeon.exports.in_memory import export_with_codas
from surgeon.language.program import Program
from surgeon.training.racks.model import rack_of
from surgeon.training.racks.partition import Racks
from tests.tiny_models import tiny_model

RACKS = Racks.parse("0:2,2:4", Program.dense(4), 1)


def coda() -> Coda:
    return rack_of(tiny_model("llama", 4), RACKS, 0, seed=1).coda()


def export(folder: Path, codas: list[Coda], nodes: list[int] = RACKS.ends, **options: Any) -> None:
    export_with_codas(tiny_model("llama", 4), folder, RACKS.texts, nodes, 1, codas, **options)


def test_both_are_written_in_one_dtype_and_replaced_together(tmp_path: Path) -> None:
    folder, written = tmp_path / "made", coda()
    export(folder, [written])
    found = read_codas(folder)
    assert found is not None
    assert all(torch.equal(one, written.tensors[name]) for name, one in found.coda(0).tensors.items())
    assert f"# {folder.name}" in (folder / "README.md").read_text()
    with pytest.raises(FileExistsError, match="pass `overwrite`"):
        export(folder, [written])
    export(folder, [written], dtype="bfloat16", overwrite=True)
    found = read_codas(folder)
    assert found is not None
    assert {one.dtype for one in found.coda(0).tensors.values()} == {torch.bfloat16}
    assert surgeon.load(folder).dtype == torch.float32
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_what_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "made"
    export(folder, [coda()])
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(NotProven, match="runs 8 steps or forks, and the racks have 6"):
        export(folder, [coda()], nodes=[4, 6], overwrite=True)
    write = in_memory.write_codas

    def another(folder: Path, racks: Any, nodes: Any, depth: int, codas: list[Coda], dtype: Any) -> None:
        changed = {name: one + 1 for name, one in codas[0].tensors.items()}
        write(folder, racks, nodes, depth, [replace(codas[0], tensors=changed)], dtype)

    monkeypatch.setattr(in_memory, "write_codas", another)
    with pytest.raises(NotProven, match="of the coda of rack 0 is not what was written"):
        export(folder, [coda()], overwrite=True)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_one_rack_has_no_codas(tmp_path: Path) -> None:
    export_with_codas(tiny_model("llama", 4), tmp_path / "made", ["0:4"], [8], 1, [])
    assert read_codas(tmp_path / "made") is None
