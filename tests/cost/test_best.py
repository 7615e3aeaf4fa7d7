"""Which program wins: against predictions made one by one, and the budget against what programs are."""

from __future__ import annotations

import pytest

from surgeon.cost.best import PAYS, SYSTEMS, Allowance, Choice, choices, known_programs, reaches, seconds, survey
from surgeon.cost.deployment import Deployment
from surgeon.cost.predict import Prediction, predict
from surgeon.cost.sweep import sweep
from surgeon.cost.workload import Workload
from tests.cost.examples import hardware, model

MODEL = model(num_hidden_layers=12)
LOAD = Workload(1, 16, 8)
SLOW = hardware(hop="1e-3")


def names(budget: Allowance) -> list[str]:
    return [one.name for one in known_programs(MODEL, budget)]


def test_the_budget_says_what_may_be_chosen() -> None:
    assert names(Allowance()) == ["dense", "halves", "lp", "ladder", "ladder-over-lp", "fused", "tracks:4"]
    assert names(Allowance(keep=0.5)) == ["dense", *SYSTEMS]
    assert names(Allowance(depth=12)) == ["dense", "halves", "ladder", "tracks:4"]
    assert names(Allowance(depth=10)) == ["dense", "halves", "lp", "ladder", "ladder-over-lp", "tracks:4"]
    assert names(Allowance(allowed=("lp",))) == ["dense", "lp"]


def test_pairs_are_made_until_the_depth_is_reached() -> None:
    by_name = {one.name: one.program(2) for one in known_programs(MODEL, Allowance(depth=10))}
    assert by_name["lp"].effective_depth() == 10
    assert by_name["ladder-over-lp"].effective_depth() == 10
    assert str(by_name["lp"]).count("[") == 2 * 2
    most = {one.name: one.program(2) for one in known_programs(MODEL, Allowance())}
    assert most["lp"].effective_depth() == 12 - 4


def test_low_ranks_leave_the_share_that_is_asked_for() -> None:
    made = {one.name: one.program(2) for one in known_programs(MODEL, Allowance(keep=0.5))}
    sublayer = next(made["lp+lowrank"].sublayers())
    assert sublayer.rank("q") == 64 * 64 // 2 // 128
    assert made["lp+lowrank"].whole() == made["lp"]


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ({"depth": 13}, "effective depth of 12 layers is from 1 to 12, not 13"),
        ({"allowed": ("lpp",)}, "there is no program 'lpp' to choose; did you mean 'lp'"),
        ({"keep": 2}, "keep must be more than 0 and at most 1, not 2"),
        ({"allowed": ("lp",), "depth": 12}, "the budget leaves no program but the dense one"),
    ],
)
def test_impossible_budgets_are_refused(budget: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        known_programs(MODEL, Allowance(**budget))  # type: ignore[arg-type]


def alone(name: str, ranks: int) -> Prediction:
    program = next(one.program(ranks) for one in known_programs(MODEL, Allowance()) if one.name == name)
    return predict(MODEL.shapes, program, SLOW, LOAD, Deployment(ranks))


def test_the_winner_is_the_fastest_of_predictions_one_by_one() -> None:
    known = known_programs(MODEL, Allowance())
    (found,) = survey(known, SLOW, Deployment(), LOAD, {"ranks": [2]})
    times = {one.name: alone(one.name, 2).per_token for one in known}
    assert found.winner == min(times, key=lambda name: times[name])
    assert found.speedup == pytest.approx(times["dense"] / times[found.winner])
    assert found.by_program["lp"] == pytest.approx(times["dense"] / times["lp"])
    assert found.link == "wire"


def test_where_nothing_pays_the_dense_program_wins() -> None:
    (found,) = survey(known_programs(MODEL, Allowance()), SLOW, Deployment(), LOAD, {"ranks": [1]})
    assert (found.winner, found.speedup) == ("dense", 1.0)
    assert all(speedup < PAYS for speedup in found.by_program.values())


@pytest.mark.parametrize("metric", ["token", "first", "rate"])
def test_what_is_to_be_short_is_measured(metric: str) -> None:
    one = alone("lp", 2)
    expected = {"token": one.per_token, "first": one.first_token, "rate": one.total / 8}
    assert seconds(one, metric) == pytest.approx(expected[metric])  # type: ignore[arg-type]


def test_what_does_not_fit_is_left_out() -> None:
    small = hardware(memory="1e5")
    cells = sweep(known_programs(MODEL, Allowance()), small, Deployment(2), LOAD, {"batch": [1]})
    (found,) = choices(cells, "wire", "token")
    assert found.dense is None
    assert not found.by_program


def test_a_program_reaches_to_where_it_pays_for_the_last_time() -> None:
    dense = alone("dense", 2)
    rows = [(1, 1.5, 1.0), (2, 1.01, 1.0), (4, 1.2, 1.0), (8, 1.0, 1.0), (16, 0.9, 1.0)]
    found = reaches([Choice(2, batch, "wire", dense, {"lp": lp, "ladder": late}) for batch, lp, late in rows])
    assert [(one.program, one.starts, one.stops, one.never, one.best) for one in found] == [
        ("lp", None, 8, False, 1.5),
        ("ladder", None, None, True, 1.0),
    ]
    assert reaches([Choice(2, 1, "wire", dense, {"lp": 1.5})])[0].stops is None
    late = reaches([Choice(2, batch, "wire", dense, {"lp": 0.9 + batch / 10}) for batch in (1, 2, 4)])[0]
    assert (late.starts, late.stops) == (2, None)
