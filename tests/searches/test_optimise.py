"""Choices of least predicted damage, against every choice there is."""

from __future__ import annotations

from itertools import combinations
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surgeon.searches import optimise
from surgeon.searches.optimise import Damage, Savings, Surrogate, best_choices, indicators

EDITS = 9


def problem(seed: int, limits: int, crossing: float) -> tuple[Damage, Savings, np.ndarray]:
    dice = np.random.default_rng(seed)
    alone = dice.lognormal(-3, 1.5, EDITS)
    cross = dice.normal(0, crossing, (EDITS, EDITS)) * np.sqrt(np.outer(alone, alone))
    cross = np.triu(cross, 1) + np.triu(cross, 1).T
    excluded = np.array([[abs(i - j) <= 1 for j in range(EDITS)] for i in range(EDITS)])
    each = dice.integers(1, 4, (EDITS, limits)).astype(float)
    return Damage(alone, cross), Savings(each, np.full(limits, 5.0)), excluded


def every_choice(savings: Savings, excluded: np.ndarray) -> list[tuple[int, ...]]:
    found = []
    for size in range(1, EDITS + 1):
        for chosen in combinations(range(EDITS), size):
            free = not any(excluded[i, j] for i, j in combinations(chosen, 2))
            if free and (savings.each[list(chosen)].sum(0) >= savings.need).all():
                found.append(chosen)
    return found


@given(st.integers(0, 10_000), st.integers(1, 2))
@settings(max_examples=40, derandomize=True)
def test_a_plain_sum_is_minimised_exactly_with_one_choice_of_a_group(seed: int, limits: int) -> None:
    damage, savings, excluded = problem(seed, limits, crossing=0)
    every = every_choice(savings, excluded)
    found = best_choices(damage, savings, excluded, beam=1)
    assert bool(found) == bool(every)
    if every:
        assert damage.total(found[0]) == pytest.approx(min(map(damage.total, every)))


@given(st.integers(0, 10_000))
@settings(max_examples=40, derandomize=True)
def test_cross_terms_are_taken_into_account(seed: int) -> None:
    damage, savings, excluded = problem(seed, 1, crossing=0.5)
    enough = every_choice(savings, excluded)
    every = sorted((chosen for chosen in enough if chosen[:-1] not in enough), key=damage.total)
    # Edits as bad as these may be part of the best choice here.
    with patch.object(optimise, "_HOPELESS", 1e9):
        found = best_choices(damage, savings, excluded, count=5)
    assert found[:1] == every[:1]
    assert [damage.total(one) for one in found] == sorted(damage.total(one) for one in found)
    assert set(found) <= set(every), "each saves enough, and its edits go together"


def test_what_cannot_be_saved_has_no_choice() -> None:
    damage, savings, excluded = problem(0, 1, 0)
    assert best_choices(damage, Savings(savings.each, np.array([1e3])), excluded) == []


@given(st.integers(0, 10_000), st.integers(0, 3))
@settings(max_examples=40, derandomize=True)
def test_what_is_scarce_is_not_used_up(seed: int, most: int) -> None:
    damage, savings, excluded = problem(seed, 1, crossing=0)
    taken = np.random.default_rng(seed).integers(0, 2, EDITS)
    every = [one for one in every_choice(savings, excluded) if taken[list(one)].sum() <= most]
    with patch.object(optimise, "_HOPELESS", 1e9):
        found = best_choices(damage, savings, excluded, 500, (taken, most), beam=500)
    assert all(one in every for one in found)
    assert bool(found) == bool(every)
    if every:
        assert damage.total(found[0]) == pytest.approx(min(map(damage.total, every)))


def test_damage_is_a_sum_over_edits_and_pairs_of_them() -> None:
    damage = Damage(
        np.array([1.0, 2.0, 4.0]), np.array([[0, 10, 20], [10, 0, 40], [20, 40, 0]], dtype=float)
    )
    assert damage.total([0, 2]) == 1 + 4 + 20
    assert damage.total([0, 1, 2]) == 7 + 70
    assert damage.total([]) == 0


COUNT = 6
PAIRS = list(combinations(range(COUNT), 2))


def drawn(seed: int = 0) -> tuple[Damage, list[tuple[int, ...]], list[float]]:
    dice = np.random.default_rng(seed)
    prior = Damage(dice.uniform(0.01, 1, COUNT), np.zeros((COUNT, COUNT)))
    choices = [tuple(np.flatnonzero(dice.random(COUNT) < 0.5).tolist()) or (0,) for _ in range(9)]
    return prior, choices, [float(value) for value in dice.uniform(0.1, 3, len(choices))]


def features(choices: list[tuple[int, ...]], prior: Damage, own: float, cross: float) -> np.ndarray:
    """Each weight's feature, scaled so that its prior has unit variance."""
    chosen = indicators(choices, COUNT)
    pairs = np.stack(
        [chosen[:, i] * chosen[:, j] * np.sqrt(prior.alone[i] * prior.alone[j]) for i, j in PAIRS], 1
    )
    return np.hstack([own * chosen * prior.alone, cross * pairs])


def test_it_is_the_regression_of_all_weights() -> None:
    prior, choices, measured = drawn()
    surrogate = Surrogate(prior, indicators(choices, COUNT), np.array(measured), own=0.3, cross=0.1)
    phi = features(choices, prior, 0.3, 0.1)
    noise = np.diag(1 / (0.01 * np.abs(measured)) ** 2)
    precision = phi.T @ noise @ phi + np.eye(phi.shape[1])
    residual = np.array(measured) - [prior.total(choice) for choice in choices]
    weights = np.linalg.solve(precision, phi.T @ noise @ residual)
    asked = [(0, 1), (2, 3, 5), (4,), tuple(range(COUNT))]
    wanted = [prior.total(one) for one in asked] + features(asked, prior, 0.3, 0.1) @ weights
    assert [surrogate.corrected_damage.total(one) for one in asked] == pytest.approx(
        wanted.tolist(), rel=1e-6
    )
    row = features(asked, prior, 0.3, 0.1)
    deviation = np.sqrt(np.einsum("cf,fg,cg->c", row, np.linalg.inv(precision), row))
    assert surrogate.uncertainty(asked) == pytest.approx(deviation, rel=1e-5)


def test_what_was_measured_is_predicted() -> None:
    prior, choices, measured = drawn(3)
    by_choice = dict(zip(choices, measured, strict=True))
    surrogate = Surrogate.fit(prior, list(by_choice), list(by_choice.values()))
    for choice, value in by_choice.items():
        assert surrogate.corrected_damage.total(choice) == pytest.approx(value, rel=0.1)
        assert surrogate.uncertainty([choice])[0] < Surrogate.fit(prior, [], []).uncertainty([choice])[0]


def test_without_trials_it_is_what_it_was_given() -> None:
    prior, _, _ = drawn()
    assert Surrogate.fit(prior, [], []).corrected_damage is prior
