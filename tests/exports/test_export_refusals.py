"""Exports that are refused: what cannot be proven, or cannot be written, never gets its name."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import surgeon
from surgeon.checkpoint import tensor_file
from surgeon.checkpoint.forms.fused import FusedPlanner
from surgeon.checkpoint.forms.planning import whole_matrix
from surgeon.checkpoint.tensor_file import PlannedTensor
from surgeon.errors import NotProven
from surgeon.exports.export import check_exportable, plan_export
from surgeon.opened import open_model
from tests.checkpoint.helpers import (
    run_export,
    save_source,
    weights_of,
)

PRUNED = "A0 F0 A2 F2 A3 F3 A5 F5"
PAIRS = "A0 F0 [A1 A2] [F1 F2] A3 F3 [A4 A5] [F4 F5]"
LADDER = "A0 F0 A1 F1 >A3 >F3 >A4 >F4"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_fold_is_refused_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    save_source(tmp_path / "source", dtype=dtype)
    right = FusedPlanner._weight

    def forgets_one_gain(self: Any, sublayers: Any, projection: Any, read: Any) -> Tensor:
        if projection.role != "up":
            return right(self, sublayers, projection, read)
        matrices = [whole_matrix(projection.role, sublayer, read) for sublayer in sublayers]
        return torch.cat([matrix.float() for matrix in matrices])

    monkeypatch.setattr(FusedPlanner, "_weight", forgets_one_gain)
    with pytest.raises(NotProven, match="the fused form does not compute what the program does"):
        run_export(tmp_path / "source", tmp_path / "out" / "target", PAIRS)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("program", [PRUNED, PAIRS, LADDER])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_damage_while_writing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, dtype: torch.dtype
) -> None:
    save_source(tmp_path / "source", dtype=dtype)
    right = tensor_file.content_of
    count = [0]

    def damages_one(planned: PlannedTensor) -> Iterator[memoryview]:
        count[0] += 1
        if count[0] == 9:  # within what rounding to bfloat16 may do to logits
            return right(
                replace(planned, rows=lambda: (rows * 1.02 for rows in planned.rows()), blocks=None)
            )
        return right(planned)

    monkeypatch.setattr(tensor_file, "content_of", damages_one)
    with pytest.raises(NotProven, match="as written|written with other values"):
        run_export(tmp_path / "source", tmp_path / "out" / "target", program)
    assert list((tmp_path / "out").iterdir()) == []


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = save_source(tmp_path / "source")
    model.model.layers[2].mlp.up_proj.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match="logits that are not finite"):
        run_export(tmp_path / "source", tmp_path / "target", PAIRS.replace("F1", "F2~F1"))
    assert not (tmp_path / "target").exists()


def test_the_old_checkpoint_stays_if_the_new_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_source(tmp_path / "source")
    run_export(tmp_path / "source", tmp_path / "target", PRUNED)
    before = hash_of(tmp_path / "target")

    def full(_: PlannedTensor) -> Iterator[memoryview]:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tensor_file, "content_of", full)
    with pytest.raises(OSError, match=r"filled up: 47\d KB are needed"):
        run_export(tmp_path / "source", tmp_path / "target", PAIRS, overwrite=True)
    assert hash_of(tmp_path / "target") == before
    assert {path.name for path in tmp_path.iterdir()} == {"source", "target"}


def test_a_disk_that_cannot_hold_it_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_source(tmp_path / "source")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match=r"too full: 47\d KB are needed, 1 KB are free"):
        run_export(tmp_path / "source", tmp_path / "new" / "target", PAIRS)
    assert not (tmp_path / "new").exists()


def test_sources_that_cannot_be_exported_are_refused(tmp_path: Path) -> None:
    save_source(tmp_path / "source")
    run_export(tmp_path / "source", tmp_path / "fused", PAIRS)
    run_export(tmp_path / "source", tmp_path / "program", LADDER)
    for name in ("fused", "program"):
        with pytest.raises(ValueError, match=f"edited checkpoint already .{name} form"):
            check_exportable(open_model(tmp_path / name))
    config = tmp_path / "source" / "config.json"
    text = config.read_text()
    config.write_text(json.dumps(json.loads(text) | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ValueError, match="quantization_config in config.json has bits None"):
        check_exportable(open_model(tmp_path / "source"))
    config.write_text(text.replace('"llama"', '"bloom"'))
    with pytest.raises(ValueError, match="'bloom' is not supported"):
        check_exportable(open_model(tmp_path / "source"))


def test_missing_and_unknown_tensors_are_said_by_name(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_source(tmp_path / "source")
    weights = weights_of(tmp_path / "source")
    file = tmp_path / "source" / "model.safetensors"
    less = {
        name: tensor for name, tensor in weights.items() if name != "model.layers.2.mlp.up_proj.weight"
    }
    save_file(less, file)
    with pytest.raises(
        ValueError, match=r"lacks a tensor of its model: model.layers.2.mlp.up_proj.weight"
    ):
        check_exportable(open_model(tmp_path / "source"))
    save_file(weights | {"model.layers.2.lora.weight": torch.zeros(3)}, file)
    with pytest.raises(ValueError, match=r"model.layers.2.lora.weight is no tensor of Llama"):
        plan_export(open_model(tmp_path / "source"), surgeon.Program.parse(PRUNED))
    save_file(weights | {"score.weight": torch.zeros(3)}, file)
    with pytest.raises(ValueError, match=r"score.weight is no tensor of Llama"):
        check_exportable(open_model(tmp_path / "source"))
    save_file({name: t for name, t in weights.items() if name != "model.norm.weight"}, file)
    with pytest.raises(ValueError, match=r"lacks a tensor of its model: model.norm.weight"):
        run_export(tmp_path / "source", tmp_path / "target", PRUNED)
    save_file(weights | {"model.layers.2.self_attn.rotary_emb.inv_freq": torch.zeros(4)}, file)
    run_export(tmp_path / "source", tmp_path / "target", PRUNED)
    assert not any("inv_freq" in name for name in weights_of(tmp_path / "target"))


@pytest.mark.parametrize("where", ["source", "source/inner", "."])
def test_the_target_must_lie_apart_from_the_source(tmp_path: Path, where: str) -> None:
    save_source(tmp_path / "source")
    before = hash_of(tmp_path / "source")
    with pytest.raises(ValueError, match="must lie apart"):
        run_export(tmp_path / "source", tmp_path / where, PRUNED, overwrite=True)
    assert hash_of(tmp_path / "source") == before


def hash_of(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(path.name.encode() + (path.read_bytes() if path.is_file() else b""))
    return digest.hexdigest()


def test_what_rounding_changes_too_much_is_to_be_stored_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_source(tmp_path / "source", dtype=torch.bfloat16)
    monkeypatch.setattr("surgeon.exports.prove.WRITTEN_TOLERANCE", {torch.bfloat16: 1e-9})
    with pytest.raises(
        NotProven, match=r"logits as written differ by .*: store it in float32 \(--dtype float32\)"
    ):
        run_export(tmp_path / "source", tmp_path / "out", PAIRS)
    assert not (tmp_path / "out").exists()
