"""The regression on trials, against ordinary ridge regression on features that are written out."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from surgeon.searches.optimise import Damage
from surgeon.searches.surrogate import Surrogate, indicators

EDITS = 6
PAIRS = list(combinations(range(EDITS), 2))


def drawn(seed: int = 0) -> tuple[Damage, list[tuple[int, ...]], list[float]]:
    dice = np.random.default_rng(seed)
    prior = Damage(dice.uniform(0.01, 1, EDITS), np.zeros((EDITS, EDITS)))
    choices = [tuple(np.flatnonzero(dice.random(EDITS) < 0.5).tolist()) or (0,) for _ in range(9)]
    return prior, choices, [float(value) for value in dice.uniform(0.1, 3, len(choices))]


def features(choices: list[tuple[int, ...]], prior: Damage, own: float, cross: float) -> np.ndarray:
    """Each weight's feature, scaled so that its prior has unit variance."""
    chosen = indicators(choices, EDITS)
    pairs = np.stack([chosen[:, i] * chosen[:, j] * np.sqrt(prior.alone[i] * prior.alone[j]) for i, j in PAIRS], 1)
    return np.hstack([own * chosen * prior.alone, cross * pairs])


def test_it_is_the_regression_of_all_weights() -> None:
    prior, choices, measured = drawn()
    surrogate = Surrogate(prior, indicators(choices, EDITS), np.array(measured), own=0.3, cross=0.1)
    phi = features(choices, prior, 0.3, 0.1)
    noise = np.diag(1 / (0.01 * np.abs(measured)) ** 2)
    precision = phi.T @ noise @ phi + np.eye(phi.shape[1])
    residual = np.array(measured) - [prior.of(choice) for choice in choices]
    weights = np.linalg.solve(precision, phi.T @ noise @ residual)
    asked = [(0, 1), (2, 3, 5), (4,), tuple(range(EDITS))]
    wanted = [prior.of(one) for one in asked] + features(asked, prior, 0.3, 0.1) @ weights
    assert [surrogate.corrected.of(one) for one in asked] == pytest.approx(wanted.tolist(), rel=1e-6)
    row = features(asked, prior, 0.3, 0.1)
    deviation = np.sqrt(np.einsum("cf,fg,cg->c", row, np.linalg.inv(precision), row))
    assert surrogate.uncertainty(asked) == pytest.approx(deviation, rel=1e-5)


def test_what_was_measured_is_predicted() -> None:
    prior, choices, measured = drawn(3)
    by_choice = dict(zip(choices, measured, strict=True))
    surrogate = Surrogate.fit(prior, list(by_choice), list(by_choice.values()))
    for choice, value in by_choice.items():
        assert surrogate.corrected.of(choice) == pytest.approx(value, rel=0.1)
        assert surrogate.uncertainty([choice])[0] < Surrogate.fit(prior, [], []).uncertainty([choice])[0]


def test_without_trials_it_is_what_it_was_given() -> None:
    prior, _, _ = drawn()
    assert Surrogate.fit(prior, [], []).corrected is prior
