"""The Pareto front against its definition, the knee against curves whose knee is known, and the files of a front."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from surgeon.cost.deployment import Deployment, Workload
from surgeon.language.operations.applied import Edit
from surgeon.language.recipe import read_recipe
from surgeon.quality.summary import Quality
from surgeon.searches.mixture import Trial
from surgeon.searches.pricing import Pricing, non_dominated, pareto_front
from surgeon.searches.quantities import DEPTH, Aspect
from surgeon.searches.question import PricedQuestion, Question
from surgeon.searches.results import (
    TOGETHER,
    bootstrapped_knee,
    knee_of,
    lower_envelope,
    quality_curves,
    quality_table,
    write_front,
)
from tests.cost.examples import model

EIGHT = model(num_hidden_layers=8)
SETTINGS = Question("pair,drop", None, "divergence,depth")
MIXTURE = SETTINGS.mixture(EIGHT)
PRICING = Pricing(EIGHT, (Aspect("depth"),), Deployment(2), Workload(1, 5, 4))


def trial(number: int, choice: tuple[Edit, ...], divergences: list[float], whole: bool = True) -> Trial:
    mean = float(np.mean(divergences))
    measured = Quality(9.0, divergence=mean, windows={"divergence": tuple(divergences)}, whole=whole)
    return Trial(str(MIXTURE.program(choice)), "window", choice, number=number, measured=measured)


def pairs(*first: int) -> tuple[Edit, ...]:
    return tuple(Edit(layer, layer + 2, "pair") for layer in first)


ORIGINAL = Quality(8.0, divergence=0.0, windows={"divergence": (0.0,) * 4})
QUESTION = PricedQuestion(SETTINGS, MIXTURE, PRICING, ORIGINAL)
TRIALS = [
    trial(0, pairs(0), [0.3, 0.2, 0.4, 0.3]),
    trial(1, pairs(4), [0.01, 0.02, 0.01, 0.02]),
    trial(2, pairs(2, 4), [0.02, 0.03, 0.04, 0.03]),
    trial(3, pairs(0, 2, 4), [0.5, 0.4, 0.6, 0.5]),
    trial(4, (Edit(6, 7, "drop"),), [0.2, 0.1, 0.2, 0.1]),
    trial(5, (Edit(2, 4, "pair"), Edit(6, 7, "drop")), [0.01, 0.01, 0.01, 0.0], whole=False),
    trial(6, (Edit(2, 4, "pair"), Edit(6, 7, "drop")), [0.02, 0.02, 0.02, 0.02]),
]


def test_the_front_is_what_nothing_dominates() -> None:
    draw = np.random.default_rng(0)
    for columns in (1, 2, 3):
        costs = draw.integers(0, 6, (60, columns)).astype(float)
        costs[::9] = math.inf
        kept = set(map(int, non_dominated(costs)))
        for row, own in enumerate(costs):
            beaten = any((other <= own).all() and (other < own).any() for other in costs)
            first = not any((costs[before] == own).all() for before in range(row))
            assert (row in kept) == (np.isfinite(own).all() and not beaten and first)


def test_points_of_a_front() -> None:
    front = pareto_front(TRIALS, QUESTION.traded_aspects, PRICING)
    assert [one.number for one in front] == [1, 6, 3]  # not 5, which was stopped early
    assert PRICING.costs(QUESTION.traded_aspects, front[0]) == (pytest.approx(0.015), 7)


def test_the_knee_of_known_curves() -> None:
    """Of two straight lines it is where they meet."""
    depths = np.arange(16.0, 3.0, -1)
    for corner in (12.0, 9.0, 6.0):
        bent = np.where(
            depths >= corner, 0.01 * (16 - depths), 0.01 * (16 - corner) + 0.2 * (corner - depths)
        )
        assert knee_of(depths, bent) == corner
    # x - y of y = (e^{kx} - 1) / (e^k - 1) is largest where y' = 1: x = ln((e^k - 1) / k) / k.
    x, k = np.linspace(0, 1, 101), 5.0
    rising = np.expm1(k * x) / np.expm1(k)
    assert knee_of(100 * (1 - x), rising) == pytest.approx(
        100 * (1 - np.log(np.expm1(k) / k) / k), abs=0.51
    )
    assert knee_of(depths, 16 - depths) is None
    assert knee_of(depths, np.zeros(13)) is None
    assert knee_of(depths[:2], np.array([0.0, 1.0])) is None
    assert knee_of(depths, np.sqrt(16 - depths)) is None  # it hurts most at first


def test_the_envelope_is_the_best_of_all_that_are_as_shallow() -> None:
    depths, least = lower_envelope(
        np.array([8.0, 7, 7, 6, 5, 4]), np.array([0, 0.3, 0.2, 0.1, 0.4, 1.7])
    )
    assert depths.tolist() == [8, 7, 6, 5]  # what diverges by more than 1 is left out
    assert least.tolist() == [0, 0.1, 0.1, 0.4]


def test_the_interval_of_a_knee_is_as_wide_as_windows_differ() -> None:
    draw = np.random.default_rng(1)
    depths = np.arange(16.0, 5.0, -1)
    bent = np.where(depths >= 10, 0.005 * (16 - depths), 0.03 + 0.08 * (10 - depths))
    calm = bent[:, None] * draw.uniform(0.95, 1.05, (11, 12))
    wild = bent[:, None] * draw.lognormal(0, 1.2, (11, 12))
    sure, unsure = (bootstrapped_knee(depths, windows, resamples=300) for windows in (calm, wild))
    assert sure == (10, 10, 10, 1)
    _, low, high, _ = unsure
    assert high - low > 1
    again = bootstrapped_knee(depths, wild, resamples=300)
    assert again == unsure


def test_curves_by_space_and_together() -> None:
    curves = {
        curve.name: curve for curve in quality_curves(DEPTH, TRIALS, ORIGINAL, PRICING, resamples=50)
    }
    assert list(curves) == ["pair", "drop", TOGETHER]
    numbers = {
        name: [point.trial and point.trial.number for point in curve.points]
        for name, curve in curves.items()
    }
    assert numbers == {"pair": [None, 1, 2, 3], "drop": [None, 4], "all together": [None, 1, 6, 3]}
    assert [point.cost for point in curves["pair"].points] == [8, 7, 6, 5]
    first = curves["pair"].points[0]
    assert (first.divergence, first.low, first.high) == (0, 0, 0)
    # Student's t for 95% and 3 degrees of freedom
    half = 3.182446 * np.std([0.02, 0.03, 0.04, 0.03], ddof=1) / 2
    assert curves["pair"].points[2].high == pytest.approx(0.03 + half)
    assert curves["pair"].knee == 6
    assert curves["pair"].line().startswith("pair: the knee is at depth 6 of 8 (95% interval")
    assert curves["pair"].line().endswith("looked for as far as depth 5, within a divergence of 1 nat")
    beyond = [*TRIALS, trial(9, pairs(0, 2, 4, 6), [7.0] * 4)]
    far = quality_curves(DEPTH, beyond, ORIGINAL, PRICING, resamples=50)[0]
    assert far.points[-1].cost == 4
    assert far.line() == curves["pair"].line()  # what is another model altogether moves no knee
    assert curves["drop"].line() == "drop: no knee between depth 8 and depth 7"


def test_files_of_a_front(tmp_path: Path) -> None:
    (tmp_path / "front").mkdir()
    (tmp_path / "front" / "09-recipe.yaml").write_text("old")
    front = pareto_front(TRIALS, QUESTION.traded_aspects, PRICING)
    table = write_front(tmp_path, front, QUESTION, "a model", "0" * 64)
    assert table["divergence"].tolist() == pytest.approx([0.015, 0.02, 0.5])
    assert table["depth"].tolist() == [7, 6, 5]
    assert table["trial"].tolist() == [1, 6, 3]
    assert sorted(path.name for path in (tmp_path / "front").iterdir()) == [
        f"0{n}-recipe.yaml" for n in (1, 2, 3)
    ]
    for point, name in zip(front, table["recipe"], strict=True):
        recipe = read_recipe(tmp_path / name)
        assert str(recipe.program(8, shapes=EIGHT.shapes.layer_shapes)) == point.key
        assert recipe.weights == "0" * 64


def test_the_table_of_quality_against_a_cost() -> None:
    table = quality_table(quality_curves(DEPTH, TRIALS, ORIGINAL, PRICING, resamples=50))
    own = table[table["space"] == "pair"]
    assert set(own["along"]) == {"depth"}
    assert own["cost"].tolist() == [8, 7, 6, 5]
    assert own["knee"].tolist() == [False, False, True, False]
    assert own["edits"].tolist()[1:3] == ["pair 4:6", "pair 2:4; pair 4:6"]


def test_a_recipe_says_what_it_comes_to() -> None:
    mixture = Question("par:3").mixture(EIGHT)
    expect = mixture.recipe((Edit(0, 3, "par"),), "m", "0" * 64).expect
    # Two a layer that is alone, one for the group.
    assert (expect.effective_depth, expect.sync_points) == (6, 11)
