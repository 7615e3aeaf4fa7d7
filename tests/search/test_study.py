"""The study on a made-up measure whose best choice is known: what it finds, and that a killed one goes on the same."""

from __future__ import annotations

import json
import math
from itertools import combinations, pairwise
from pathlib import Path

import pandas as pd
import pytest

from surgeon.program import Program
from surgeon.recipe import read_recipe
from surgeon.search.proposals import neighbour
from surgeon.search.results import write_results
from surgeon.search.space import best_pairs, contiguous_windows, pairs_program
from surgeon.search.study import MeasuredProgram, PairStudy

LAYERS, COUNT = 10, 3


def damage_of(program: Program) -> float:
    """Every pair costs something of its own, and two pairs next to each other cost more than their sum."""
    pairs = [k for k in range(LAYERS - 1) if f"[A{k} A{k + 1}]" in str(program)]
    alone = sum(0.01 * (1 + abs(k - 5)) for k in pairs)
    return alone + sum(0.05 for a, b in pairwise(pairs) if b - a == 2)


def measure(programs: list[Program]) -> dict[Program, MeasuredProgram]:
    return {p: MeasuredProgram(10 + damage_of(p), damage_of(p), 0.0, 1.0, 100) for p in programs}


def make(folder: Path, seed: int = 0, **settings: object) -> PairStudy:
    return PairStudy(folder, LAYERS, 2, COUNT, seed, measure, {"model": "a", **settings})


def rows(study: PairStudy) -> list[tuple[str, tuple[int, ...], float]]:
    return [(trial.source, trial.pairs, trial.measured.divergence) for trial in study.finished()]


def test_the_first_trials_are_the_papers_windows_and_the_additive_choice(tmp_path: Path) -> None:
    study = make(tmp_path)
    list(study.run(12))
    found = rows(study)
    assert found[0][:2] == ("window", contiguous_windows(LAYERS, COUNT)[0])
    assert found[1][:2] == ("additive", best_pairs([-d for d in study.pair_damage()], COUNT))
    assert {pairs for source, pairs, _ in found if source == "window"} == set(contiguous_windows(LAYERS, COUNT))
    assert {source for source, _, _ in found[6:]} == {"neighbour", "sampled"}


def test_it_finds_the_best_choice(tmp_path: Path) -> None:
    study = make(tmp_path)
    list(study.run(60))
    every = [c for c in combinations(range(LAYERS - 1), COUNT) if all(b - a > 1 for a, b in pairwise(c))]
    best = min(damage_of(pairs_program(choice, LAYERS)) for choice in every)
    assert study.best().measured.divergence == pytest.approx(best)
    assert study.best().measured.divergence < min(d for source, _, d in rows(study) if source in ("window", "additive"))


def test_stopped_anywhere_it_goes_on_to_the_same_result(tmp_path: Path) -> None:
    whole = make(tmp_path / "whole")
    list(whole.run(20))
    for stop in (0, 1, 7, 13):
        running = make(tmp_path / "stopped").run(20)
        for _ in range(stop - len(make(tmp_path / "stopped").finished())):
            next(running)
        running.close()
    dying = make(tmp_path / "stopped")
    dying.study.ask()  # a trial that a killed process never finished
    last = make(tmp_path / "stopped")
    list(last.run(20))
    assert rows(last) == rows(whole)


@pytest.mark.parametrize("finite", [(), (3, 6, 8), tuple(range(LAYERS - 1))[2:]], ids=["none", "three", "most"])
def test_programs_that_overflow_are_infinitely_bad(finite: tuple[int, ...], tmp_path: Path) -> None:
    def overflowing(programs: list[Program]) -> dict[Program, MeasuredProgram]:
        found = measure(programs)
        for program in programs:
            if any(f"[A{k} A{k + 1}]" in str(program) for k in range(LAYERS - 1) if k not in finite):
                found[program] = MeasuredProgram(math.inf, math.inf, math.nan, math.nan, 100)
        return found

    studies = [PairStudy(tmp_path, LAYERS, 2, COUNT, 0, overflowing, {}) for _ in range(2)]
    list(studies[0].run(10))
    list(studies[1].run(16))
    best = studies[1].best()
    assert math.isfinite(best.measured.divergence) == bool(finite)
    assert set(best.pairs) <= set(finite) or not finite
    write_results(tmp_path, "model", studies[1], {"command": "surgeon search", "model_hash": "0" * 64})
    table = pd.read_csv(tmp_path / "trials.csv")
    assert (table["divergence"].isin([math.inf]) == table["divergence_low"].isna()).all()
    record = json.loads((tmp_path / "search.json").read_text(), parse_constant=pytest.fail)  # no Infinity, no NaN
    assert record["best"]["divergence"] == (best.measured.divergence if finite else None)
    recipe = (tmp_path / "recipe.yaml").read_text()
    assert ("divergence inf nats" in recipe) == ("95% interval" not in recipe) == (not finite)
    assert read_recipe(tmp_path / "recipe.yaml").program(LAYERS) == studies[1].program(best.pairs)


def test_other_seeds_search_elsewhere(tmp_path: Path) -> None:
    found = []
    for seed in (0, 1):
        study = make(tmp_path / str(seed), seed)
        list(study.run(20))
        found.append([pairs for source, pairs, _ in rows(study) if source == "sampled"])
    assert found[0] != found[1]


def test_a_folder_of_another_search_is_refused(tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(ValueError, match="another model \\(a, not b\\)"):
        PairStudy(tmp_path, LAYERS, 2, COUNT, 0, measure, {"model": "b"})


def test_the_profile_goes_from_dense_down_to_the_budget(tmp_path: Path) -> None:
    profile = make(tmp_path).profile()
    assert list(profile) == [10, 9, 8, 7]
    assert profile[10].divergence == 0
    assert make(tmp_path).profile() == profile


def test_neighbours_are_other_feasible_choices() -> None:
    for seed in range(30):
        found = neighbour((1, 3, 6), [0.1] * (LAYERS - 1), {(1, 3, 6), (1, 3, 7)}, seed)
        assert found is not None
        assert found not in {(1, 3, 6), (1, 3, 7)}
        assert len(found) == 3
        assert all(b - a > 1 for a, b in pairwise(found))
    assert neighbour((0,), [0.0], {(0,)}, 0) is None
