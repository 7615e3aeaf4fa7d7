"""The picture of quality against depth: what is in it, and which range it shows."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path

import matplotlib.image
import pytest
from matplotlib.figure import Figure

from surgeon.report.depth import draw_quality_against_depth
from surgeon.search.study import MeasuredProgram, Trial

INFINITE = MeasuredProgram(math.inf, math.inf, math.nan, math.nan, 100)


def measured(divergence: float) -> MeasuredProgram:
    return MeasuredProgram(10 + 10 * divergence, divergence, divergence * 0.9, divergence * 1.1, 100)


def test_poor_trials_do_not_squeeze_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    keep = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **more: (figures.append(self), keep(self, *args, **more))
    )
    trials = [Trial(i, "window", (i,), measured(0.01 * (1 + i))) for i in range(6)]
    trials += [Trial(6, "sampled", (7,), measured(50.0)), Trial(7, "neighbour", (8,), measured(0.005))]
    profile = {8.0: measured(0.0), 7.0: measured(0.004), 6.0: measured(0.008)}
    path = tmp_path / "depth.png"
    draw_quality_against_depth(path, profile, trials, trials[-1], 6.0, "a title")
    assert matplotlib.image.imread(path).shape[1] > 1000
    for axes, name in zip(figures[0].axes, ("perplexity", "divergence"), strict=True):
        low, high = axes.get_ylim()
        values = sorted(getattr(trial.measured, name) for trial in trials)
        assert low < values[0]
        assert values[4] < high < values[-1]
        assert "lie above" in axes.texts[0].get_text()
    assert "divergence" in figures[0].axes[1].get_ylabel()
    assert [p.name for p in tmp_path.iterdir()] == ["depth.png"]


@pytest.mark.parametrize("finite", [0, 1, 2])
def test_infinite_trials_lie_above(finite: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *_, **__: texts.extend(t.get_text() for t in self.axes[0].texts)
    )
    monkeypatch.setattr("surgeon.report.depth.whole_file", nullcontext)
    trials = [Trial(i, "window", (i,), measured(0.01 * (1 + i))) for i in range(finite)]
    trials += [Trial(i, "window", (i,), INFINITE) for i in range(finite, 4)]
    profile = {4.0: measured(0.0), 3.0: INFINITE}
    draw_quality_against_depth(tmp_path / "depth.png", profile, trials, trials[0], 3.0, "a title")
    assert texts == [f"{4 - finite} of 4 trials lie above"]
