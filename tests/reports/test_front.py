"""Pictures of fronts: that they show what they are given, read back from the figures that are saved."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from surgeon.reports.front import draw_depths, draw_front
from surgeon.searches.front import depth_curves, pareto_front
from tests.searches.test_front import OBJECTIVES, ORIGINAL, PRICING, TRIALS, pairs, trial


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every figure that is saved."""
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **b: (figures.append(self), save(self, *a, **b))[1])
    return figures


def texts(figure: Any) -> str:
    return " | ".join(each.get_text() for axes in figure.axes for each in axes.texts)


def test_a_front_shows_its_points_and_how_many_trials_lie_far(tmp_path: Path, drawn: list[Figure]) -> None:
    far = trial(9, pairs(0, 2, 4, 6), [math.inf] * 4), trial(10, pairs(2), [90.0] * 4)
    every = [*TRIALS, *far]
    draw_front(tmp_path / "front.png", pareto_front(every, OBJECTIVES, PRICING), every, OBJECTIVES, PRICING, "title")
    (axes,) = drawn[0].axes
    assert (tmp_path / "front.png").read_bytes()[:4] == b"\x89PNG"
    front = axes.collections[1].get_offsets()
    assert sorted(map(tuple, front.tolist())) == [(5, 0.5), (6, 0.02), (7, pytest.approx(0.015))]  # type: ignore[union-attr]
    assert len(axes.collections[0].get_offsets()) == 7  # not the one stopped early, nor the infinite one
    assert "1 of 7 trials lie above" in texts(drawn[0])
    assert axes.get_xlabel() == "effective depth (layers)"
    assert axes.get_ylim()[1] < 1


def test_curves_and_knees_are_drawn(tmp_path: Path, drawn: list[Figure]) -> None:
    curves = depth_curves(TRIALS, ORIGINAL, PRICING, resamples=50)
    draw_depths(tmp_path / "depths.png", curves, "title")
    linear, quality, knees = drawn[0].axes
    measured = [[7, pytest.approx(0.015)], [6, 0.03], [5, 0.5]]
    assert linear.lines[0].get_xydata().tolist() == [[8, 0], *measured]  # type: ignore[union-attr]
    assert quality.lines[0].get_xydata().tolist() == measured  # type: ignore[union-attr]
    assert [each.get_text() for each in knees.get_yticklabels()] == ["pair", "drop", "all together"]
    assert "none" in texts(drawn[0])  # of dropping a single layer
    assert quality.get_xlim() == (8.5, 4.5)
