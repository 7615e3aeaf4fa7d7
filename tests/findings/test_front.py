"""Pictures of fronts and of depths: that they show what is in the tables, which are written and read back."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest

from surgeon.findings.search import SearchResult
from surgeon.language.program import Program
from surgeon.searches.mixture import Trial
from surgeon.searches.pricing import pareto_front
from surgeon.searches.quantities import DEPTH
from surgeon.searches.results import quality_curves, quality_table, write_front
from tests.searches.test_front import ORIGINAL, PRICING, QUESTION, TRIALS, pairs, trial


def table(trials: list[Trial]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "trial": one.number,
            "source": one.source,
            "level": math.nan,
            "edits": "; ".join(map(str, one.choice)),
            "depth": Program.parse(one.key).effective_depth(2),
            "divergence": one.measured.divergence,
            "perplexity": one.measured.perplexity,
            "whole": one.measured.whole,
            "within": True,
            "program": one.key,
        }
        for one in trials
    )


def test_a_front_shows_its_points_and_how_many_trials_lie_far(tmp_path: Path) -> None:
    far = trial(9, pairs(0, 2, 4, 6), [math.inf] * 4), trial(10, pairs(2), [90.0] * 4)
    every = [*TRIALS, *far]
    front = write_front(
        tmp_path, pareto_front(every, QUESTION.traded_aspects, PRICING), QUESTION, "demo", "h" * 64
    )
    found = SearchResult(table(every), front=front, record={"num_layers": 8})
    figure = found.plot("front")
    (axes,) = figure.axes
    trials, _, shown = axes.lines  # those above are hollow, and a line of their own
    assert sorted(shown.get_xydata().tolist()) == [[5, 0.5], [6, 0.02], [7, pytest.approx(0.015)]]  # type: ignore[union-attr]
    assert len(trials.get_xydata()) == 7  # type: ignore[arg-type]  # not the one stopped early, nor the infinite one
    assert "1 point of 10 lies above" in axes.get_title(loc="left")
    assert axes.get_xlabel() == "effective depth (layers)"
    assert axes.get_ylim()[1] < 1


def test_curves_and_knees_are_drawn(tmp_path: Path) -> None:
    curves = quality_curves(DEPTH, TRIALS, ORIGINAL, PRICING, resamples=50)
    written = quality_table(curves)
    SearchResult.TABLES["quality"].write(tmp_path, written)
    found = SearchResult(
        table(TRIALS), quality=SearchResult.TABLES["quality"].read(tmp_path), record={"num_layers": 8}
    )
    (quality,) = found.plot("quality-against-depth").axes
    measured = [[7, pytest.approx(0.015)], [6, pytest.approx(0.03)], [5, 0.5]]
    assert quality.lines[0].get_xydata().tolist() == measured  # type: ignore[union-attr]
    assert quality.get_legend_handles_labels()[1] == ["pair", "drop", "all together", "knee"]
    assert quality.get_xlim() == (7.5, 4.5)
    sure = [curve for curve in curves if curve.knee is not None]
    rows = written[written["knee"]].set_index("space")
    assert {curve.name: (curve.low, curve.high, curve.share) for curve in sure} == {
        str(name): (row["knee_low"], row["knee_high"], row["knee_share"])
        for name, row in rows.iterrows()
    }
