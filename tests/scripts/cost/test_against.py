"""Predicted against measured: what the table and the picture of scripts/cost/machine.py say."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from matplotlib.image import imread

from scripts.cost.machine import draw, lines, parse_link, plans, summary
from surgeon.language.program import Program
from surgeon.named import MODEL_FOLDER

CELL = {
    "model": "demo",
    "ranks": 2,
    "link": "1ms",
    "program": "attention || MLP",
    "batch": 8,
    "phase": "decode",
}
CELL |= {"predicted": 0.011, "measured": 0.010, "repeated": 0.03}
CELLS = pd.DataFrame(
    [CELL, CELL | {"predicted": 0.008}, CELL | {"phase": "prefill", "predicted": 0.0105}]
)
CELLS["off"] = CELLS["predicted"] / CELLS["measured"] - 1


def test_how_far_predictions_are_off_stands_first() -> None:
    assert summary(CELLS) == (
        "predictions are off by 10.0% (median), 20% at worst, 67% of them by at most 10%; half of the rounds "
        "differ from the other half by 3.0%, 3% at worst"
    )
    text = list(lines(CELLS, "one thread each"))
    assert text[0] == f"3 kinds of passes: {summary(CELLS)}."
    assert "| program attention \\|\\| MLP | 3 | 10.0% | 20% | 3.0% | 3% |" in text
    assert "| phase prefill | 1 | 5.0% | 5% | 3.0% | 3% |" in text
    assert "| demo | 2 | 1ms | attention \\|\\| MLP | 8 | decode | 8.00 | 10.00 | -20% | +3% |" in text
    assert text[-1] == "One thread each."


def test_the_picture_has_every_point(tmp_path: Path) -> None:
    draw(CELLS, tmp_path / "three.png")
    draw(CELLS[:1], tmp_path / "one.png")
    pictures = [imread(tmp_path / name) for name in ("three.png", "one.png")]
    assert pictures[0].std() > 0.05
    assert pictures[0].shape != pictures[1].shape or (pictures[0] != pictures[1]).any()


def test_one_program_of_each_kind_is_held_against_the_machine() -> None:
    found = plans(MODEL_FOLDER, MODEL_FOLDER, 2, 64)
    dense = Program.parse(found["dense"].program)
    syncs = {name: Program.parse(plan.program).sync_points(2) for name, plan in found.items()}
    assert dense == Program.dense(16)
    assert syncs == {
        "dense": 32,
        "lp": 24,
        "ladder": 32,
        "attention || MLP": 16,
        "tracks": 4,
        "low rank": 32,
    }
    assert ">A1" in found["ladder"].program
    assert "tracks" not in plans(MODEL_FOLDER, MODEL_FOLDER, 1, 64)
    assert {plan.low_rank for plan in found.values()} == {"auto", "gather"}


@pytest.mark.parametrize(
    ("text", "delay", "bandwidth"), [("0.2ms", 2e-4, float("inf")), ("10MB/s", 0.0, 1e7)]
)
def test_links_are_read(text: str, delay: float, bandwidth: float) -> None:
    way = parse_link(text)
    assert way.link is not None
    assert (way.name, way.link.delay, way.link.bandwidth) == (text, delay, bandwidth)
    assert parse_link("none").link is None
