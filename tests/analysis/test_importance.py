"""The importance of units against the criteria's equations, written out on what hooks and backward passes see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from surgeon.analysis import importance as importance_module
from surgeon.analysis.engine import machine
from surgeon.analysis.importance import unit_importance
from surgeon.language.operations.width import Criterion
from surgeon.language.program import Program
from surgeon.models.edit import edit
from surgeon.opened import load, load_streamed, open_model
from tests.analysis.spectra import inputs_of, matrix_of, places, text
from tests.tiny_models import HEADS, tiny_model

Array = NDArray[np.float64]
TEXT = text(6, 12, 6)
PARTS = [("A", 0), ("F", 0), ("A", 1), ("F", 1)]
GROUPED = {"llama": 2, "phi3": 2}  # heads that share a KV head


def importance(
    model: Any, by: Criterion, folder: Path | None = None, **more: Any
) -> dict[tuple[str, int], Array]:
    found = unit_importance(model, dict.fromkeys(PARTS, by), TEXT, folder, **more)
    return {part: values.numpy() for part, values in found.items()}


def by_unit(family: str, kind: str, features: Array) -> Array:
    """Sums over the features of neurons, or of the heads of each KV group."""
    return features if kind == "F" else features.reshape(HEADS // GROUPED.get(family, 1), -1).sum(1)


def by_inputs(family: str, model: Any, kind: str, layer: int, by: str) -> Array:
    """Of a sublayer, by what its output projection gets from transformers' own model."""
    place = places(family, model, layer)["o" if kind == "A" else "down"]
    (seen,) = inputs_of(model, [place[0]], TEXT.ids)
    if by == "wanda":
        return by_unit(family, kind, np.abs(matrix_of(place)).sum(0) * np.linalg.norm(seen, axis=0))
    if kind == "F":
        return np.asarray(np.abs(seen).mean(0))
    heads = np.linalg.norm(seen.reshape(len(seen), HEADS, -1), axis=2).mean(0)
    return heads.reshape(-1, GROUPED.get(family, 1)).sum(1)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "phi3"])
@pytest.mark.parametrize("by", ["activation", "wanda"])
def test_units_by_what_they_give(family: str, by: Criterion, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine.TOKENS_AT_ONCE, "cpu", 48)  # two walks
    model = tiny_model(family, 2)
    found = importance(model, by)
    assert list(found) == PARTS
    for (kind, layer), values in found.items():
        np.testing.assert_allclose(values, by_inputs(family, model, kind, layer, by), rtol=1e-5)


def test_what_a_folder_has_is_not_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = tiny_model("llama", 2), list[str]()
    first = unit_importance(model, {("A", 0): "wanda"}, TEXT, tmp_path)

    def counted(*args: Any) -> Any:
        seen.extend(f"{kind}{layer}" for kind, layer in args[3])
        return by_inputs_really(*args)

    by_inputs_really = importance_module._by_inputs
    monkeypatch.setattr(importance_module, "_by_inputs", counted)
    found = importance(model, "wanda", tmp_path)
    assert seen == ["F0", "A1", "F1"]
    np.testing.assert_array_equal(found["A", 0], first["A", 0].numpy())
    again = importance(model, "wanda", tmp_path)
    assert len(seen) == 3
    assert all(np.array_equal(again[part], found[part]) for part in PARTS)
    with pytest.raises(ValueError, match="holds a ranking of units of another model"):
        importance(model, "wanda", tmp_path, model_hash="another")


def test_a_streamed_model_has_the_same(tiny_checkpoint: Path) -> None:
    opened = open_model(tiny_checkpoint)
    wanted: dict[tuple[str, int], Criterion] = {("A", 1): "activation", ("F", 3): "wanda"}
    there = unit_importance(load(opened), wanted, TEXT)
    streamed = load_streamed(opened)
    for part, values in unit_importance(streamed, wanted, TEXT).items():
        torch.testing.assert_close(values, there[part])


def test_units_in_a_program_of_the_models_own() -> None:
    model = tiny_model("llama", 3)
    edit(model, Program.parse("A0 F0 {A1/2:0 F1/2:0 | A1/2:1 F1/2:1}"))
    with pytest.raises(ValueError, match="whose weights are those of no layer"):
        importance(model, "activation")
    edit(model, Program.parse("A0 F0 [A1 F1] A1"))
    found = importance(model, "activation")
    assert list(found) == PARTS
    with pytest.raises(ValueError, match="does not run F2"):
        unit_importance(model, {("F", 2): "wanda"}, TEXT)
