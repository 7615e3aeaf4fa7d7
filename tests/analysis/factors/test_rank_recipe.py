"""Allocated ranks as recipes, and the text that they name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surgeon.analysis.factors.matrices import Matrix
from surgeon.analysis.factors.ranks import Curve, RankBudget, as_operation, parse_budget
from surgeon.analysis.subject import calibration_entry, load_calibration, load_recorded
from surgeon.language.operations.lowrank import Calibration
from surgeon.language.recipe import Recipe, parse_recipe
from surgeon.language.sublayer import LayerShapes
from surgeon.opened import open_model

SHAPES = LayerShapes({"q": (8, 8), "o": (8, 8), "down": (8, 12)})


def test_ranks_become_an_entry_of_a_recipe() -> None:
    ranks = {
        **{Matrix.of(layer, "q"): 3 for layer in (1, 2)},
        Matrix.of(1, "o"): None,
        Matrix.of(2, "o"): None,
        Matrix.of(1, "down"): 2,
        Matrix.of(2, "down"): None,
    }
    operation = as_operation(ranks, "whitened", {"data": "text.txt", "tokens": 64})
    written = Recipe("some/model", (operation,)).to_yaml()
    assert (
        '- lowrank: {layers: "1:3", ranks: {"q": 3, "down": [2, null]}, method: "whitened", calib'
        in written
    )
    program = parse_recipe(written).program(4, shapes=SHAPES)
    assert str(program) == "A0 F0 A1@q3 F1@down2 A2@q3 F2 A3 F3"
    assert "calibration" not in as_operation(ranks, "plain", {"data": "text.txt"}).parameters


def test_what_follows_measured_text_is_found_again(tiny_checkpoint: Path, tiny_text: Path) -> None:
    found = load_calibration(str(tiny_checkpoint), str(tiny_text), tokens=130, wanted=96, window=32)
    named = calibration_entry(found, after=128)
    assert named["data"] == str(tiny_text.resolve())
    again = load_recorded(open_model(tiny_checkpoint), named)
    assert again.ids.equal(found.ids)
    assert again.digest == found.digest
    tiny_text.write_text(tiny_text.read_text().replace("dog", "cat"))
    with pytest.raises(
        ValueError, match=re.escape("is not what the recipe was made with: its tokens have sha256:")
    ):
        load_recorded(open_model(tiny_checkpoint), named)
    tiny_text.unlink()
    with pytest.raises(FileNotFoundError, match="the calibration text is gone: there is no file"):
        load_recorded(open_model(tiny_checkpoint), named)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"after": 33}, "calibration: after must be whole windows of 32 tokens, not 33"),
        ({"tokens": 31}, "calibration: tokens must be at least one window of 32, not 31"),
        ({"after": 320000}, "of which 320000 are left out"),
    ],
)
def test_texts_that_cannot_be_used(
    changed: Any, said: str, tiny_checkpoint: Path, tiny_text: Path
) -> None:
    named: Calibration = {"data": str(tiny_text), "window": 32, "tokens": 64}
    assert load_recorded(open_model(tiny_checkpoint), named).ids.shape == (2, 32)
    with pytest.raises(ValueError, match=re.escape(said)):
        load_recorded(open_model(tiny_checkpoint), {**named, **changed})
    with pytest.raises(ValueError, match="calibration has no text; add data"):
        load_recorded(open_model(tiny_checkpoint), {})


def test_a_share_checks_itself() -> None:
    for keep in (0, 1.2):
        with pytest.raises(ValueError, match=f"keep must be more than 0 and at most 1, not {keep}"):
            RankBudget("params", keep, relative=True)


def test_budgets() -> None:
    one = Curve(Matrix.of(0, "q"), (8, 8), np.ones(8))
    other = Curve(Matrix.of(0, "o"), (8, 8), np.ones(8))
    for text, amount in {
        "params=0.5x": 64,
        "params = 1,000": 1000,
        "weight_bytes=2KB": 2000,
        "weight_bytes=0.25x": 0.25 * 128 * 2,
        "wire_bytes=0.5x": 0.5 * 2 * 8 * 2,
    }.items():
        assert parse_budget(text, 2).amount([one, other]) == amount
    assert parse_budget("wire_bytes=1KB", 2).cost(other, 3) == 2 * 2 * 3
    assert parse_budget("weight_bytes=1KB", 2).cost(one, 3) == 2 * 3 * 16


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0.6", "'0.6' is no budget; write e.g. params=0.6x"),
        ("weight_byte=1", "there is no budget on 'weight_byte'; did you mean 'weight_bytes'?"),
        ("params=many", "'many' in the budget 'params=many' is no number"),
        ("params=-1", "params must be more than 0, not -1"),
        ("wire_bytes=1.5x", "wire_bytes must be more than 0 and at most 1, not 1.5"),
        ("weight_bytes=big", "'big' is no amount of memory"),
    ],
)
def test_budgets_that_make_no_sense(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_budget(text, 2)
