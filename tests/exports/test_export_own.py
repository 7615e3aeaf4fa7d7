"""Recipes for models that run a program of their own (native tracks), as checkpoints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from surgeon.checkpoint.describe import describe
from surgeon.exports.export import check_exportable, plan_export, write_export
from surgeon.language.recipe import parse_recipe
from surgeon.opened import open_model
from surgeon.training.scratch.tracks import track_program
from tests.checkpoint.helpers import load_shipped, logits_of, plain_logits, relative_error, save_source
from tests.stored import configure

RECIPE = """
surgeon: 1
model: native
operations:
  - prune: {layers: "1:2"}
  - lowrank: {layers: "2:4", ranks: {q: [3, 4]}}
"""
CHANGED = "{A0 F0 | A2@q3 F2 A3@q4 F3}"


def save_tracks(folder: Path, family: str) -> tuple[object, str]:
    """Two tracks of two layers; returns the layers' model, and the program."""
    model = save_source(folder, family, 4)
    program, _ = track_program(2, 2, 2, steps_per_layer=1 if family == "gpt_neox" else 2)
    configure(folder, model_type=f"surgeon_{family}", surgeon_program=str(program))
    return model, str(program)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_recipe_changes_the_tracks(family: str, tmp_path: Path) -> None:
    model, own = save_tracks(tmp_path / "native", family)
    changed = CHANGED if family == "llama" else re.sub(r"(A\d\S*) (F\d)", r"[\1 \2]", CHANGED)
    original = open_model(tmp_path / "native")
    program = original.program_of(parse_recipe(RECIPE))
    assert str(program) == changed
    write_export(plan_export(original, program), tmp_path / "edited")
    assert (
        relative_error(logits_of(load_shipped(tmp_path / "edited")), plain_logits(model, changed)) < 1e-4
    )
    found = describe(tmp_path / "edited")
    assert (str(found.unedited), str(found.program), str(found.form)) == (own, changed, "program")
    assert json.loads((tmp_path / "edited" / "surgeon.json").read_text())["source"]["program"] == own
    with pytest.raises(
        ValueError, match="program of its own, which only the program form has; leave form out"
    ):
        plan_export(original, program, "plain")
    with pytest.raises(ValueError, match="is an edited checkpoint already .program form"):
        check_exportable(open_model(tmp_path / "edited"))  # whose layers are not whole


def test_what_is_no_record(tmp_path: Path) -> None:
    _, own = save_tracks(tmp_path, "llama")
    report = {"program": own, "source": {"model": "x", "num_layers": 4, "program": 3}}
    (tmp_path / "surgeon.json").write_text(json.dumps(report))
    with pytest.raises(ValueError, match="is not what surgeon export writes"):
        describe(tmp_path)
